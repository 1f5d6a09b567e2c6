//! Every expression of every panel and alert, on a real Prometheus that watches real traffic of every verdict.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::fakes::{Act, FakePrefill, Meddle, Play};
use pd_tests::http::{self, completion, post};
use pd_tests::lab::beat;
use pd_tests::nats::Nats;
use pd_tests::paths::root;
use pd_tests::prometheus::Prometheus;
use pd_tests::scene::{BLOCK, prompt};
use pd_tests::stack::{Gateway, Worker};
use pd_tests::{tiny, wait};
use serde_json::Value;
use shared::bus::{NodeState, subjects};
use shared::control::WorkerErrorCode;
use shared::verdict::VerdictKind;
use shared::wire::FrameKind;
use std::collections::BTreeSet;
use std::time::Duration;

/// What Grafana puts in place of its variables, in a test that lasts less than a minute.
const RANGE: &str = "1m";

struct Target {
    dashboard: String,
    panel: String,
    expression: String,
}

fn dashboards() -> Vec<(String, Value)> {
    let folder = std::fs::read_dir(root().join("deploy/grafana/dashboards")).unwrap();
    let read = |path: std::path::PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        (path.file_name().unwrap().to_string_lossy().into_owned(), serde_json::from_str(&text).unwrap())
    };
    folder.map(|entry| read(entry.unwrap().path())).collect()
}

fn targets() -> Vec<Target> {
    let mut found = vec![];
    for (name, dashboard) in dashboards() {
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let expression = target["expr"].as_str().unwrap();
                let expression = expression.replace("$__rate_interval", RANGE).replace("$__range", RANGE);
                assert!(!expression.contains('$'), "{name}: unknown variable in {expression}");
                let panel = panel["title"].as_str().unwrap().to_owned();
                found.push(Target { dashboard: name.clone(), panel, expression });
            }
        }
    }
    found
}

/// The parts of an alert's expression without their comparisons, which are mostly false in a healthy lab.
fn operands(alert: &str) -> Vec<String> {
    let parts = alert.split(" and ");
    let bare = |part: &str| {
        let compared = [" == ", " >= ", " > "].iter().filter_map(|op| part.rfind(op)).max();
        part[..compared.unwrap_or_else(|| panic!("no comparison in {part}"))].to_owned()
    };
    parts.map(bare).collect()
}

/// One request of every verdict.
async fn traffic(gateway: &str, relay: &FakePrefill) {
    let ask = async |headers: &[(&str, &str)], text: &str| {
        post(gateway, "/v1/completions", headers, &completion(text, 6)).await.verdict().verdict
    };
    let mut streamed = completion(&prompt(100), 6);
    streamed["stream"] = true.into();
    assert_eq!(post(gateway, "/v1/completions", &[http::NATIVE], &streamed).await.status, 200);
    let bridged = prompt(300);
    relay.play(Play::Relay(Meddle::nothing()));
    assert_eq!(ask(&[http::BRIDGE], &bridged).await, VerdictKind::Complete);
    assert_eq!(ask(&[], &bridged).await, VerdictKind::Warm);
    assert_eq!(ask(&[http::NATIVE], &prompt(200)).await, VerdictKind::Native);
    assert_eq!(ask(&[], "Hello").await, VerdictKind::Native);
    let demand = [http::NATIVE, ("x-pd-bridge-require", "complete")];
    assert_eq!(ask(&demand, &prompt(200)).await, VerdictKind::Refused);
    relay.play(Play::Relay(Meddle::short(5 * BLOCK)));
    assert_eq!(ask(&[http::BRIDGE], &prompt(200)).await, VerdictKind::Partial);
    let broken = |h: &shared::wire::FrameHeader, _| {
        if h.kind == FrameKind::Data { Act::FlipBit } else { Act::Pass }
    };
    relay.play(Play::Relay(Meddle::with(broken)));
    assert_eq!(ask(&[http::BRIDGE], &prompt(200)).await, VerdictKind::Failed);
    relay.play(Play::Fail(WorkerErrorCode::Busy));
    assert_eq!(ask(&[http::BRIDGE], &prompt(200)).await, VerdictKind::Failed);
}

