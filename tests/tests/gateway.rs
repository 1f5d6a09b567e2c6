//! A real gateway between scripted workers: event streams, errors, cancels, deadlines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::fakes::{FakeDecode, FakePrefill, Play, Step};
use pd_tests::http::{self, BRIDGE, Event, completion, get, metric, post, send};
use pd_tests::stack::Gateway;
use pd_tests::{tiny, wait};
use serde_json::{Value, json};
use shared::control::{FinishReason, WorkerError, WorkerErrorCode};
use shared::verdict::VerdictKind;
use std::time::{Duration, Instant};

/// Ids of `a`, `b`, `c` … in the tiny model: three specials, then printable bytes from `!` in byte order.
fn letters(text: &str) -> Vec<u32> {
    text.bytes().map(|b| u32::from(b) + 3).collect()
}

fn tokens(text: &str) -> Vec<Step> {
    letters(text).into_iter().map(|id| Step::Tokens(vec![id])).collect()
}

fn whole(text: &str) -> Vec<Step> {
    [vec![Step::Started], tokens(text), vec![Step::Finished(FinishReason::Stop)]].concat()
}

async fn alone(script: Vec<Step>) -> (FakeDecode, Gateway) {
    let decode = FakeDecode::start(tiny::model(), script).await;
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, &[]).await;
    (decode, gateway)
}

async fn both(script: Vec<Step>, play: Play) -> (FakeDecode, FakePrefill, Gateway) {
    let decode = FakeDecode::start(tiny::model(), script).await;
    let prefill = FakePrefill::start(tiny::model(), play).await;
    let gateway = Gateway::start(tiny::model(), &decode.server.addr, Some(&prefill.server.addr), &[]).await;
    (decode, prefill, gateway)
}

fn chat(stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream, "max_tokens": 16})
}

const PROMPT: &str = "a prompt that is long enough to be worth a transfer, if only just, in the eyes of the planner of the gateway";

#[tokio::test]
async fn field_06_no_prefill_worker_is_said_aloud_or_refused() {
    let (_decode, gateway) = alone(whole("ok")).await;
    let reply = post(&gateway.addr, "/v1/completions", &[], &completion(PROMPT, 8)).await;
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "ok"));
    let v = reply.verdict();
    assert_eq!((v.verdict, v.reason.as_deref()), (VerdictKind::Native, Some("no_prefill_worker")));
    for header in
        [("x-pd-bridge-require", "any"), ("x-pd-bridge-require", "complete"), ("x-pd-bridge-only", "1")]
    {
        let reply = post(&gateway.addr, "/v1/completions", &[header], &completion(PROMPT, 8)).await;
        assert_eq!(reply.status, 503);
        let v = reply.verdict();
        assert_eq!((v.verdict, v.reason.as_deref()), (VerdictKind::Refused, Some("no_prefill_worker")));
        let error = &reply.json()["error"];
        assert!(
            error["message"].is_string() && error["type"].is_string() && error["code"].is_string(),
            "{error}"
        );
        let again = get(&gateway.addr, &format!("/v1/bridge/verdicts/{}", v.request_id)).await;
        assert_eq!(again.json()["verdict"], "refused");
    }
    let metrics = gateway.metrics().await;
    assert_eq!(metric(&metrics, "pd_bridge_requests_total", r#"verdict="refused""#), 3.0);
}

#[tokio::test]
async fn field_07_a_failed_prefill_reaches_the_decoder_at_once() {
    let script = [vec![Step::Pause(Duration::from_secs(2))], whole("ok")].concat();
    for play in [Play::Fail(WorkerErrorCode::Engine), Play::Fail(WorkerErrorCode::Busy), Play::Vanish] {
        let (decode, _prefill, gateway) = both(script.clone(), play).await;
        let reply = post(&gateway.addr, "/v1/completions", &[BRIDGE], &completion(PROMPT, 8)).await;
        assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "ok"));
        let (aborted, generated) = (decode.aborted(), decode.generated());
        let (_, at) = aborted.first().unwrap_or_else(|| panic!("the decoder was never told"));
        let delay = at.saturating_duration_since(generated[0]);
        assert!(delay < Duration::from_millis(1000), "told after {delay:?}");
        assert_eq!(reply.verdict().verdict, VerdictKind::Failed);
    }
}

