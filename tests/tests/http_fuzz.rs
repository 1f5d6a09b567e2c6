//! The front door under mutated requests: HTTP heads, framing and JSON, against a running gateway with a scripted
//! worker, for a bounded time and with a seed that a failure names.
//!
//! Not guided by coverage: valid requests of every endpoint are mutated as bytes, as HTTP and as JSON. What must hold:
//! the gateway never ends, never panics, never goes silent with a request it has whole, answers only what HTTP allows,
//! never with a 500, and at the end nothing is left of any request.
//! `PD_TEST_HTTP_FUZZ_MS` is the time (default 8000), `PD_TEST_FUZZ_SEED` the seed (default 1).
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; counts are shown"
)]

use pd_tests::fakes::{FakeDecode, Step};
use pd_tests::http::metric;
use pd_tests::raw::{Answer, answers};
use pd_tests::stack::Gateway;
use pd_tests::{tiny, wait};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Connections that send at once.
const WORKERS: u64 = 4;
/// A whole request is answered, or its connection closed, within this.
const HANG: Duration = Duration::from_secs(20);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Valid requests to start from.
fn corpus() -> Vec<(&'static str, &'static str, Value)> {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}});
    let user = json!({"role": "user", "content": "hi"});
    vec![
        ("POST", "/v1/completions", json!({"prompt": "x", "max_tokens": 4, "temperature": 0})),
        (
            "POST",
            "/v1/completions",
            json!({"prompt": [5, 6, 7], "max_tokens": 4, "stream": true, "n": 2, "echo": true}),
        ),
        (
            "POST",
            "/v1/completions",
            json!({"prompt": ["a", "b"], "logprobs": 2, "stop": ["x", "\u{e9}"], "seed": 7,
            "logit_bias": {"5": -100}, "presence_penalty": 0.5, "frequency_penalty": -0.5, "top_p": 0.9, "top_k": 5}),
        ),
        (
            "POST",
            "/v1/chat/completions",
            json!({"messages": [{"role": "system", "content": "s"}, user], "max_tokens": 4,
            "stream": true, "stream_options": {"include_usage": true}, "top_logprobs": 2, "logprobs": true}),
        ),
        (
            "POST",
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
             "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "2"}],
            "tools": [tool], "tool_choice": "auto", "max_completion_tokens": 3, "metadata": {"k": "v"}, "user": "u"}),
        ),
        (
            "POST",
            "/v1/chat/completions",
            json!({"messages": [user], "max_tokens": 4, "response_format": {"type": "json_schema",
            "json_schema": {"name": "n", "strict": true, "schema": {"type": "object", "properties": {"a": {"enum": [1, "b"]}}}}}}),
        ),
        (
            "POST",
            "/v1/responses",
            json!({"input": "hi", "max_output_tokens": 4, "stream": true, "instructions": "i"}),
        ),
        (
            "POST",
            "/v1/responses",
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}),
        ),
        ("POST", "/tokenize", json!({"prompt": "hi", "add_special_tokens": true})),
        ("POST", "/tokenize", json!({"messages": [user]})),
        ("POST", "/detokenize", json!({"tokens": [5, 6, 7]})),
        ("GET", "/v1/models", Value::Null),
        ("GET", "/v1/models/tiny", Value::Null),
        ("GET", "/v1/bridge/verdicts/x", Value::Null),
        ("GET", "/openapi.json", Value::Null),
        ("GET", "/metrics", Value::Null),
        ("GET", "/healthz", Value::Null),
    ]
}

/// One input: bytes, and whether they are one whole request that must be answered.
struct Input {
    bytes: Vec<u8>,
    whole: bool,
}

struct Mutator(ChaCha8Rng);

impl Mutator {
    fn below(&mut self, n: usize) -> usize {
        self.0.random_range(0..n.max(1))
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.0.random_ratio(1, n)
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        let at = self.below(of.len());
        &of[at]
    }

    fn input(&mut self, corpus: &[(&str, &str, Value)]) -> Input {
        let (method, path, body) = self.pick(corpus).clone();
        let mut body = body;
        for _ in 0..self.below(4) {
            let other = self.pick(corpus).2.clone();
            self.json(&mut body, &other, 0);
        }
        let mut text = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        if self.one_in(4) {
            self.bytes(&mut text);
        }
        let (head, framed) = self.head(method, path, &text);
        let (mut bytes, mut whole) = ([head, framed].concat(), true);
        if self.one_in(4) {
            self.bytes(&mut bytes);
            whole = false;
        }
        if self.one_in(8) {
            // Another one behind it.
            let again = bytes.clone();
            bytes.extend(again);
        }
        Input { bytes, whole }
    }

