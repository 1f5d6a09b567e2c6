//! Clients that are slow, broken or hostile: each is told so or cut off, and nobody else notices.
#![allow(clippy::large_futures, reason = "tests await where they are")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; counts are shown"
)]

use pd_tests::fakes::{FakeDecode, Step};
use pd_tests::http::{completion, get, metric};
use pd_tests::raw::{Answer, answers, exchange, post};
use pd_tests::stack::Gateway;
use pd_tests::{tiny, wait};
use serde_json::Value;
use shared::control::FinishReason;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PATH: &str = "/v1/completions";
const SECOND: Duration = Duration::from_secs(1);
/// After this silence an answer is taken for complete.
const QUIET: Duration = Duration::from_millis(700);

async fn gateway(script: Vec<Step>, extra: &[&str]) -> (FakeDecode, Gateway) {
    let decode = FakeDecode::start(tiny::model(), script).await;
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, extra).await;
    (decode, gateway)
}

fn quick() -> Vec<Step> {
    vec![Step::Started, Step::Tokens(vec![100]), Step::Finished(FinishReason::Stop)]
}

fn good() -> Vec<u8> {
    completion("x", 4).to_string().into_bytes()
}

/// All responses to some bytes.
async fn ask(gateway: &Gateway, bytes: &[u8]) -> Vec<Answer> {
    answers(&exchange(&gateway.addr, bytes, QUIET).await)
}