#[tokio::test]
async fn field_08_deadlines_grow_with_the_prompt() {
    let (_decode, prefill, gateway) = both(whole("ok"), Play::Fail(WorkerErrorCode::Engine)).await;
    for length in [100, 7000] {
        post(&gateway.addr, "/v1/completions", &[BRIDGE], &completion(&"x".repeat(length), 1)).await;
    }
    let deadlines: Vec<u64> = prefill.specs().iter().map(|s| s.deadline_ms).collect();
    assert!(deadlines[1] > deadlines[0] * 2, "{deadlines:?}");
}

/// A prefill worker that says `done` without having sent anything is not believed: the verdict is the decoder's.
#[tokio::test]
async fn the_verdict_is_the_decoders() {
    let (_decode, _prefill, gateway) = both(whole("ok"), Play::Lie).await;
    let reply = post(&gateway.addr, "/v1/completions", &[BRIDGE], &completion(PROMPT, 8)).await;
    let v = reply.verdict();
    assert_eq!((v.verdict, v.bridged_tokens, v.cached_tokens), (VerdictKind::Failed, 0, 0));
    assert_eq!(reply.usage()["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test]
async fn field_14_an_error_in_mid_stream_is_an_event_that_clients_understand() {
    let broken = Step::Error(WorkerError::new(WorkerErrorCode::Engine, "the engine is gone"));
    let (decode, gateway) = alone([vec![Step::Started], tokens("ab"), vec![broken.clone()]].concat()).await;
    let reply = post(&gateway.addr, "/v1/chat/completions", &[], &chat(true)).await;
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "ab"));
    let events = reply.events();
    assert!(events.iter().all(|e| !matches!(e, Event::Other(_))), "{events:?}");
    let last = events.iter().rfind(|e| !matches!(e, Event::Done)).unwrap();
    assert!(matches!(last, Event::Data(v) if v["error"]["message"].is_string()), "{last:?}");
    // Before the first byte it is a status.
    decode.play(vec![broken]);
    for stream in [false, true] {
        let reply = post(&gateway.addr, "/v1/chat/completions", &[], &chat(stream)).await;
        assert_eq!(reply.status, 500);
        assert!(reply.json()["error"]["message"].is_string());
        assert_eq!(reply.verdict().bridged_tokens, 0);
    }
    // Not streamed: an error after some tokens is no answer.
    decode.play(
        [
            vec![Step::Started],
            tokens("ab"),
            vec![Step::Error(WorkerError::new(WorkerErrorCode::Engine, "x"))],
        ]
        .concat(),
    );
    assert_eq!(post(&gateway.addr, "/v1/chat/completions", &[], &chat(false)).await.status, 500);
}

#[tokio::test]
async fn field_16_done_comes_once_and_last() {
    let (decode, gateway) = alone(whole("abc")).await;
    let scripts = [
        whole("abc"),
        whole(""),
        [vec![Step::Started, Step::Tokens(letters("xyz"))], vec![Step::Finished(FinishReason::Length)]]
            .concat(),
    ];
    for script in scripts {
        decode.play(script);
        for usage in [false, true] {
            for (path, mut body) in
                [("/v1/chat/completions", chat(true)), ("/v1/completions", completion("hi", 9))]
            {
                body["stream"] = true.into();
                body["stream_options"] = json!({"include_usage": usage});
                let reply = post(&gateway.addr, path, &[], &body).await;
                let events: Vec<Event> =
                    reply.events().into_iter().filter(|e| !matches!(e, Event::Comment(_))).collect();
                assert_eq!(events.iter().filter(|e| **e == Event::Done).count(), 1, "{path} {events:?}");
                assert_eq!(events.last(), Some(&Event::Done));
                let data: Vec<&Value> = events
                    .iter()
                    .filter_map(|e| if let Event::Data(v) = e { Some(v) } else { None })
                    .collect();
                let reasons = data.iter().filter(|v| v["choices"][0]["finish_reason"].is_string()).count();
                assert_eq!(reasons, 1, "one finish_reason: {data:?}");
                let with_usage = data.iter().filter(|v| v["usage"].is_object()).count();
                assert_eq!(with_usage, usize::from(usage), "{path} {data:?}");
                if usage {
                    assert_eq!(data.last().unwrap()["choices"], json!([]));
                }
            }
        }
    }
}

#[tokio::test]
async fn field_17_a_client_that_leaves_stops_the_worker() {
    let endless = [vec![Step::Started], tokens("ab"), vec![Step::Silence]].concat();
    let (decode, gateway) = alone(endless.clone()).await;
    let mut response =
        send(&gateway.addr, "POST", "/v1/chat/completions", &[], Some(&chat(true))).await.unwrap();
    while !String::from_utf8_lossy(&response.piece().await.unwrap().unwrap().1).contains("\"b\"") {}
    let left = Instant::now();
    drop(response);
    let cancelled =
        wait::until("a cancel", Duration::from_secs(5), || async { decode.cancelled().pop() }).await;
    assert!(cancelled.1 - left < Duration::from_millis(500), "cancelled after {:?}", cancelled.1 - left);
    // While the decoder says nothing yet, and also without streaming.
    for (script, stream) in [(vec![Step::Silence], true), (vec![Step::Silence], false), (endless, false)] {
        let (decode, prefill, gateway) = both(script, Play::Hang).await;
        let addr = gateway.addr.clone();
        let mut body = completion(PROMPT, 5);
        body["stream"] = stream.into();
        let asking = tokio::spawn(async move {
            let _ = send(&addr, "POST", "/v1/completions", &[BRIDGE], Some(&body)).await;
        });
        wait::until("generate", Duration::from_secs(5), || async {
            (!decode.generated().is_empty()).then_some(())
        })
        .await;
        asking.abort();
        wait::until("a cancel on both", Duration::from_secs(5), || async {
            (!decode.cancelled().is_empty() && !prefill.cancelled().is_empty()).then_some(())
        })
        .await;
        wait::until("nothing in flight", Duration::from_secs(5), || async {
            (metric(&gateway.metrics().await, "pd_bridge_requests_in_flight", "") == 0.0).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn field_18_every_token_leaves_when_it_exists() {
    let pause = Duration::from_millis(200);
    let slow = letters("abcd").into_iter().flat_map(|id| [Step::Tokens(vec![id]), Step::Pause(pause)]);
    let script = [vec![Step::Started], slow.collect(), vec![Step::Finished(FinishReason::Stop)]].concat();
    let (_decode, gateway) = alone(script).await;
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let mut body = if path.contains("chat") { chat(true) } else { completion("hi", 9) };
        body["stream"] = true.into();
        let reply = post(&gateway.addr, path, &[], &body).await;
        let arrival = |letter: &str| {
            let has = |b: &[u8]| {
                http::events(&String::from_utf8_lossy(b)).iter().any(|e| {
                matches!(e, Event::Data(v) if [&v["choices"][0]["text"], &v["choices"][0]["delta"]["content"]].contains(&&json!(letter)))
            })
            };
            reply.pieces.iter().find(|(_, b)| has(b)).unwrap_or_else(|| panic!("{letter}: {reply:?}")).0
        };
        let times: Vec<Duration> = ["a", "b", "c", "d"].into_iter().map(arrival).collect();
        for pair in times.windows(2) {
            let gap = pair[1] - pair[0];
            assert!(gap > pause / 2 && gap < pause * 2, "{path}: {times:?}");
        }
    }
    let metrics = gateway.metrics().await;
    let within = |le: &str| metric(&metrics, "pd_bridge_token_write_seconds_bucket", &format!("le=\"{le}\""));
    assert_eq!(within("+Inf"), 8.0);
    assert_eq!(within("0.005"), 8.0, "tokens waited more than 5 ms in the gateway:\n{metrics}");
}

/// A decoder that vanishes before the first token: one clean error, or an answer after it came back, never half of one.
#[tokio::test]
async fn a_vanished_decoder_is_one_clean_error() {
    for script in [vec![Step::Vanish], [vec![Step::Started], tokens("ab"), vec![Step::Vanish]].concat()] {
        for stream in [false, true] {
            let decode = FakeDecode::start(tiny::model(), script.clone()).await;
            let quick = ["--reconnect-wait-ms", "300"];
            let gateway = Gateway::start(tiny::model(), &decode.server.addr, None, &quick).await;
            let reply = post(&gateway.addr, "/v1/chat/completions", &[], &chat(stream)).await;
            if reply.status == 200 {
                assert!(stream && script.len() > 1, "{reply:?}");
                let events = reply.events();
                let errors =
                    events.iter().filter(|e| matches!(e, Event::Data(v) if v["error"].is_object())).count();
                assert_eq!(errors, 1, "{events:?}");
                assert!(!events.contains(&Event::Done) || events.last() == Some(&Event::Done));
            } else {
                assert!(reply.status.is_server_error() && reply.json()["error"]["message"].is_string());
            }
            let _ = reply.verdict();
        }
    }
}

#[tokio::test]
async fn early_headers_end_with_the_final_verdict() {
    let script = [vec![Step::Pause(Duration::from_millis(300))], whole("ok")].concat();
    let (_decode, gateway) = alone(script).await;
    let reply = post(&gateway.addr, "/v1/chat/completions", &[("x-pd-bridge-early", "1")], &chat(true)).await;
    assert_eq!(reply.verdict().verdict, VerdictKind::Pending);
    assert!(reply.pieces[0].0 < Duration::from_millis(2000));
    let events = reply.events();
    let comment = events.iter().find_map(|e| match e {
        Event::Comment(c) => c.strip_prefix("x-pd-bridge "),
        _ => None,
    });
    let verdict: shared::verdict::Verdict = serde_json::from_str(comment.unwrap()).unwrap();
    assert!(verdict.is_consistent() && verdict.verdict == VerdictKind::Native);
    let position = |f: &dyn Fn(&Event) -> bool| events.iter().position(f).unwrap();
    let first_data = position(&|e| matches!(e, Event::Data(_)));
    assert!(position(&|e| matches!(e, Event::Comment(c) if c.starts_with("x-pd-bridge"))) < first_data);
}

#[tokio::test]
async fn bad_requests_have_a_verdict_and_an_openai_error() {
    let (_decode, gateway) = alone(whole("ok")).await;
    let long = "x".repeat(tiny::MAX_TOKENS + 1);
    let bad = [
        ("/v1/chat/completions", json!({}), 400),
        ("/v1/chat/completions", json!({"messages": "hi"}), 400),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "temperature": 9}),
            400,
        ),
        ("/v1/completions", json!({"prompt": long, "max_tokens": 4}), 400),
        ("/v1/completions", json!({"prompt": "x", "model": "another"}), 404),
        ("/v1/completions", json!([1]), 400),
    ];
    for (path, body, status) in bad {
        let reply = post(&gateway.addr, path, &[], &body).await;
        assert_eq!(reply.status, status, "{body:.80}");
        assert!(reply.json()["error"]["message"].is_string());
        let _ = reply.verdict();
    }
    for (name, value) in [("x-pd-bridge-require", "maybe"), ("x-pd-bridge-route", "fast")] {
        let reply = post(&gateway.addr, "/v1/completions", &[(name, value)], &completion("x", 1)).await;
        assert_eq!(reply.status, 400);
    }
}

#[tokio::test]
async fn field_25_senseless_messages_are_400() {
    let (_decode, gateway) = alone(whole("ok")).await;
    let bad = [
        json!([]),
        json!([{"role": "user"}]),
        json!([{"role": 7, "content": "x"}]),
        json!([{"role": "user", "content": {"text": "x"}}]),
        json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x"}}]}]),
        json!(["x"]),
        json!(null),
    ];
    for messages in bad {
        let body = json!({"messages": messages, "max_tokens": 2});
        let reply = post(&gateway.addr, "/v1/chat/completions", &[], &body).await;
        assert_eq!(reply.status, 400, "{body}: {}", String::from_utf8_lossy(&reply.body));
        assert!(reply.json()["error"]["message"].is_string());
    }
    // Parts of text are text.
    let body =
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 2});
    assert_eq!(post(&gateway.addr, "/v1/chat/completions", &[], &body).await.status, 200);
}