    /// A head and the body as it says.
    fn head(&mut self, method: &str, path: &str, body: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let method =
            if self.one_in(20) { *self.pick(&["PUT", "HEAD", "OPTIONS", "DELETE", "PATCH"]) } else { method };
        let version = if self.one_in(20) { "HTTP/1.0" } else { "HTTP/1.1" };
        let mut head = format!("{method} {path} {version}\r\nhost: x\r\nconnection: close\r\n");
        let extra = [
            "x-pd-bridge-route: native\r\n",
            "x-pd-bridge-route: bridge\r\n",
            "x-pd-bridge-require: any\r\n",
            "x-pd-bridge-early: 1\r\n",
            "x-request-id: a\r\n",
            "x-request-id: \"\r\n",
            "authorization: Bearer x\r\n",
            "content-type: text/plain\r\n",
            "accept: text/event-stream\r\n",
            "expect: 100-continue\r\n",
            "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
            "traceparent: 00-x\r\n",
            "accept-encoding: gzip\r\n",
            "origin: https://a.example\r\n",
            "x-pd-bridge-require: \u{e9}\r\n",
        ];
        for _ in 0..self.below(4) {
            let line: &str = self.pick::<&str>(&extra);
            head.push_str(line);
        }
        let framed = if self.one_in(4) && version == "HTTP/1.1" {
            head.push_str("transfer-encoding: chunked\r\n\r\n");
            let size = 1 + self.below(200);
            let mut framed = vec![];
            for chunk in body.chunks(size) {
                framed.extend(
                    format!("{:x}\r\n", chunk.len()).bytes().chain(chunk.iter().copied()).chain(*b"\r\n"),
                );
            }
            framed.extend(b"0\r\n\r\n");
            framed
        } else {
            head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
            body.to_vec()
        };
        (head.into_bytes(), framed)
    }

    /// Changes one place in a JSON value.
    fn json(&mut self, value: &mut Value, other: &Value, depth: u32) {
        if depth < 6 && !self.one_in(4) {
            match value {
                Value::Object(map) if !map.is_empty() => {
                    let key = map.keys().nth(self.below(map.len())).unwrap().clone();
                    if self.one_in(10) {
                        map.remove(&key);
                    } else if self.one_in(10) {
                        if let Value::Object(other) = other {
                            map.extend(other.clone());
                        }
                    } else {
                        self.json(&mut map[&key], other, depth + 1);
                    }
                    return;
                }
                Value::Array(list) if !list.is_empty() => {
                    let at = self.below(list.len());
                    match self.below(8) {
                        0 => drop(list.remove(at)),
                        1 => list.insert(at, other.clone()),
                        2 => *list = vec![list[at].clone(); 1 + self.below(300)],
                        _ => self.json(&mut list[at], other, depth + 1),
                    }
                    return;
                }
                _ => {}
            }
        }
        *value = self.value(other);
    }

    fn value(&mut self, other: &Value) -> Value {
        let numbers = [0, 1, -1, 2, 5, 127, 1 << 20, i64::MAX, i64::MIN, 1 << 53, 4_294_967_296];
        match self.below(16) {
            0 => Value::Null,
            1 => Value::Bool(self.one_in(2)),
            2 => json!(*self.pick(&numbers)),
            3 => json!(u64::MAX),
            4 => json!(*self.pick(&[0.5, -0.0, 1e308, -1e308, 1e-320, 2.000_000_1])),
            5 => json!(""),
            6 => json!("x".repeat(self.below(4000))),
            7 => json!(*self.pick(&[
                "\u{0}",
                "\u{feff}",
                "\u{1f600}",
                "{{ x }}",
                "{% for %}",
                "<|im_end|>",
                "a\u{301}",
                "\u{202e}",
                "\"",
                "..",
                "auto",
                "required"
            ])),
            8 => json!([]),
            9 => json!({}),
            10 => other.clone(),
            11 => (0..60).fold(json!(1), |inner, _| json!([inner])),
            12 => (0..60).fold(
                json!({"type": "object"}),
                |inner, _| json!({"type": "object", "properties": {"a": inner}}),
            ),
            13 => Value::Object((0..200).map(|i| (i.to_string(), json!(i))).collect::<Map<_, _>>()),
            14 => json!({"$ref": "#", "pattern": "(((((a*)*)*)*)*)*$", "minItems": 9_999_999}),
            _ => {
                json!({"type": *self.pick(&["image_url", "input_audio", "file", "function", "grammar", "json_object", "text"]), "url": "http://127.0.0.1:1/"})
            }
        }
    }

    fn bytes(&mut self, x: &mut Vec<u8>) {
        let words: [&[u8]; 14] = [
            b"\r\n",
            b"\r\n\r\n",
            b"\0",
            b"\xff\xfe",
            b"\xed\xa0\x80",
            b"\\ud800",
            b"1e999",
            b"[[[[[[[[",
            b"content-length: 5\r\n",
            b"transfer-encoding: chunked\r\n",
            b"ffffffffffffffff\r\n",
            b"GET / HTTP/1.1\r\n",
            b"99999999999999999999",
            b"\"",
        ];
        for _ in 0..=self.below(3) {
            let at = self.below(x.len() + 1).min(x.len());
            let end = (at + self.below(16)).min(x.len());
            match self.below(6) {
                0 if at < x.len() => x[at] ^= 1 << self.below(8),
                1 => x.truncate(at),
                2 => drop(x.drain(at..end)),
                3 => {
                    let again = x[at..end].repeat(1 + self.below(50));
                    drop(x.splice(at..at, again));
                }
                _ => {
                    let word = *self.pick(&words);
                    drop(x.splice(at..at, word.iter().copied()));
                }
            }
        }
    }
}

