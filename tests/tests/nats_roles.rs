//! Keys and permissions of the bus on a real nats-server: each role can do its job, and nothing else.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use async_nats::{Client, ConnectOptions, Message, Subscriber};
use futures_util::StreamExt as _;
use pd_tests::lab::Lab;
use pd_tests::wait;
use shared::bus::{Bus, BusArgs};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Subjects of every kind, of this node and of another, some of them nobody's.
fn subjects() -> Vec<String> {
    [
        "pd.v1.heartbeat.spark",
        "pd.v1.heartbeat.mac",
        "pd.v1.heartbeat.spark.more",
        "pd.v1.cmd.spark",
        "pd.v1.cmd.mac",
        "pd.v1.out.spark.c1",
        "pd.v1.out.mac.c1",
        "pd.v1.credit.spark.c1",
        "pd.v1.credit.mac.c1",
        "pd.v1.audit.spark",
        "pd.v1.audit.mac",
        "pd.v1.gateway.main",
        "pd.v1.gateway.other",
        "pd.v1.worker.spark.rates",
        "pd.v1.worker.mac.rates",
        "pd.v1.elsewhere",
        "pd.v2.heartbeat.spark",
        "_INBOX.pd.operator.a.1",
        "_INBOX.pd.agent.a.1",
        "_INBOX.pd.viewer.a.1",
        "_INBOX.a.1",
        "$SYS.REQ.SERVER.PING",
        "$JS.API.INFO",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Wider than one subject.
const WILD: [&str; 12] = [
    ">",
    "pd.>",
    "pd.v1.>",
    "pd.v1.heartbeat.*",
    "pd.v1.cmd.*",
    "pd.v1.out.*.*",
    "pd.v1.credit.spark.*",
    "pd.v1.audit.*",
    "pd.v1.gateway.*",
    "pd.v1.worker.>",
    "_INBOX.>",
    "$SYS.>",
];

struct Case {
    role: &'static str,
    key: &'static str,
    publish: &'static [&'static str],
    subscribe: &'static [&'static str],
}

