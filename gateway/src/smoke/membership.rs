//! Workers that come, go, drain and move while requests run.

use super::client::{post, stream};
use super::workers::{PrefillScript, Script, Workers};
use super::{Stack, completion};
use crate::fleet::{Change, Member, Standing};
use serde_json::{Value, json};
use shared::control::Role;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// A gateway whose fleet the test decides on.
struct Scene {
    stack: Stack,
    changes: mpsc::Sender<Change>,
}

/// Scripted workers that say `text` for ever, a token in 10 ms.
async fn workers(name: &'static str, text: &str) -> Arc<Workers> {
    let script =
        Script { name, endless: true, token_delay: Duration::from_millis(10), ..Script::saying(&[text]) };
    Workers::start(script).await
}

fn member(role: Role, id: &str, addr: Option<String>, standing: Standing) -> Change {
    Change::Present(Member { role, id: id.to_owned(), addr, standing, reported: None })
}

impl Scene {
    /// With the workers of `first` in the fleet.
    async fn with(first: &Arc<Workers>) -> Self {
        let (changes, discovery) = mpsc::channel(64);
        let scene = Self {
            stack: Stack::over(first.clone(), discovery, |s| s.reconnect_wait = Duration::from_secs(5)).await,
            changes,
        };
        scene.set("a", first, Standing::Alive).await;
        scene.bridged().await;
        scene
    }

    /// Both workers of a script, under `id`.
    async fn set(&self, id: &str, workers: &Arc<Workers>, standing: Standing) {
        for change in [
            member(Role::Decode, id, Some(workers.decode_addr()), standing),
            member(Role::Prefill, id, workers.prefill_addr(), standing),
        ] {
            self.changes.send(change).await.unwrap();
        }
    }

    async fn ask(&self, extra: &Value) -> super::client::Reply {
        post(self.stack.addr, "/v1/completions", &[], &completion(extra)).await
    }

