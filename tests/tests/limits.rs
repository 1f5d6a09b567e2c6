//! What the front door lets in: requests, keys, connections; and how it says no.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use nix::sys::signal::Signal;
use pd_tests::fakes::{FakeDecode, Step};
use pd_tests::http::{Response, completion, get, metric, post, send};
use pd_tests::stack::Gateway;
use pd_tests::{tiny, wait};
use serde_json::{Value, json};
use shared::control::FinishReason;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const SECOND: Duration = Duration::from_secs(1);

/// One letter, then as long as the test wants.
fn held() -> Vec<Step> {
    vec![Step::Started, Step::Tokens(vec![100]), Step::Silence]
}

fn quick() -> Vec<Step> {
    vec![Step::Started, Step::Tokens(vec![100]), Step::Finished(FinishReason::Stop)]
}

async fn gateway(script: Vec<Step>, extra: &[&str]) -> (FakeDecode, Gateway) {
    let decode = FakeDecode::start(tiny::model(), script).await;
    let gateway = Gateway::start_unready(tiny::model(), &decode.server.addr, None, extra);
    wait::until("a ready gateway", Duration::from_secs(60), || async {
        let reply = send(&gateway.addr, "GET", "/readyz", &[], None).await.ok()?;
        (reply.status == 200).then_some(())
    })
    .await;
    (decode, gateway)
}

/// A stream that has begun.
async fn open(addr: &str, headers: &[(&str, &str)]) -> Response {
    let mut body = completion("x", 9);
    body["stream"] = true.into();
    let mut response = send(addr, "POST", "/v1/completions", headers, Some(&body)).await.unwrap();
    assert_eq!(response.status, 200);
    response.piece().await.unwrap().unwrap();
    response
}

async fn value(gateway: &Gateway, name: &str) -> f64 {
    metric(&gateway.metrics().await, name, "")
}

async fn until_value(gateway: &Gateway, name: &str, wanted: f64) {
    wait::until(&format!("{name} {wanted}"), 10 * SECOND, || async {
        (value(gateway, name).await == wanted).then_some(())
    })
    .await;
}

fn retry_after(headers: &hyper::HeaderMap) -> u64 {
    headers["retry-after"].to_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn one_runs_one_waits_the_rest_are_told_to_come_back() {
    let (decode, gateway) = gateway(held(), &["--max-in-flight", "1", "--max-queue", "1"]).await;
    let addr = gateway.addr.clone();
    let running = open(&addr, &[]).await;
    decode.play(quick());
    let waiting = tokio::spawn({
        let addr = addr.clone();
        async move { post(&addr, "/v1/completions", &[], &completion("x", 1)).await }
    });
    until_value(&gateway, "pd_bridge_requests_queued", 1.0).await;
    let third = post(&addr, "/v1/completions", &[], &completion("x", 1)).await;
    assert_eq!(
        (third.status.as_u16(), third.json()["error"]["code"].as_str()),
        (429, Some("too_many_requests"))
    );
    assert!(retry_after(&third.headers) >= 1);
    assert_eq!(third.verdict().reason.as_deref(), Some("too_many_requests"));
    // Longer than the first bucket of the wait's histogram.
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!waiting.is_finished());
    drop(running);
    assert_eq!(waiting.await.unwrap().status, 200);
    let metrics = gateway.metrics().await;
    assert_eq!(metric(&metrics, "pd_bridge_requests_queued", ""), 0.0);
    assert_eq!(metric(&metrics, "pd_bridge_queue_refused_total", ""), 1.0);
    // The wait of the second is there to be seen.
    let short = metric(&metrics, "pd_bridge_queue_wait_seconds_bucket", "le=\"0.001\"");
    assert_eq!((metric(&metrics, "pd_bridge_queue_wait_seconds_count", ""), short), (2.0, 1.0));
}

#[tokio::test]
async fn a_wait_has_an_end_and_a_client_that_leaves_frees_its_place() {
    let flags = ["--max-in-flight", "1", "--max-queue", "1", "--queue-timeout-ms", "1500"];
    let (_decode, gateway) = gateway(held(), &flags).await;
    let addr = gateway.addr.clone();
    let _running = open(&addr, &[]).await;
    for _ in 0..3 {
        let leaving = tokio::spawn({
            let addr = addr.clone();
            async move { post(&addr, "/v1/completions", &[], &completion("x", 1)).await }
        });
        until_value(&gateway, "pd_bridge_requests_queued", 1.0).await;
        leaving.abort();
        until_value(&gateway, "pd_bridge_requests_queued", 0.0).await;
    }
    let begun = Instant::now();
    let late = post(&addr, "/v1/completions", &[], &completion("x", 1)).await;
    assert_eq!(late.status, 429);
    assert!(begun.elapsed() >= Duration::from_millis(1500) && begun.elapsed() < 5 * SECOND);
    assert_eq!(retry_after(&late.headers), 2);
}

