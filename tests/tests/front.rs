//! The front door's looks: TLS, other origins, silence in a stream, metrics for dashboards of vLLM.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::fakes::{FakeDecode, Step};
use pd_tests::http::{Event, completion, get, metric, post, send};
use pd_tests::process::Process;
use pd_tests::raw::answers;
use pd_tests::stack::{Gateway, free_port};
use pd_tests::{prometheus, tiny, wait};
use shared::control::FinishReason;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

fn slow(pause: Duration) -> Vec<Step> {
    vec![
        Step::Started,
        Step::Tokens(vec![100]),
        Step::Pause(pause),
        Step::Tokens(vec![101]),
        Step::Finished(FinishReason::Stop),
    ]
}

async fn gateway(script: Vec<Step>, extra: &[&str]) -> (FakeDecode, Gateway) {
    let decode = FakeDecode::start(tiny::model(), script).await;
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, extra).await;
    (decode, gateway)
}

#[tokio::test]
async fn tls_is_spoken_when_there_is_a_certificate() {
    let made = rcgen::generate_simple_self_signed(["front.example".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (cert, key) =
        (file("cert.pem", &made.cert.pem()), file("key.pem", &made.signing_key.serialize_pem()));
    let decode = FakeDecode::start(tiny::model(), slow(Duration::from_millis(10))).await;
    let flags = ["--tls-cert", &cert, "--tls-key", &key, "--header-read-timeout-ms", "800"];
    let gateway = Gateway::start_unready(tiny::model(), &decode.server.addr, None, &flags);
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let ask = async |request: Vec<u8>| {
        let stream = TcpStream::connect(&gateway.addr).await.ok()?;
        let name = ServerName::try_from("front.example").unwrap();
        let mut stream = connector.connect(name, stream).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
        stream.write_all(&request).await.unwrap();
        let mut got = vec![];
        // It says goodbye before it closes, or this is an error.
        stream.read_to_end(&mut got).await.unwrap();
        answers(&got).pop()
    };
    let ready = b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_vec();
    wait::until("a ready gateway", Duration::from_secs(60), || async {
        (ask(ready.clone()).await?.status == 200).then_some(())
    })
    .await;
    let mut body = completion("x", 4);
    body["stream"] = true.into();
    let stream = pd_tests::raw::post("/v1/completions", "connection: close\r\n", body.to_string().as_bytes());
    let answer = ask(stream).await.unwrap();
    assert!(answer.status == 200 && answer.text().ends_with("data: [DONE]\n\n"), "{answer:?}");
    // Plain HTTP is not answered with plain HTTP, and silence instead of a handshake ends.
    for said in [&b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"[..], b"", b"\x16\x03\x01"] {
        let mut plain = TcpStream::connect(&gateway.addr).await.unwrap();
        plain.write_all(said).await.unwrap();
        let (mut got, begun) = (vec![], Instant::now());
        let closed = tokio::time::timeout(Duration::from_secs(5), plain.read_to_end(&mut got)).await;
        assert!(closed.is_ok() && begun.elapsed() < Duration::from_secs(3), "{said:?}");
        assert!(answers(&got).is_empty(), "{got:?}");
    }
    // What is wrong with a certificate is said by name, before anything starts.
    let empty = file("empty.pem", "");
    for (flags, word) in [
        (vec!["--tls-cert", &cert], "tls_key"),
        (vec!["--tls-key", &key], "tls_cert"),
        (vec!["--tls-cert", &empty, "--tls-key", &key], "empty.pem"),
        (vec!["--tls-cert", &cert, "--tls-key", &empty], "empty.pem"),
        (vec!["--tls-cert", "/no/such.pem", "--tls-key", &key], "/no/such.pem"),
    ] {
        let listen = format!("127.0.0.1:{}", free_port());
        let model = tiny::model().to_str().unwrap();
        let args =
            [&["gateway", "--model", model, "--decode", "127.0.0.1:9", "--listen", &listen], &flags[..]]
                .concat();
        let args: Vec<String> = args.into_iter().map(str::to_owned).collect();
        let mut process = Process::start("pd-bridge", &args);
        let status = process.wait(Duration::from_secs(20)).unwrap();
        assert_eq!(status.code(), Some(64), "{flags:?}: {}", process.log());
        assert!(process.log().contains(word), "{flags:?}: {}", process.log());
    }
}

#[tokio::test]
async fn other_origins_are_let_in_by_the_setting_only() {
    let preflight = [
        ("origin", "https://chat.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ];
    let (_decode, closed) = gateway(slow(Duration::ZERO), &[]).await;
    let reply = send(&closed.addr, "OPTIONS", "/v1/completions", &preflight, None).await.unwrap();
    assert!(reply.status == 405 && !reply.headers.contains_key("access-control-allow-origin"));
    let reply = post(&closed.addr, "/v1/completions", &preflight[..1], &completion("x", 1)).await;
    assert!(reply.status == 200 && !reply.headers.contains_key("access-control-allow-origin"));

    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.toml");
    std::fs::write(&keys, "a = { key = \"sk-0123456789abcdef\", admin = true }").unwrap();
    let flags = ["--cors-allow-origins", "https://chat.example", "--api-keys-file", keys.to_str().unwrap()];
    let decode = FakeDecode::start(tiny::model(), slow(Duration::ZERO)).await;
    let open = Gateway::start_unready(tiny::model(), &decode.server.addr, None, &flags);
    open.ready(false).await;
    // A browser asks without a key first.
    let reply = send(&open.addr, "OPTIONS", "/v1/completions", &preflight, None).await.unwrap();
    let header = |name: &str| reply.headers.get(name).map(|v| v.to_str().unwrap().to_lowercase());
    assert_eq!(reply.status, 200);
    assert_eq!(header("access-control-allow-origin").as_deref(), Some("https://chat.example"));
    assert!(header("access-control-allow-headers").unwrap().contains("authorization"));
    let asked = [preflight[0], ("authorization", "Bearer sk-0123456789abcdef")];
    let reply = post(&open.addr, "/v1/completions", &asked, &completion("x", 1)).await;
    assert_eq!(reply.headers["access-control-allow-origin"], "https://chat.example");
    assert!(reply.headers["access-control-expose-headers"].to_str().unwrap().contains("x-pd-bridge"));
    let other = [("origin", "https://evil.example"), preflight[1], preflight[2]];
    let reply = send(&open.addr, "OPTIONS", "/v1/completions", &other, None).await.unwrap();
    assert!(reply.headers.get("access-control-allow-origin").is_none_or(|v| v != "https://evil.example"));
}

#[tokio::test]
async fn silence_in_a_stream_is_filled_with_comments() {
    let (_decode, gateway) =
        gateway(slow(Duration::from_millis(1500)), &["--sse-keep-alive-ms", "400"]).await;
    let mut body = completion("x", 4);
    body["stream"] = true.into();
    let reply = post(&gateway.addr, "/v1/completions", &[], &body).await;
    assert_eq!(
        (&reply.headers["cache-control"], &reply.headers["x-accel-buffering"]),
        (&"no-cache".parse().unwrap(), &"no".parse().unwrap())
    );
    let comments = reply.events().iter().filter(|e| **e == Event::Comment("keep-alive".to_owned())).count();
    assert!((3..=8).contains(&comments), "{comments}: {:?}", reply.events());
    let longest = reply.pieces.windows(2).map(|p| p[1].0 - p[0].0).max().unwrap();
    assert!(longest < Duration::from_millis(700), "{longest:?} of silence");
}

#[tokio::test]
async fn dashboards_made_for_vllm_find_their_metrics() {
    let (decode, gateway) = gateway(slow(Duration::from_millis(120)), &["--max-in-flight", "1"]).await;
    let mut body = completion("hello", 7);
    body["n"] = 2.into();
    decode.play(vec![Step::Started, Step::All(vec![100, 101, 102])]);
    assert_eq!(post(&gateway.addr, "/v1/completions", &[], &body).await.status, 200);
    decode.play(slow(Duration::from_millis(120)));
    // One runs, one waits.
    let addr = gateway.addr.clone();
    decode.play(vec![Step::Started, Step::Tokens(vec![100]), Step::Silence]);
    let ask = || {
        let addr = addr.clone();
        tokio::spawn(async move { post(&addr, "/v1/completions", &[], &completion("x", 2)).await })
    };
    let both = (ask(), ask());
    let text = wait::until("one running, one waiting", Duration::from_secs(10), || async {
        let text = gateway.metrics().await;
        let is = |name: &str| metric(&text, name, "engine=\"0\",model_name=\"tiny\"") == 1.0;
        let has_begun = metric(&text, "vllm:generation_tokens_total", "") == 7.0;
        (has_begun && is("vllm:num_requests_running") && is("vllm:num_requests_waiting")).then_some(text)
    })
    .await;
    both.0.abort();
    both.1.abort();
    let value = |name: &str, labels: &str| metric(&text, name, labels);
    let prompt = value("vllm:prompt_tokens_total", "") - 1.0;
    assert!(prompt >= 5.0, "{prompt}");
    assert_eq!(value("vllm:generation_tokens_total", ""), 7.0);
    assert_eq!(value("vllm:request_success_total", "finished_reason=\"stop\""), 2.0);
    assert_eq!(value("vllm:request_generation_tokens_count", ""), 2.0);
    assert_eq!(value("vllm:request_generation_tokens_sum", ""), 6.0);
    assert_eq!(value("vllm:request_params_n_sum", ""), 3.0);
    assert_eq!(value("vllm:request_params_max_tokens_sum", ""), 9.0);
    for name in ["time_to_first_token_seconds", "request_prompt_tokens"] {
        assert_eq!(value(&format!("vllm:{name}_count"), ""), 2.0, "{name}");
    }
    for name in [
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
    ] {
        assert_eq!(value(&format!("vllm:{name}_count"), ""), 1.0, "{name}");
    }
    for name in ["inter_token_latency_seconds", "time_per_output_token_seconds"] {
        assert!(value(&format!("vllm:{name}_count"), "") >= 1.0, "{name}");
    }
    for name in [
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "external_prefix_cache_queries_total",
        "external_prefix_cache_hits_total",
    ] {
        assert!(text.contains(&format!("\nvllm:{name}{{engine=\"0\",model_name=\"tiny\"}}")), "{name}");
    }
    wait::until("the abandoned ones are counted", Duration::from_secs(10), || async {
        (metric(&gateway.metrics().await, "vllm:request_success_total", "finished_reason=\"abort\"") >= 1.0)
            .then_some(())
    })
    .await;
    // Prometheus' own judge. Colons are what vLLM's names have, and `perc` is its word; nothing else may be wrong.
    let text = String::from_utf8(get(&gateway.addr, "/metrics").await.body.to_vec()).unwrap();
    let mut promtool = Command::new(prometheus::programs().join("promtool"))
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let said = promtool.wait_with_output().unwrap();
    let said = String::from_utf8([said.stdout, said.stderr].concat()).unwrap();
    let other: Vec<&str> = said
        .lines()
        .filter(|l| !l.is_empty() && !l.contains("metric names should not contain ':'"))
        .collect();
    assert!(other.is_empty(), "{other:#?}");
}