/// The one response to some bytes.
async fn ask_one(gateway: &Gateway, bytes: &[u8]) -> Answer {
    let all = ask(gateway, bytes).await;
    assert_eq!(all.len(), 1, "{}: {all:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(200)]));
    all.into_iter().next().unwrap()
}

/// It still answers, quickly.
async fn is_well(gateway: &Gateway) {
    let begun = Instant::now();
    let answer = ask_one(gateway, &post(PATH, "connection: close\r\n", &good())).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(begun.elapsed() < 2 * SECOND, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn broken_json_is_a_400_that_says_where() {
    let (_decode, gateway) = gateway(quick(), &[]).await;
    let deep = "[".repeat(100_000);
    let nested = format!("{{\"prompt\": {deep}");
    let closed = format!("{{\"prompt\": {}{}}}", "[".repeat(50_000), "]".repeat(50_000));
    let objects = "{\"a\":".repeat(100_000);
    let bad: Vec<&[u8]> = vec![
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"\"text\"",
        b"{\"prompt\": \"x\"} {\"prompt\": \"y\"}",
        b"{\"prompt\": \"a\x00b\"}",
        b"\x00",
        b"{\"prompt\": \"\\ud800\"}",
        b"{\"prompt\": \"\\udc00\\ud800\"}",
        b"{\"prompt\": \"\xff\xfe\"}",
        b"{\"prompt\": \"\xed\xa0\x80\"}",
        b"\xef\xbb\xbf{\"prompt\": \"x\"}",
        b"{\"prompt\": \"x\", \"max_tokens\": 1e999}",
        b"{\"prompt\": \"x\", \"max_tokens\": 99999999999999999999999999}",
        b"{\"prompt\": \"x\", \"max_tokens\": -1}",
        b"{\"prompt\": \"x\", \"max_tokens\": 1.5}",
        b"{\"prompt\": \"x\", \"temperature\": NaN}",
        b"{\"prompt\": \"x\", \"temperature\": 1e308}",
        b"{\"prompt\": [1, 2, 18446744073709551616]}",
        b"{\"prompt\": [-1]}",
        b"{\"prompt\": [99999999]}",
        deep.as_bytes(),
        nested.as_bytes(),
        closed.as_bytes(),
        objects.as_bytes(),
    ];
    for body in bad {
        let answer = ask_one(&gateway, &post(PATH, "connection: close\r\n", body)).await;
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        assert_eq!(answer.status, 400, "{shown}: {answer:?}");
        let error: Value = serde_json::from_slice(&answer.body).unwrap();
        assert!(error["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{shown}: {error}");
        assert!(answer.header("x-pd-bridge").is_some() && answer.header("x-request-id").is_some());
    }
    // A NUL that JSON allows, and a pair of surrogates, are text.
    for body in [
        &b"{\"prompt\": \"a\\u0000b\", \"max_tokens\": 1}"[..],
        b"{\"prompt\": \"\\ud83d\\ude00\", \"max_tokens\": 1}",
    ] {
        assert_eq!(ask_one(&gateway, &post(PATH, "connection: close\r\n", body)).await.status, 200);
    }
    is_well(&gateway).await;
}

#[tokio::test]
async fn a_request_can_not_be_hidden_in_another() {
    let (_decode, gateway) = gateway(quick(), &[]).await;
    let hidden = "GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n";
    let smuggle =
        |headers: &str, body: &str| format!("POST {PATH} HTTP/1.1\r\nhost: x\r\n{headers}\r\n{body}{hidden}");
    let cases = [
        smuggle("content-length: 5\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: chunked\r\ncontent-length: 5\r\n", "0\r\n\r\n"),
        smuggle("content-length: 2\r\ncontent-length: 40\r\n", "{}"),
        smuggle("content-length: 2, 40\r\n", "{}"),
        smuggle("content-length: +2\r\n", "{}"),
        smuggle("content-length: -2\r\n", "{}"),
        smuggle("content-length: 0x2\r\n", "{}"),
        smuggle("content-length: 99999999999999999999999\r\n", "{}"),
        smuggle("transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: identity, chunked, x\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding : chunked\r\n", "0\r\n\r\n"),
        smuggle("transfer-encoding: xchunked\r\n", "0\r\n\r\n"),
        smuggle("content-length: 2\r\n folded: yes\r\n", "{}"),
        smuggle("x: a\rb\r\ncontent-length: 2\r\n", "{}"),
        smuggle("x: a\0b\r\ncontent-length: 2\r\n", "{}"),
        smuggle("transfer-encoding: chunked\r\n", "G\r\n\r\n"),
        smuggle("transfer-encoding: chunked\r\n", "-1\r\n\r\n"),
        smuggle("transfer-encoding: chunked\r\n", "ffffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
        smuggle("transfer-encoding: chunked\r\n", "2\r\n{}XX0\r\n\r\n"),
        smuggle("transfer-encoding: chunked\r\n", "2;\r\r\n{}\r\n0\r\n\r\n"),
    ];
    for case in cases {
        let all = ask(&gateway, case.as_bytes()).await;
        assert!(all.iter().all(|a| a.status >= 400), "{case:?}: {all:?}");
        assert!(
            !all.iter().any(|a| a.text().contains("/hidden")),
            "the hidden request was answered: {case:?}: {all:?}"
        );
    }
    is_well(&gateway).await;
}

#[tokio::test]
async fn chunked_bodies_are_bodies() {
    let (_decode, gateway) = gateway(quick(), &["--max-body-bytes", "2000"]).await;
    let head =
        format!("POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunks = |body: &[u8], size: usize| {
        let mut bytes = head.clone().into_bytes();
        for chunk in body.chunks(size) {
            bytes.extend(format!("{:X};ext=\"a b\"\r\n", chunk.len()).bytes().chain(chunk.iter().copied()));
            bytes.extend(b"\r\n");
        }
        bytes.extend(b"0\r\nx-trailer: 1\r\n\r\n");
        bytes
    };
    for size in [1, 7, 1000] {
        assert_eq!(ask_one(&gateway, &chunks(&good(), size)).await.status, 200, "chunks of {size}");
    }
    let long = completion(&"y".repeat(3000), 1).to_string();
    assert_eq!(ask_one(&gateway, &chunks(long.as_bytes(), 100)).await.status, 413);
    is_well(&gateway).await;
}

#[tokio::test]
async fn heads_have_limits() {
    let (_decode, gateway) = gateway(quick(), &["--max-header-bytes", "8192"]).await;
    let with = |headers: &str| post(PATH, &format!("connection: close\r\n{headers}"), &good());
    let many = |n: usize| (0..n).map(|i| format!("x-{i}: 1\r\n")).collect::<String>();
    assert_eq!(ask_one(&gateway, &with(&many(50))).await.status, 200);
    assert_eq!(ask_one(&gateway, &with(&many(200))).await.status, 431);
    assert_eq!(ask_one(&gateway, &with(&format!("x-big: {}\r\n", "y".repeat(9000)))).await.status, 431);
    let target = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "z".repeat(100_000));
    let all = ask(&gateway, target.as_bytes()).await;
    assert!(all.len() == 1 && matches!(all[0].status, 414 | 431), "{all:?}");
    // A head that never ends is cut off, not collected.
    let endless = format!("GET / HTTP/1.1\r\nhost: x\r\n{}", many(500_000));
    let before = gateway.process.memory_bytes("VmRSS");
    let all = ask(&gateway, endless.as_bytes()).await;
    assert!(all.iter().all(|a| a.status == 431), "{all:?}");
    if let (Some(before), Some(after)) = (before, gateway.process.memory_bytes("VmRSS")) {
        assert!(after < before + (4 << 20), "{before} to {after} bytes");
    }
    is_well(&gateway).await;
}

#[tokio::test]
async fn odd_but_legal_http_is_answered() {
    let (_decode, gateway) = gateway(quick(), &[]).await;
    let get = |line: &str, headers: &str| format!("{line}\r\n{headers}\r\n").into_bytes();
    let old = ask_one(&gateway, &get("GET /healthz HTTP/1.0", "")).await;
    assert_eq!((old.status, old.text().as_str()), (200, "ok\n"));
    let kept = ask(
        &gateway,
        &[get("GET /healthz HTTP/1.0", "connection: keep-alive\r\n"), get("GET /healthz HTTP/1.0", "")]
            .concat(),
    )
    .await;
    assert_eq!(kept.len(), 2);
    // A stream for HTTP/1.0 has no chunks: it ends with the connection.
    let mut body = completion("x", 4);
    body["stream"] = true.into();
    let body = body.to_string();
    let old = format!("POST {PATH} HTTP/1.0\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let answer = ask_one(&gateway, old.as_bytes()).await;
    assert!(
        answer.header("transfer-encoding").is_none() && answer.text().ends_with("data: [DONE]\n\n"),
        "{answer:?}"
    );
    assert_eq!(
        (answer.header("x-accel-buffering"), answer.header("cache-control")),
        (Some("no"), Some("no-cache"))
    );
    // HEAD says what GET would, without saying it.
    let head =
        exchange(&gateway.addr, &get("HEAD /healthz HTTP/1.1", "host: x\r\nconnection: close\r\n"), QUIET)
            .await;
    let head = String::from_utf8(head).unwrap();
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n") && head.contains("content-length: 3"),
        "{head}"
    );
    for (line, status) in [
        ("OPTIONS /v1/models HTTP/1.1", 405),
        ("DELETE /v1/models HTTP/1.1", 405),
        ("TRACE / HTTP/1.1", 405),
        ("BREW /nowhere HTTP/1.1", 404),
    ] {
        assert_eq!(
            ask_one(&gateway, &get(line, "host: x\r\nconnection: close\r\n")).await.status,
            status,
            "{line}"
        );
    }
    // Who expects to be asked for the body is asked.
    let mut stream = TcpStream::connect(&gateway.addr).await.unwrap();
    let body = good();
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut got = [0; 25];
    tokio::time::timeout(5 * SECOND, stream.read_exact(&mut got)).await.unwrap().unwrap();
    assert_eq!(&got, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(&body).await.unwrap();
    let mut rest = vec![];
    tokio::time::timeout(5 * SECOND, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert_eq!(answers(&rest)[0].status, 200);
    // The type that a body says it has does not matter, as long as it is JSON.
    for kind in ["text/plain", "multipart/form-data; boundary=x", "application/json; charset=utf-16", ""] {
        let head = format!(
            "POST {PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        assert_eq!(ask_one(&gateway, &[head.as_bytes(), &body].concat()).await.status, 200, "{kind}");
    }
    for garbage in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"\r\n\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ] {
        let all = ask(&gateway, garbage).await;
        assert!(all.iter().all(|a| a.status == 400), "{garbage:?}: {all:?}");
    }
    is_well(&gateway).await;
}

#[tokio::test]
async fn a_refusal_before_the_body_says_that_the_connection_ends() {
    let (_decode, gateway) = gateway(quick(), &[]).await;
    // Clients that keep connections would send their next request into a closed one.
    let head = "POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n";
    let refused = ask_one(&gateway, head.as_bytes()).await;
    assert_eq!((refused.status, refused.header("connection")), (404, Some("close")));
    let answered = ask_one(&gateway, &post(PATH, "", &good())).await;
    assert_eq!((answered.status, answered.header("connection")), (200, None));
    is_well(&gateway).await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let (_decode, gateway) = gateway(quick(), &[]).await;
    let mut bytes = vec![];
    for i in 0..20 {
        bytes.extend(post(PATH, &format!("x-request-id: nr-{i}\r\n"), &good()));
        bytes
            .extend(format!("GET /healthz HTTP/1.1\r\nhost: x\r\nx-request-id: between-{i}\r\n\r\n").bytes());
    }
    let all = ask(&gateway, &bytes).await;
    let ids: Vec<_> = all.iter().map(|a| a.header("x-request-id").unwrap().to_owned()).collect();
    let wanted: Vec<_> = (0..20).flat_map(|i| [format!("nr-{i}"), format!("between-{i}")]).collect();
    assert_eq!(ids, wanted);
    assert!(all.iter().all(|a| a.status == 200));
}

#[tokio::test]
async fn slow_heads_and_idle_connections_hold_nothing_past_their_time() {
    let flags = ["--header-read-timeout-ms", "600", "--idle-timeout-ms", "1500"];
    let (_decode, gateway) = gateway(quick(), &flags).await;
    let before = gateway.process.sockets();
    let begun = Instant::now();
    let mut slow = vec![];
    for i in 0..200 {
        let mut stream = TcpStream::connect(&gateway.addr).await.unwrap();
        stream.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-drip: ").await.unwrap();
        // Some go on dripping.
        slow.push(tokio::spawn(async move {
            let (mut read, mut write) = stream.into_split();
            let dripping = tokio::spawn(async move {
                while i % 2 == 0 && write.write_all(b"a").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                tokio::time::sleep(20 * SECOND).await;
            });
            let mut rest = vec![];
            let closed = tokio::time::timeout(10 * SECOND, read.read_to_end(&mut rest)).await.is_ok();
            dripping.abort();
            closed
        }));
    }
    let opened = begun.elapsed();
    for task in slow {
        assert!(task.await.unwrap(), "still open");
    }
    assert!(begun.elapsed() < opened + 2 * SECOND, "cut off after {:?}", begun.elapsed());
    wait::until("all are gone", 5 * SECOND, || async {
        (metric(&gateway.metrics().await, "pd_bridge_connections", "") <= 1.0).then_some(())
    })
    .await;
    if let (Some(before), Some(after)) = (before, gateway.process.sockets()) {
        assert!(after <= before + 2, "{before} sockets before, {after} after");
    }
    // Idle: after a request, and without any. Neither is closed early.
    for ask_first in [true, false] {
        let mut stream = TcpStream::connect(&gateway.addr).await.unwrap();
        let mut rest = vec![];
        if ask_first {
            stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        }
        let begun = Instant::now();
        let closed = tokio::time::timeout(10 * SECOND, stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "still open");
        assert!(
            begun.elapsed() > Duration::from_millis(1400) && begun.elapsed() < 5 * SECOND,
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(rest.is_empty(), !ask_first);
    }
}

#[tokio::test]
async fn slow_bodies_hold_their_connection_only() {
    let (_decode, gateway) = gateway(quick(), &["--max-in-flight", "2", "--max-queue", "0"]).await;
    let mut slow = vec![];
    for _ in 0..50 {
        let mut stream = TcpStream::connect(&gateway.addr).await.unwrap();
        stream
            .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n{")
            .await
            .unwrap();
        slow.push(stream);
    }
    is_well(&gateway).await;
    assert_eq!(metric(&gateway.metrics().await, "pd_bridge_requests_in_flight", ""), 0.0);
}

/// Tokens as fast as they are taken, without end.
fn flood() -> Vec<Step> {
    let some = || Step::Tokens(vec![100; 512]);
    [vec![Step::Started], (0..40_000).map(|_| some()).collect(), vec![Step::Finished(FinishReason::Stop)]]
        .concat()
}

#[tokio::test]
async fn a_client_that_reads_nothing_stops_the_worker_and_is_cut_off() {
    let (decode, gateway) = gateway(flood(), &["--write-timeout-ms", "1500"]).await;
    let mut stream = TcpStream::connect(&gateway.addr).await.unwrap();
    let mut body = completion("x", 4_000_000);
    body["stream"] = true.into();
    stream.write_all(&post(PATH, "", body.to_string().as_bytes())).await.unwrap();
    wait::until("the worker is told", 20 * SECOND, || async { decode.cancelled().pop() }).await;
    // Others are served meanwhile and afterwards, and what the slow one held is free.
    decode.play(quick());
    is_well(&gateway).await;
    wait::until("it is gone", 5 * SECOND, || async {
        (metric(&gateway.metrics().await, "pd_bridge_connections", "") <= 1.0).then_some(())
    })
    .await;
    if let Some(bytes) = gateway.process.memory_bytes("VmRSS") {
        assert!(bytes < 200 << 20, "{bytes} bytes");
    }
    drop(stream);
}

#[tokio::test]
async fn who_closes_their_half_has_left() {
    let (decode, gateway) = gateway(vec![Step::Started, Step::Tokens(vec![100]), Step::Silence], &[]).await;
    let mut stream = TcpStream::connect(&gateway.addr).await.unwrap();
    let mut body = completion("x", 9);
    body["stream"] = true.into();
    stream.write_all(&post(PATH, "", body.to_string().as_bytes())).await.unwrap();
    let mut first = [0; 512];
    assert!(tokio::time::timeout(5 * SECOND, stream.read(&mut first)).await.unwrap().unwrap() > 0);
    stream.shutdown().await.unwrap();
    wait::until("a cancel", 5 * SECOND, || async { decode.cancelled().pop() }).await;
    // Half of a head, half of a body, then the end.
    for part in [
        "POST /v1/comp",
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{\"prompt\":",
    ] {
        let mut stream = TcpStream::connect(&gateway.addr).await.unwrap();
        stream.write_all(part.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = vec![];
        assert!(
            tokio::time::timeout(5 * SECOND, stream.read_to_end(&mut rest)).await.is_ok(),
            "still open: {part}"
        );
        assert!(answers(&rest).iter().all(|a| a.status == 400), "{:?}", String::from_utf8_lossy(&rest));
    }
    wait::until("all are gone", 5 * SECOND, || async {
        (metric(&gateway.metrics().await, "pd_bridge_connections", "") <= 1.0).then_some(())
    })
    .await;
}

/// The bar: with 10,000 idle connections a new request is answered in less than 50 ms.
#[tokio::test]
async fn ten_thousand_idle_connections_are_no_weight() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    const IDLE: u64 = 10_000;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let idle = IDLE.min(hard.saturating_sub(600));
    if idle < IDLE {
        eprintln!("SKIPPED in part: this system allows {hard} open files, so {idle} connections are tried");
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard.min(IDLE + 1000), hard).unwrap();
    let (_decode, gateway) = gateway(quick(), &[]).await;
    let empty = gateway.process.memory_bytes("VmRSS");
    let mut held = Vec::new();
    for i in 0..idle {
        let mut stream =
            TcpStream::connect(&gateway.addr).await.unwrap_or_else(|e| panic!("connection {i}: {e}"));
        // Every other one has asked something before.
        if i % 2 == 0 {
            stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        }
        held.push(stream);
    }
    wait::until("all are there", 30 * SECOND, || async {
        (metric(&gateway.metrics().await, "pd_bridge_connections", "") >= idle as f64).then_some(())
    })
    .await;
    let mut times = vec![];
    for _ in 0..200 {
        let begun = Instant::now();
        let mut stream = TcpStream::connect(&gateway.addr).await.unwrap();
        stream.write_all(&post(PATH, "connection: close\r\n", &good())).await.unwrap();
        let mut rest = vec![];
        stream.read_to_end(&mut rest).await.unwrap();
        times.push(begun.elapsed());
        assert_eq!(answers(&rest)[0].status, 200);
    }
    times.sort();
    let each = empty.zip(gateway.process.memory_bytes("VmRSS")).map(|(a, b)| b.saturating_sub(a) / idle);
    eprintln!(
        "{idle} idle: a new request takes {:?} (median), {:?} (p99), {:?} (most); {each:?} bytes per connection",
        times[100], times[198], times[199]
    );
    // A busy machine may hold one of them up; the rule is what counts.
    assert!(times[195] < Duration::from_millis(50), "{times:?}");
    assert_eq!(get(&gateway.addr, "/readyz").await.status, 200);
}
