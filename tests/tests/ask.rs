//! `pd-bridge ask` and `pd-bridge field-test`: real agents on a real nats-server, real gateway and workers behind one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pd_tests::agents::{AgentScene, until};
use pd_tests::process::Process;
use pd_tests::stack::{Stack, free_port};
use pd_tests::tiny;
use serde_json::Value;
use shared::bus::{Exit, Operator};
use std::io::Read as _;
use std::process::{Output, Stdio};
use std::time::Duration;

/// A node with a model, one without, and one whose model is away.
struct Lab {
    scene: AgentScene,
    _neighbours: Vec<Process>,
    _stack: Stack,
}

async fn lab() -> Lab {
    let stack = Stack::start(tiny::model(), &["--block-tokens", "16"], &[], &[]).await;
    let scene = AgentScene::start(&format!("ask = \"{}\"", stack.gateway.addr));
    let dumb = scene.neighbour("node-2", "");
    let away = scene.neighbour("node-3", &format!("ask = \"127.0.0.1:{}\"", free_port()));
    let operator = scene.operator().await;
    for node in ["node-2", "node-3"] {
        heard(&operator, node).await;
    }
    Lab { scene, _neighbours: vec![dumb, away], _stack: stack }
}

async fn heard(operator: &Operator, node: &str) {
    let node = shared::bus::NodeId::new(node).unwrap();
    pd_tests::wait::until("an agent", Duration::from_secs(30), || async {
        let nothing = shared::bus::Action::Cancel { command: shared::hexbytes::Hex([0; 16]) };
        matches!(
            operator.send(&node, nothing).await,
            Err(shared::bus::OperatorError::Refused { refusal, .. })
                if refusal.code == shared::bus::RefusalCode::NotRunning
        )
        .then_some(())
    })
    .await;
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}\n{}", text(&output.stdout), text(&output.stderr)))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_node_gets_a_row_whatever_it_does() {
    let lab = lab().await;
    let cli = |args: &[&str]| tokio::task::block_in_place(|| lab.scene.run_cli(args));
    let long =
        "What would you say to a sentence that is long enough for a bridge, and then some more? ".repeat(3);
    // One node, both ways.
    for (route, verdict) in [("bridge", "complete"), ("native", "native")] {
        let asked = cli(&[
            "ask",
            "node-1",
            &format!("{route}: {long}"),
            "--max-tokens",
            "8",
            "--route",
            route,
            "--json",
        ]);
        assert_eq!(asked.status.code(), Some(0), "{}", text(&asked.stderr));
        let row = &json(&asked)[0];
        assert_eq!(row["node"], "node-1");
        assert_eq!(row["verdict"]["verdict"], verdict, "{row:#}");
        assert!(row["error"].is_null() && row["text"].is_string());
        assert!(row["completion_tokens"].as_u64().unwrap() <= 8);
        assert!(row["total_ms"].as_f64().unwrap() >= row["ttft_ms"].as_f64().unwrap_or(0.0));
    }
    // All of them; two have no answer.
    let asked = cli(&["ask", "--all", &long, "--max-tokens", "4", "--json"]);
    assert_eq!(asked.status.code(), Some(1));
    let rows = json(&asked);
    let error = |i: usize| rows[i]["error"].as_str().unwrap_or_default().to_owned();
    assert_eq!(rows.as_array().unwrap().len(), 3);
    assert!(error(0).is_empty() && rows[0]["verdict"]["verdict"].is_string(), "{rows:#}");
    assert!(error(1).contains("does not allow questions"), "{rows:#}");
    assert!(error(2).contains("the model at 127.0.0.1:"), "{rows:#}");
    // For people: blocks, as nobody's terminal is 60 columns wide here.
    let asked = cli(&["ask", "--all", &long, "--max-tokens", "4"]);
    let shown = text(&asked.stdout);
    for wanted in ["node-1\n", "node-2\nno answer\n", "node-3\nno answer\n", " · all "] {
        assert!(shown.contains(wanted), "{wanted}: {shown}");
    }
    // A node that is not there, and words that make no sense.
    let asked = cli(&["ask", "node-9", "Anybody?", "--json"]);
    assert_eq!(asked.status.code(), Some(1));
    assert!(json(&asked)[0]["error"].as_str().unwrap().contains("no agent of the name"));
    for bad in [&["ask", "Hello?"][..], &["ask", "--all", "node-1", "Hello?"], &["ask", "No Node", "Hello?"]]
    {
        assert_eq!(cli(bad).status.code(), Some(64), "{bad:?}");
    }
    // What was refused is in that node's audit; what was asked is in the other's.
    assert!(
        lab.scene
            .neighbour_audit("node-2")
            .iter()
            .any(|l| l.event == "refused" && l.kind.as_deref() == Some("ask"))
    );
    assert!(lab.scene.audit().iter().any(|l| l.event == "ended" && l.kind.as_deref() == Some("ask")));
    field_test(&lab);
}