const CASES: [Case; 5] = [
    Case {
        role: "gateway",
        key: "gateway-main/gateway.nk",
        publish: &["pd.v1.gateway.main"],
        subscribe: &[
            "pd.v1.heartbeat.spark",
            "pd.v1.heartbeat.mac",
            "pd.v1.heartbeat.spark.more",
            "pd.v1.heartbeat.*",
        ],
    },
    Case {
        role: "agent",
        key: "node-spark/agent.nk",
        publish: &["pd.v1.heartbeat.spark", "pd.v1.out.spark.c1", "pd.v1.audit.spark"],
        subscribe: &["pd.v1.cmd.spark", "pd.v1.credit.spark.c1", "pd.v1.credit.spark.*"],
    },
    Case {
        role: "worker",
        key: "node-spark/worker.nk",
        publish: &["pd.v1.worker.spark.rates"],
        subscribe: &[],
    },
    Case {
        role: "operator",
        key: "operator-main/operator.nk",
        publish: &["pd.v1.cmd.spark", "pd.v1.cmd.mac", "pd.v1.credit.spark.c1", "pd.v1.credit.mac.c1"],
        subscribe: &[
            "pd.v1.heartbeat.spark",
            "pd.v1.heartbeat.mac",
            "pd.v1.heartbeat.spark.more",
            "pd.v1.out.spark.c1",
            "pd.v1.out.mac.c1",
            "pd.v1.audit.spark",
            "pd.v1.audit.mac",
            "pd.v1.gateway.main",
            "pd.v1.gateway.other",
            "_INBOX.pd.operator.a.1",
            "pd.v1.heartbeat.*",
            "pd.v1.out.*.*",
            "pd.v1.audit.*",
            "pd.v1.gateway.*",
        ],
    },
    Case {
        role: "viewer",
        key: "viewer-main/viewer.nk",
        publish: &[],
        subscribe: &[
            "pd.v1.heartbeat.spark",
            "pd.v1.heartbeat.mac",
            "pd.v1.heartbeat.spark.more",
            "pd.v1.audit.spark",
            "pd.v1.audit.mac",
            "pd.v1.gateway.main",
            "pd.v1.gateway.other",
            "pd.v1.heartbeat.*",
            "pd.v1.audit.*",
            "pd.v1.gateway.*",
        ],
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn each_role_may_use_its_own_subjects_and_no_others() {
    let lab = Lab::new(&["--node", "spark,mac"]);
    let (concrete, wild) = (subjects(), WILD.map(str::to_owned));
    let all = [&concrete[..], &wild[..]].concat();
    for case in CASES {
        let mut user = lab.user(case.role, case.key).await;
        assert_eq!(user.may_publish(&concrete).await, case.publish, "{} publishes", case.role);
        assert_eq!(user.may_subscribe(&all).await, case.subscribe, "{} subscribes", case.role);
    }
}

/// Publishes until it is heard: a subscription of another connection is in force when the server has read it.
async fn heard(speaker: &Client, subject: &str, listener: &mut Subscriber) -> Message {
    for _ in 0..50 {
        speaker.publish(subject.to_owned(), subject.to_owned().into()).await.unwrap();
        if let Ok(Some(message)) = tokio::time::timeout(Duration::from_millis(200), listener.next()).await {
            return message;
        }
    }
    panic!("nothing arrives on {subject}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_role_can_do_its_job() {
    let lab = Lab::new(&["--node", "spark,mac"]);
    let gateway = lab.bus("gateway", "gateway-main/gateway.nk").await.client;
    let agent = lab.bus("agent", "node-spark/agent.nk").await.client;
    let operator = lab.bus("operator", "operator-main/operator.nk").await.client;
    let viewer = lab.bus("viewer", "viewer-main/viewer.nk").await.client;
    let paths = [
        (&agent, &gateway, "pd.v1.heartbeat.spark", "pd.v1.heartbeat.*"),
        (&agent, &operator, "pd.v1.heartbeat.spark", "pd.v1.heartbeat.*"),
        (&agent, &viewer, "pd.v1.heartbeat.spark", "pd.v1.heartbeat.*"),
        (&agent, &operator, "pd.v1.out.spark.c1", "pd.v1.out.spark.c1"),
        (&agent, &operator, "pd.v1.audit.spark", "pd.v1.audit.*"),
        (&agent, &viewer, "pd.v1.audit.spark", "pd.v1.audit.*"),
        (&operator, &agent, "pd.v1.credit.spark.c1", "pd.v1.credit.spark.*"),
        (&gateway, &operator, "pd.v1.gateway.main", "pd.v1.gateway.*"),
        (&gateway, &viewer, "pd.v1.gateway.main", "pd.v1.gateway.*"),
    ];
    for (from, to, subject, pattern) in paths {
        let mut listener = to.subscribe(pattern).await.unwrap();
        assert_eq!(heard(from, subject, &mut listener).await.payload, subject);
    }
    let mut commands = agent.subscribe("pd.v1.cmd.spark").await.unwrap();
    heard(&operator, "pd.v1.cmd.spark", &mut commands).await;
    let answering = tokio::spawn(async move {
        while let Some(command) = commands.next().await {
            let Some(inbox) = command.reply else { continue };
            assert!(inbox.starts_with("_INBOX.pd.operator."), "{inbox}");
            agent.publish(inbox, "accepted".into()).await.unwrap();
        }
    });
    assert_eq!(operator.request("pd.v1.cmd.spark", "run".into()).await.unwrap().payload, "accepted");
    answering.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_given_once_and_to_nobody_who_did_not_ask() {
    let lab = Lab::new(&["--node", "spark,mac"]);
    let mut agent = lab.user("agent", "node-spark/agent.nk").await;
    let operator = lab.bus("operator", "operator-main/operator.nk").await.client;
    let mut commands = agent.client.subscribe("pd.v1.cmd.spark").await.unwrap();
    heard(&operator, "pd.v1.cmd.spark", &mut commands).await;
    let reply = operator.new_inbox();
    operator.publish_with_reply("pd.v1.cmd.spark", reply.clone(), "run".into()).await.unwrap();
    while commands.next().await.unwrap().reply.is_none() {}
    assert_eq!(agent.may_publish(std::slice::from_ref(&reply)).await.len(), 1);
    assert!(agent.may_publish(&[reply]).await.is_empty(), "a second answer");
    assert!(agent.may_publish(&[operator.new_inbox()]).await.is_empty(), "an answer to nobody");
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_else_gets_in() {
    let lab = Lab::new(&["--node", "spark"]);
    let stranger = nkeys_seed();
    let refused = |options: ConnectOptions| {
        let url = lab.url();
        async move { options.connect(url).await.err().map(|e| e.to_string()) }
    };
    let auth = [
        lab.options(),
        lab.options().nkey(stranger),
        lab.options().user_and_password("operator".into(), "operator".into()),
        lab.options().token("secret".into()),
    ];
    for options in auth {
        let error = refused(options).await.unwrap_or_else(|| panic!("let in"));
        assert!(error.contains("authorization violation"), "{error}");
    }
    // The server is who it says it is, or there is no login.
    let seed = std::fs::read_to_string(lab.file("node-spark/agent.nk")).unwrap().trim().to_owned();
    let other = Lab::new(&["--node", "spark"]);
    let distrusting = ConnectOptions::new().add_root_certificates(other.file("ca.pem")).nkey(seed.clone());
    let error = refused(distrusting).await.unwrap_or_else(|| panic!("trusted a stranger's server"));
    assert!(error.to_lowercase().contains("certificate") || error.contains("TLS"), "{error}");
}

fn nkeys_seed() -> String {
    shared::bus::OperatorKey::generate().seed().unwrap()
}

#[tokio::test]
async fn nothing_is_said_in_plain_text() {
    let lab = Lab::new(&["--node", "spark"]);
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", lab.port)).await.unwrap();
    let mut info = vec![0; 4096];
    let n = stream.read(&mut info).await.unwrap();
    let info = String::from_utf8_lossy(&info[..n]).into_owned();
    assert!(info.starts_with("INFO ") && info.contains(r#""tls_required":true"#), "{info}");
    stream.write_all(b"CONNECT {\"verbose\":true,\"tls_required\":false}\r\nPING\r\n").await.unwrap();
    let mut rest = vec![];
    let end = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut rest)).await;
    assert!(end.is_ok(), "the connection stays open");
    let said = String::from_utf8_lossy(&rest);
    assert!(!said.contains("+OK") && !said.contains("PONG"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_client_certificates_a_key_alone_is_not_enough() {
    let lab = Lab::new(&["--node", "spark", "--client-certs"]);
    let connect = async |args: BusArgs| {
        Bus::connect(&args.resolve("test").unwrap().unwrap(), "agent", "spark").await.map(|_| ())
    };
    let key = "node-spark/agent.nk";
    let certified = |from: &Lab| BusArgs {
        cert_file: Some(from.file("node-spark/client.pem")),
        cert_key_file: Some(from.file("node-spark/client-key.pem")),
        ..lab.args(key)
    };
    let with = connect(certified(&lab)).await;
    assert!(with.is_ok(), "{with:?}\n{}", lab.log());
    assert!(connect(lab.args(key)).await.is_err(), "without a certificate");
    let foreign = Lab::new(&["--node", "spark", "--client-certs"]);
    assert!(connect(certified(&foreign)).await.is_err(), "with another lab's certificate");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_added_and_removed_while_the_others_stay() {
    let lab = Lab::new(&["--node", "spark"]);
    let spark = lab.bus("agent", "node-spark/agent.nk").await;
    lab.again(&["--node", "third"]);
    let third = wait::until("the server knows the new machine", Duration::from_secs(10), || async {
        Bus::connect(&lab.settings("node-third/agent.nk"), "agent", "third").await.ok()
    })
    .await;
    assert!(third.is_connected());
    let settings = lab.settings("node-third/agent.nk");
    lab.again(&["--remove", "node-third"]);
    wait::until("the removed machine is out", Duration::from_secs(10), || async {
        (!third.is_connected()).then_some(())
    })
    .await;
    assert!(Bus::connect(&settings, "agent", "third").await.is_err());
    assert_eq!(*spark.connects().borrow(), 1, "the others were thrown out too");
}