fn keys(dir: &Path, text: &str) -> String {
    let file = dir.join("keys.toml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

async fn status(gateway: &Gateway, method: &str, path: &str, key: &str) -> u16 {
    let header = format!("Bearer {key}");
    let body = (method == "POST").then(|| completion("x", 1));
    let headers: &[_] = if key.is_empty() { &[] } else { &[("authorization", header.as_str())] };
    let response = send(&gateway.addr, method, path, headers, body.as_ref()).await.unwrap();
    response.finish().await.unwrap().status.as_u16()
}

#[tokio::test]
async fn keys_have_names_limits_and_roles_and_change_while_serving() {
    let dir = tempfile::tempdir().unwrap();
    let [alice, bob, dave, admin] =
        ["sk-alice-0123456789", "sk-bob-0123456789ab", "sk-dave-0123456789", "sk-admin-0123456789"];
    // SHA-256 of bob's key, as `printf %s KEY | sha256sum` gives it.
    let bob_sha = "c64d480009d96be90817e4035d00803187a2077741d43ddb04aca646dbf097c4";
    let text = |extra: &str| {
        format!(
            "alice = {{ key = \"{alice}\", requests_per_min = 2 }}\n\
             root = {{ key = \"{admin}\", admin = true, max_concurrent = 1 }}\n{extra}"
        )
    };
    let file = keys(dir.path(), &text(&format!("hashed = \"sha256:{bob_sha}\"\n")));
    let (decode, gateway) = gateway(quick(), &["--api-keys-file", &file]).await;
    let g = &gateway;
    // Who gets in where.
    for (path, wanted) in
        [("/v1/models", [401, 401, 200, 200]), ("/metrics", [401, 401, 403, 200]), ("/healthz", [200; 4])]
    {
        for (key, wanted) in ["", "sk-nobody-0123456789", alice, admin].into_iter().zip(wanted) {
            assert_eq!(status(g, "GET", path, key).await, wanted, "{path} {key}");
        }
    }
    assert_eq!(status(g, "POST", "/v1/completions", bob).await, 200);
    // Two requests a minute, and when the third is welcome.
    assert_eq!(status(g, "POST", "/v1/completions", alice).await, 200);
    assert_eq!(status(g, "POST", "/v1/completions", alice).await, 200);
    let header = format!("Bearer {alice}");
    let third = post(&g.addr, "/v1/completions", &[("authorization", &header)], &completion("x", 1)).await;
    assert_eq!(third.status, 429);
    assert!((25..=30).contains(&retry_after(&third.headers)), "{:?}", third.headers);
    // One at once.
    decode.play(held());
    let header = format!("Bearer {admin}");
    let running = open(&g.addr, &[("authorization", &header)]).await;
    assert_eq!(status(g, "POST", "/v1/completions", admin).await, 429);
    drop(running);
    decode.play(quick());
    wait::until("the place is free", 5 * SECOND, || async {
        (status(g, "POST", "/v1/completions", admin).await == 200).then_some(())
    })
    .await;
    // Two keys on one request are none.
    let twice = [("authorization", "Bearer a"), ("authorization", header.as_str())];
    let reply = send(&g.addr, "GET", "/v1/models", &twice, None).await.unwrap();
    assert_eq!(reply.status, 400);
    // A broken file changes nothing; a good one does, at once on SIGHUP; what was used up stays so.
    std::fs::write(&file, "alice = 7").unwrap();
    g.process.signal(Signal::SIGHUP);
    wait::until("a complaint", 5 * SECOND, || async {
        g.process.log().contains("stay as they were").then_some(())
    })
    .await;
    assert_eq!(status(g, "GET", "/v1/models", alice).await, 200);
    std::fs::write(&file, text(&format!("dave = \"{dave}\"\n"))).unwrap();
    g.process.signal(Signal::SIGHUP);
    wait::until("dave", 5 * SECOND, || async {
        (status(g, "GET", "/v1/models", dave).await == 200).then_some(())
    })
    .await;
    assert_eq!(status(g, "GET", "/v1/models", bob).await, 401);
    assert_eq!(status(g, "POST", "/v1/completions", alice).await, 429);
    assert!(!g.process.log().contains("sk-"), "a key in the log");
}

#[tokio::test]
async fn idle_connections_give_way_and_busy_ones_do_not() {
    let (_decode, gateway) = gateway(held(), &["--max-connections", "4"]).await;
    let mut streams = vec![];
    for _ in 0..3 {
        streams.push(open(&gateway.addr, &[]).await);
    }
    // A fourth, idle one is closed for a fifth.
    let mut idle = TcpStream::connect(&gateway.addr).await.unwrap();
    wait::until("4 connections", 5 * SECOND, || async {
        // Asking takes a place itself, that of the idle one.
        (get(&gateway.addr, "/healthz").await.status == 200).then_some(())
    })
    .await;
    let mut rest = vec![];
    tokio::time::timeout(5 * SECOND, idle.read_to_end(&mut rest)).await.unwrap().unwrap();
    streams.push(open(&gateway.addr, &[]).await);
    // All busy: the next is told so, politely.
    let mut refused = TcpStream::connect(&gateway.addr).await.unwrap();
    refused.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut text = String::new();
    tokio::time::timeout(5 * SECOND, refused.read_to_string(&mut text)).await.unwrap().unwrap();
    assert!(text.starts_with("HTTP/1.1 503 ") && text.contains("retry-after: 1\r\n"), "{text}");
    let body: Value = serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(body["error"]["code"], "overloaded");
    drop(streams);
    wait::until("room again", 5 * SECOND, || async {
        let reply = send(&gateway.addr, "GET", "/metrics", &[], None).await.ok()?;
        (reply.status == 200).then_some(())
    })
    .await;
    assert!(value(&gateway, "pd_bridge_connections_refused_total").await >= 1.0);
}

#[tokio::test]
async fn sigterm_lets_answers_finish_and_sends_new_requests_elsewhere() {
    let slow = [
        vec![Step::Started],
        (0..20).flat_map(|_| [Step::Tokens(vec![100]), Step::Pause(Duration::from_millis(100))]).collect(),
        vec![Step::Finished(FinishReason::Stop)],
    ]
    .concat();
    let (_decode, mut gateway) = gateway(slow, &[]).await;
    let addr = gateway.addr.clone();
    let running = open(&addr, &[]).await;
    gateway.process.signal(Signal::SIGTERM);
    wait::until("draining", 5 * SECOND, || async {
        (get(&addr, "/readyz").await.status == 503).then_some(())
    })
    .await;
    let refused = post(&addr, "/v1/completions", &[], &completion("x", 1)).await;
    assert_eq!((refused.status.as_u16(), refused.verdict().reason.as_deref()), (503, Some("shutting_down")));
    assert_eq!(refused.headers["connection"], "close");
    assert!(retry_after(&refused.headers) >= 1);
    let whole = running.finish().await.unwrap();
    assert!(String::from_utf8_lossy(&whole.body).ends_with("data: [DONE]\n\n"));
    assert!(gateway.process.wait(5 * SECOND).unwrap().success());
}

#[tokio::test]
async fn the_access_log_has_one_line_per_request_and_no_text_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("access.log");
    let secret = "sk-secret-0123456789";
    let keys = keys(dir.path(), &format!("carol = {{ key = \"{secret}\", admin = true }}\n"));
    let flags = ["--access-log", file.to_str().unwrap(), "--api-keys-file", &keys];
    let (decode, mut gateway) = gateway(quick(), &flags).await;
    let addr = gateway.addr.clone();
    let bearer = format!("Bearer {secret}");
    let auth = ("authorization", bearer.as_str());
    let named =
        post(&addr, "/v1/completions", &[auth, ("x-request-id", "my-name.1")], &completion("a riddle", 5))
            .await;
    assert_eq!((named.status.as_u16(), named.headers["x-request-id"].to_str().unwrap()), (200, "my-name.1"));
    for bad in ["has space", "quote\"", &"x".repeat(65), ""] {
        let reply =
            send(&addr, "GET", "/v1/models?riddle=1", &[auth, ("x-request-id", bad)], None).await.unwrap();
        let given = reply.headers["x-request-id"].to_str().unwrap();
        assert!(given.starts_with("req-"), "{bad:?} became {given:?}");
    }
    assert_eq!(post(&addr, "/v1/completions", &[], &completion("a riddle", 5)).await.status, 401);
    decode.play(held());
    let left = open(&addr, &[auth]).await;
    drop(left);
    let lines = wait::until("7 lines", 10 * SECOND, || async {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let lines: Vec<Value> = lines.into_iter().filter(|l| l["path"] != "/readyz").collect();
        (lines.len() >= 7).then_some(lines)
    })
    .await;
    let answered = lines.iter().find(|l| l["request_id"] == "my-name.1").unwrap();
    let fact = |name: &str| answered[name].clone();
    assert_eq!(
        (fact("key"), fact("method"), fact("path")),
        (json!("carol"), json!("POST"), json!("/v1/completions"))
    );
    assert_eq!(
        (fact("status"), fact("verdict"), fact("completion_tokens")),
        (json!(200), json!("native"), json!(1))
    );
    assert_eq!((fact("reason"), fact("cached_tokens")), (json!("short_prompt"), json!(0)));
    assert!(fact("prompt_tokens").as_u64().unwrap() >= 8 && fact("ttft_ms").as_f64().unwrap() > 0.0);
    assert!(fact("duration_ms").as_f64() >= fact("ttft_ms").as_f64() && fact("queue_ms") == 0.0);
    let refused = lines.iter().find(|l| l["status"] == 401).unwrap();
    assert!(refused["key"].is_null());
    let gone = lines.iter().find(|l| l["client_left"] == true).unwrap();
    assert_eq!(gone["completion_tokens"], 1);
    gateway.process.signal(Signal::SIGTERM);
    assert!(gateway.process.wait(10 * SECOND).is_some());
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains("riddle") && !text.contains(secret), "{text}");
}