fn numbers(series: &[Value]) -> Vec<f64> {
    series.iter().filter_map(|s| s["value"][1].as_str()?.parse().ok()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_expression_has_an_answer_where_there_was_traffic() {
    let nats = Nats::start();
    let decode = Worker::decode(tiny::model(), &["--block-tokens", "16"]);
    let prefill = Worker::prefill(tiny::model(), &[]);
    let relay = FakePrefill::before(&prefill.addresses.control, Play::Relay(Meddle::nothing())).await;
    let url = nats.url();
    let (control, before) = (&decode.addresses.control, &relay.server.addr);
    let gateway = Gateway::start(tiny::model(), control, Some(before), &["--nats", &url]).await;
    let prometheus = Prometheus::start(&[&gateway.addr]).await;

    // Two machines: one with a GPU and workers, one that is only there.
    let bus = nats.connect().await.client;
    let speaking = tokio::spawn(async move {
        for sequence in 1.. {
            for name in ["spark", "mac"] {
                let beat = beat(name, sequence, NodeState::Alive);
                bus.publish(subjects::heartbeat(&beat.node), beat.encode()).await.unwrap();
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    // A rate needs a sample before and one after.
    traffic(&gateway.addr, &relay).await;
    tokio::time::sleep(Duration::from_millis(2100)).await;
    traffic(&gateway.addr, &relay).await;
    wait::until("Prometheus has seen the traffic", Duration::from_secs(20), || async {
        let seen =
            prometheus.query(r#"pd_bridge_requests_total{verdict="failed", reason="prefill_busy"}"#).await;
        (numbers(&seen.unwrap()) == [2.0]).then_some(())
    })
    .await;

    let targets = targets();
    assert!(targets.len() >= 40, "only {} expressions found", targets.len());
    let mut wrong = vec![];
    for target in &targets {
        let place = format!("{} / {}: {}", target.dashboard, target.panel, target.expression);
        match prometheus.query(&target.expression).await {
            Err(error) => wrong.push(format!("{place}\n    {error}")),
            Ok(series) if !numbers(&series).iter().any(|n| n.is_finite()) => {
                wrong.push(format!("{place}\n    {series:?}"));
            }
            Ok(_) => {}
        }
    }
    let alerts = prometheus.alerts().await;
    assert!(alerts.len() >= 8, "{alerts:?}");
    for alert in &alerts {
        for part in operands(&alert.expression) {
            let answer = prometheus.query(&part).await;
            if !answer.as_ref().is_ok_and(|series| numbers(series).iter().any(|n| n.is_finite())) {
                wrong.push(format!("alert {}: {part}\n    {answer:?}", alert.name));
            }
        }
        if let Some(error) = &alert.error {
            wrong.push(format!("alert {}: {error}", alert.name));
        }
    }
    assert!(wrong.is_empty(), "{} without an answer:\n{}", wrong.len(), wrong.join("\n"));

    speaking.abort();

    let mix = prometheus.query("sum by (verdict) (pd_bridge_requests_total) > 0").await.unwrap();
    let mix: BTreeSet<&str> = mix.iter().filter_map(|s| s["metric"]["verdict"].as_str()).collect();
    assert_eq!(mix, BTreeSet::from(["complete", "failed", "native", "partial", "refused", "warm"]));
    let firing: Vec<&str> = alerts.iter().filter(|a| a.state == "firing").map(|a| a.name.as_str()).collect();
    assert_eq!(firing, ["PdBridgeQueueFull"], "the prefill worker was busy, and nothing else is wrong");
}

#[test]
fn dashboards_are_well_formed() {
    let provisioned =
        std::fs::read_to_string(root().join("deploy/grafana/provisioning/datasources/prometheus.yml"));
    let provisioned = provisioned.unwrap();
    let (mut uids, mut count) = (BTreeSet::new(), 0);
    for (name, dashboard) in dashboards() {
        count += 1;
        assert!(uids.insert(dashboard["uid"].as_str().unwrap().to_owned()), "{name}: uid taken");
        let panels = dashboard["panels"].as_array().unwrap();
        let ids: BTreeSet<u64> = panels.iter().map(|p| p["id"].as_u64().unwrap()).collect();
        assert_eq!(ids.len(), panels.len(), "{name}: panel ids repeat");
        let mut taken = BTreeSet::new();
        for panel in panels {
            let title = panel["title"].as_str().unwrap();
            let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            assert!(at("x") + at("w") <= 24, "{name} / {title} is wider than the page");
            for x in at("x")..at("x") + at("w") {
                for y in at("y")..at("y") + at("h") {
                    assert!(taken.insert((x, y)), "{name} / {title} covers another panel");
                }
            }
            if panel["type"] == "row" {
                continue;
            }
            let uid = panel["datasource"]["uid"].as_str().unwrap();
            assert!(provisioned.contains(&format!("uid: {uid}\n")), "{name} / {title}: datasource {uid}");
            assert!(!panel["targets"].as_array().unwrap().is_empty(), "{name} / {title} shows nothing");
        }
    }
    assert!(count >= 2);
}