    /// Asks until the answer comes from `name`, each time with a prompt that may be at home elsewhere.
    async fn served_by(&self, name: &str) -> super::client::Reply {
        for attempt in 0..100 {
            let prompt = format!("{attempt:03}{}", "x".repeat(100));
            let reply = self.ask(&json!({"prompt": prompt})).await;
            if reply.status == 200 && reply.verdict()["decode"].as_str().is_some_and(|d| d.ends_with(name)) {
                return reply;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("never served by {name}");
    }

    /// Asks until a bridge succeeds.
    async fn bridged(&self) {
        for _ in 0..100 {
            let reply = self.ask(&json!({})).await;
            if reply.status == 200 && reply.verdict()["verdict"] == "complete" {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("never bridged");
    }
}

#[tokio::test]
async fn workers_come_drain_and_go_and_what_runs_is_finished() {
    let (a, b) = (workers("a", "A").await, workers("b", "B").await);
    let s = Scene::with(&a).await;
    for leaving in [Standing::Draining, Standing::Alive] {
        let body = completion(&json!({"stream": true, "max_tokens": 100}));
        let mut running = stream(s.stack.addr, "/v1/completions", &[], &body).await;
        running.wait_for("\"A\"").await;
        s.set("b", &b, Standing::Alive).await;
        if leaving == Standing::Draining {
            s.set("a", &a, Standing::Draining).await;
        } else {
            for role in [Role::Decode, Role::Prefill] {
                s.changes.send(Change::Absent(role, "a".into())).await.unwrap();
            }
        }
        let reply = s.served_by("b").await;
        assert!(reply.body.contains("BBBBBBBB"), "{reply:?}");
        for _ in 0..5 {
            assert!(s.ask(&json!({})).await.verdict()["decode"].as_str().unwrap().ends_with('b'));
        }
        // 100 tokens in all, each once.
        running.wait_for("[DONE]").await;
        assert_eq!(running.count("\"A\""), 100);
        // And back.
        s.set("a", &a, Standing::Alive).await;
        for role in [Role::Decode, Role::Prefill] {
            s.changes.send(Change::Absent(role, "b".into())).await.unwrap();
        }
        s.served_by("a").await;
        s.bridged().await;
    }
}

#[tokio::test]
async fn a_worker_that_moves_is_followed() {
    let (a, b) = (workers("a", "A").await, workers("b", "B").await);
    let s = Scene::with(&a).await;
    // The same name, another port and another process.
    s.set("a", &b, Standing::Alive).await;
    s.served_by("b").await;
    s.bridged().await;
    // Not running for a while: requests wait for it to come back.
    s.changes.send(member(Role::Decode, "a", None, Standing::Alive)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let back = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        s.set("a", &a, Standing::Alive).await;
    };
    let plain = json!({});
    let (reply, ()) = tokio::join!(s.ask(&plain), back);
    assert!(reply.status == 200 && reply.body.contains('A'), "{reply:?}");
}

#[tokio::test]
async fn a_suspect_gets_no_new_bridge_and_is_the_last_resort() {
    let (a, b) = (workers("a", "A").await, workers("b", "B").await);
    let s = Scene::with(&a).await;
    for standing in [Standing::Suspect, Standing::Lost] {
        s.set("a", &a, standing).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        let reply = s.ask(&json!({})).await;
        assert_eq!((reply.status, reply.verdict()["verdict"].as_str()), (200, Some("native")), "{reply:?}");
        assert_eq!(reply.verdict()["reason"], "no_prefill_worker");
    }
    s.set("b", &b, Standing::Alive).await;
    s.served_by("b").await;
    for _ in 0..5 {
        assert!(s.ask(&json!({})).await.verdict()["decode"].as_str().unwrap().ends_with('b'));
    }
    s.set("a", &a, Standing::Draining).await;
    s.set("b", &b, Standing::Draining).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let begun = std::time::Instant::now();
    assert_eq!(s.ask(&json!({})).await.status, 503);
    assert!(begun.elapsed() >= Duration::from_secs(4), "someone might have come back");
}

#[tokio::test]
async fn a_forgotten_decoder_is_introduced_again_for_the_request_that_needs_it() {
    let s = Stack::plain(Script { prefill: Some(PrefillScript::Forgets), ..Script::saying(&["ok"]) }).await;
    for _ in 0..2 {
        let r = post(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
        assert_eq!((r.status, r.verdict()["verdict"].as_str()), (200, Some("complete")), "{r:?}");
    }
}

#[tokio::test]
async fn a_busy_decoder_is_spared_and_a_prefix_stays_at_home() {
    let (a, b) = (workers("a", "A").await, workers("b", "B").await);
    let s = Scene::with(&a).await;
    // Scripted prefill workers know only the decoder of their own script, so these answer alone.
    s.changes.send(Change::Absent(Role::Prefill, "a".into())).await.unwrap();
    s.changes.send(member(Role::Decode, "b", Some(b.decode_addr()), Standing::Alive)).await.unwrap();
    s.served_by("b").await;
    // The same prompt, one at a time: always the same decoder.
    let home = s.ask(&json!({"prompt": "home ".repeat(30)})).await.verdict()["decode"].clone();
    for _ in 0..5 {
        assert_eq!(s.ask(&json!({"prompt": "home ".repeat(30)})).await.verdict()["decode"], home);
    }
    // Many at once: both work.
    let body = completion(&json!({"prompt": "home ".repeat(30), "max_tokens": 40}));
    let many = (0..8).map(async |i: u64| {
        tokio::time::sleep(Duration::from_millis(20 * i)).await;
        post(s.stack.addr, "/v1/completions", &[], &body).await.verdict()["decode"].to_string()
    });
    let mut used = futures_util::future::join_all(many).await;
    used.sort();
    used.dedup();
    assert_eq!(used.len(), 2, "{used:?}");
}
