//! The bus itself: connections to a real nats-server.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use async_nats::Subscriber;
use futures_util::StreamExt as _;
use pd_tests::nats::Nats;
use shared::bus::Bus;
use std::time::Duration;

/// Says it until it is heard: a subscription is on its way to the server for a while, and what is said before is lost.
async fn is_heard(speaker: &Bus, heard: &mut Subscriber, text: &'static str) {
    let listening = async {
        loop {
            speaker.client.publish("pd.v1.test.x", text.into()).await.unwrap();
            let next = tokio::time::timeout(Duration::from_millis(200), heard.next()).await;
            if next.is_ok_and(|message| message.unwrap().payload == text) {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(15), listening).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_survives_a_restart_of_the_server() {
    let mut nats = Nats::start();
    let (speaker, listener) = (nats.connect().await, nats.connect().await);
    let mut heard = listener.client.subscribe("pd.v1.test.x").await.unwrap();
    is_heard(&speaker, &mut heard, "1").await;
    let (mut a, mut b) = (speaker.connects(), listener.connects());
    // The event of a connection may come after its first message.
    for connects in [&mut a, &mut b] {
        drop(connects.wait_for(|n| *n > 0).await.unwrap());
    }
    nats.restart();
    let both = async { tokio::join!(a.changed(), b.changed()) };
    let (a, b) = tokio::time::timeout(Duration::from_secs(15), both).await.unwrap();
    a.unwrap();
    b.unwrap();
    is_heard(&speaker, &mut heard, "2").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_later_is_found() {
    let mut nats = Nats::start();
    nats.kill();
    let bus = Bus::connect_in_background(&nats.settings(), "test", "test").await.unwrap();
    assert!(!bus.is_connected());
    assert!(Bus::connect(&nats.settings(), "test", "test").await.is_err(), "an impatient caller is told");
    nats.restart();
    let mut connects = bus.connects();
    let found = connects.wait_for(|n| *n > 0);
    tokio::time::timeout(Duration::from_secs(15), found).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_login_needs_its_key() {
    let keys = Nats::start();
    let ((file, public), (other, _)) = (keys.new_key("a"), keys.new_key("b"));
    let nats = Nats::with_config(&format!("authorization {{ users = [ {{ nkey: {public} }} ] }}"));
    let connect = async |file| Bus::connect(&nats.settings_with(file, None), "test", "test").await;
    assert!(connect(Some(&file)).await.is_ok());
    assert!(connect(Some(&other)).await.is_err());
    assert!(connect(None).await.is_err());
}