/// Sends an input and reads what comes back; `None` when it hangs.
async fn exchange(addr: &str, input: &Input) -> Option<Vec<u8>> {
    let stream = TcpStream::connect(addr).await.ok()?;
    let (mut read, mut write) = stream.into_split();
    let sending = async {
        // It may be cut off before it has said all; a half request is ended, so that its answer is due.
        let _ = write.write_all(&input.bytes).await;
        if !input.whole {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let _ = write.shutdown().await;
        }
    };
    let mut got = vec![];
    let reading = read.read_to_end(&mut got);
    let both = async { tokio::join!(sending, reading) };
    // A connection that was reset in the end has still said what it said.
    let _ = tokio::time::timeout(HANG, both).await.ok()?;
    Some(got)
}

fn check(seed: u64, input: &Input, all: &[Answer]) {
    let shown = || format!("seed {seed}, input {:?}", String::from_utf8_lossy(&input.bytes));
    for answer in all {
        // The scripted worker does not know every request; what it does not answer is a 5xx of its own kind.
        assert!(answer.status != 500, "{answer:?} to {}", shown());
        if answer.status >= 400
            && !answer.body.is_empty()
            && answer.header("content-type") == Some("application/json")
        {
            let body: Value = serde_json::from_slice(&answer.body)
                .unwrap_or_else(|e| panic!("{e}: {answer:?} to {}", shown()));
            assert!(body["error"]["message"].is_string(), "{body} to {}", shown());
        }
    }
    assert!(!input.whole || !all.is_empty(), "no answer to {}", shown());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_front_door_survives_whatever_is_sent() {
    let script = vec![Step::Started, Step::All(vec![100, 101])];
    let decode = FakeDecode::start(tiny::model(), script).await;
    let flags =
        ["--max-body-bytes", "200000", "--header-read-timeout-ms", "5000", "--idle-timeout-ms", "5000"];
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, &flags).await;
    let (time, seed) =
        (Duration::from_millis(number("PD_TEST_HTTP_FUZZ_MS", 8000)), number("PD_TEST_FUZZ_SEED", 1));
    let before = gateway.process.memory_bytes("VmRSS");
    let statuses = Arc::new(std::sync::Mutex::new(BTreeMap::<u16, u64>::new()));
    let silent = Arc::new(AtomicU64::new(0));
    let begun = Instant::now();
    let workers: Vec<_> = (0..WORKERS)
        .map(|i| {
            let (addr, statuses, silent) = (gateway.addr.clone(), statuses.clone(), silent.clone());
            tokio::spawn(async move {
                let corpus = corpus();
                let mut mutator = Mutator(ChaCha8Rng::seed_from_u64(seed.wrapping_mul(1000) + i));
                while begun.elapsed() < time {
                    let input = mutator.input(&corpus);
                    let shown = || String::from_utf8_lossy(&input.bytes).into_owned();
                    let got = exchange(&addr, &input)
                        .await
                        .unwrap_or_else(|| panic!("hangs: seed {seed}, input {:?}", shown()));
                    let all = answers(&got);
                    check(seed, &input, &all);
                    let mut statuses = statuses.lock().unwrap();
                    all.iter().for_each(|a| *statuses.entry(a.status).or_default() += 1);
                    if all.is_empty() {
                        silent.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    let statuses = statuses.lock().unwrap().clone();
    let total: u64 = statuses.values().sum();
    eprintln!(
        "seed {seed}: {total} answers in {:?}: {statuses:?}; {} inputs that were no request",
        begun.elapsed(),
        silent.load(Ordering::Relaxed)
    );
    let ok = statuses.get(&200).copied().unwrap_or(0);
    assert!(total > 200 && ok > total / 50 && ok < total, "too few of a kind to mean anything: {statuses:?}");
    // Nothing is left of any of them.
    wait::until("nothing in flight", Duration::from_secs(10), || async {
        let metrics = gateway.metrics().await;
        let none = |name: &str| metric(&metrics, name, "") == 0.0;
        (none("pd_bridge_requests_in_flight")
            && none("pd_bridge_requests_queued")
            && metric(&metrics, "pd_bridge_connections", "") <= 1.0)
            .then_some(())
    })
    .await;
    let log = gateway.process.log();
    assert!(!log.contains("panicked"), "{}", gateway.process.log_tail());
    if let (Some(before), Some(after)) = (before, gateway.process.memory_bytes("VmRSS")) {
        eprintln!("memory: {before} bytes before, {after} after");
        assert!(after < before + (256 << 20));
    }
}