/// In the same lab, which takes a while to build.
fn field_test(lab: &Lab) {
    let cli = |args: &[&str]| tokio::task::block_in_place(|| lab.scene.run_cli(args));
    let file = lab.scene.dir().join("test.toml");
    let questions = "[[questions]]\nid = \"ship\"\nask = \"Which ship?\"\ntext = [\"Patient Anne\"]\n\
                     [[questions]]\nid = \"hat\"\nask = \"Which hat?\"\nnot_stated = true\n";
    let passage = "The brig was called Patient Anne and carried coal. ".repeat(12);
    let good = format!("name = \"Tiny\"\npassage = \"{passage}\"\nmax_tokens = 6\n{questions}");
    std::fs::write(&file, good.replace("max_tokens = 6", "max_tokens = six")).unwrap();
    let bad = cli(&["field-test", file.to_str().unwrap()]);
    assert_eq!(bad.status.code(), Some(64));
    assert!(text(&bad.stderr).contains("line 3"), "{}", text(&bad.stderr));
    std::fs::write(&file, good).unwrap();
    let ran = cli(&["field-test", file.to_str().unwrap(), "node-1", "--json"]);
    assert_eq!(ran.status.code(), Some(0), "{}", text(&ran.stderr));
    let report = json(&ran);
    let runs = report["nodes"][0]["runs"].as_array().unwrap();
    let of = |passage: bool, route: &str| {
        runs.iter().find(|r| r["with_passage"] == passage && r["route"] == route).unwrap()
    };
    // No prompt was served by what an earlier one left.
    assert_eq!(of(true, "bridge")["verdicts"], serde_json::json!({"complete": 2}), "{report:#}");
    assert_eq!(of(true, "native")["verdicts"], serde_json::json!({"native": 2}), "{report:#}");
    assert_eq!(of(false, "bridge")["verdicts"], serde_json::json!({"complete": 2}), "{report:#}");
    assert_eq!(of(false, "native")["verdicts"], serde_json::json!({"native": 2}), "{report:#}");
    let prompt = |run: &Value| run["answers"][0]["answer"]["verdict"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(of(true, "bridge")) > 600 && prompt(of(false, "native")) < 400, "{report:#}");
    // Every node that is heard; the table says which of them could not.
    let ran = cli(&["field-test", file.to_str().unwrap(), "--answers"]);
    assert_eq!(ran.status.code(), Some(1));
    let table = text(&ran.stdout);
    for wanted in ["NODE", "ship", "RIGHT", "node-1  yes      bridge", "! node-2, 8 times: ", "Which hat?"] {
        assert!(table.contains(wanted), "{wanted}: {table}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_the_question_on_the_node() {
    // A model that thinks for ever.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let scene = AgentScene::start(&format!("ask = \"{}\"", listener.local_addr().unwrap()));
    let _operator = scene.operator().await;
    let mut cli = scene.cli(&["ask", "node-1", "Well?"]);
    let child = cli.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut asked, _) = listener.accept().unwrap();
    let mut request = [0; 4096];
    let n = asked.read(&mut request).unwrap();
    assert!(text(&request[..n]).starts_with("POST /v1/chat/completions "));
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGINT).unwrap();
    asked.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    while asked.read(&mut request).unwrap() > 0 {}
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(text(&output.stdout).contains("cancelled"), "{}", text(&output.stdout));
    let cancelled = |line: shared::bus::AuditLine| line.end.is_some_and(|end| end.exit == Exit::Cancelled {});
    until("that is written down", || scene.audit().into_iter().any(cancelled)).await;
}
