//! The whole gateway against scripted workers that speak the real control protocol.

mod client;
mod membership;
mod model;
mod workers;

use crate::fleet::{self, Discovery, Fleet};
use crate::keys::ApiKey;
use crate::serve::Gateway;
use crate::settings::{GatewayArgs, Settings};
use client::{get, post, stream};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use workers::{LoseAt, PrefillScript, Script, Workers};

struct Stack {
    addr: SocketAddr,
    workers: Arc<Workers>,
    fleet: Arc<Fleet>,
    shutdown: CancellationToken,
    settings: Settings,
    _model: tempfile::TempDir,
}

impl Stack {
    async fn start(script: Script, change: impl FnOnce(&mut Settings)) -> Self {
        let workers = Workers::start(script).await;
        let prefill: Vec<String> = workers.prefill_addr().into_iter().collect();
        let members = fleet::fixed(&[workers.decode_addr()], &prefill);
        let stack = Self::over(workers, members, change).await;
        stack.fleet.any_decoder().await.unwrap();
        if !prefill.is_empty() {
            assert!(stack.fleet.bridge_within(Duration::from_secs(5)).await);
        }
        stack
    }

    /// A gateway whose fleet is made of `members`.
    async fn over(workers: Arc<Workers>, members: Discovery, change: impl FnOnce(&mut Settings)) -> Self {
        let model = model::byte_level();
        let args = GatewayArgs {
            model: Some(model.path().to_owned()),
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            ..GatewayArgs::default()
        };
        let mut settings = args.resolve().unwrap();
        change(&mut settings);
        let kept = settings.clone();
        let listener = TcpListener::bind(settings.listen).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let gateway = Gateway::start(settings, listener, members).await.unwrap();
        let fleet = gateway.app.ctx.fleet.clone();
        let shutdown = gateway.shutdown_token();
        tokio::spawn(gateway.run());
        Self { addr, workers, fleet, shutdown, settings: kept, _model: model }
    }

    async fn plain(script: Script) -> Self {
        Self::start(script, |_| {}).await
    }
}

fn completion(extra: &serde_json::Value) -> serde_json::Value {
    let mut body = json!({"prompt": "x".repeat(100), "max_tokens": 8, "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_short_prompt_is_answered_natively() {
    let s = Stack::plain(Script::saying(&["Hel", "lo"])).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8});
    let r = post(s.addr, "/v1/chat/completions", &[], &body).await;
    assert_eq!(r.status, 200, "{r:?}");
    assert_eq!(r.json()["choices"][0]["message"]["content"], "Hello");
    assert_eq!(r.json()["choices"][0]["finish_reason"], "stop");
    assert_eq!(r.verdict()["verdict"], "native");
    assert_eq!(r.verdict()["reason"], "short_prompt");
    assert_eq!(r.json()["usage"]["prompt_tokens"], r.verdict()["prompt_tokens"]);
    let id = r.header("x-request-id").unwrap();
    let kept = get(s.addr, &format!("/v1/bridge/verdicts/{id}")).await;
    assert_eq!(kept.json()["verdict"], "native");
}

#[tokio::test]
async fn a_long_prompt_is_bridged_and_streamed() {
    let s = Stack::plain(Script::saying(&["a", "b", "c"])).await;
    let body = completion(&json!({"stream": true, "stream_options": {"include_usage": true}}));
    let r = post(s.addr, "/v1/completions", &[], &body).await;
    assert_eq!(r.verdict()["verdict"], "complete", "{r:?}");
    assert_eq!(r.verdict()["bridged_tokens"], 99);
    assert!(r.verdict()["ttft_ms"].as_f64().unwrap() > 0.0);
    let events = r.events();
    assert_eq!(events.iter().filter(|e| *e == "[DONE]").count(), 1);
    assert_eq!(events.last().unwrap(), "[DONE]");
    let usage: serde_json::Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 99);
    assert_eq!(r.streamed_text(), "abc");
    let metrics = get(s.addr, "/metrics").await.body;
    assert!(metrics.contains(r#"pd_bridge_requests_total{reason="",verdict="complete"} 1"#), "{metrics}");
    assert!(metrics.contains("pd_bridge_workers_connected{role=\"prefill\"} 1"));
}

#[tokio::test]
async fn a_failing_prefill_is_told_to_the_decoder_at_once() {
    let s = Stack::plain(Script { prefill: Some(PrefillScript::Fails), ..Script::saying(&["ok"]) }).await;
    let r = post(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
    assert_eq!((r.status, r.verdict()["verdict"].as_str()), (200, Some("failed")), "{r:?}");
    assert_eq!(r.verdict()["reason"], "prefill_failed");
    let required = [("X-PD-Bridge-Require", "any")];
    let r = post(s.addr, "/v1/completions", &required, &completion(&json!({}))).await;
    assert_eq!((r.status, r.verdict()["verdict"].as_str()), (503, Some("refused")), "{r:?}");
    assert_eq!(r.json()["error"]["code"], "bridge_required");
}

#[tokio::test]
async fn a_prefill_worker_that_fails_again_and_again_rests() {
    let s = Stack::plain(Script { prefill: Some(PrefillScript::Fails), ..Script::saying(&["ok"]) }).await;
    let ask = async |headers: &[(&str, &str)]| {
        let v = post(s.addr, "/v1/completions", headers, &completion(&json!({}))).await.verdict();
        (v["verdict"].as_str().unwrap_or_default().to_owned(), v["reason"].as_str().map(str::to_owned))
    };
    let failed = ("failed".to_owned(), Some("prefill_failed".to_owned()));
    for _ in 0..3 {
        assert_eq!(ask(&[]).await, failed);
    }
    let resting = ("native".to_owned(), Some("prefill_worker_failing".to_owned()));
    assert_eq!(ask(&[]).await, resting);
    assert_eq!(ask(&[("X-PD-Bridge-Route", "bridge")]).await, failed, "who insists gets a try");
    assert_eq!(ask(&[]).await, resting);
}

#[tokio::test]
async fn a_prefill_worker_lost_after_the_answer_began_changes_nothing() {
    let script = Script {
        prefill: Some(PrefillScript::LostLate),
        token_delay: Duration::from_millis(50),
        ..Script::saying(&["a", "b", "c", "d", "e"])
    };
    let s = Stack::plain(script).await;
    let required = [("X-PD-Bridge-Require", "any")];
    let r = post(s.addr, "/v1/completions", &required, &completion(&json!({"stream": true}))).await;
    assert_eq!((r.status, r.verdict()["verdict"].as_str()), (200, Some("complete")), "{r:?}");
    assert_eq!(r.streamed_text(), "abcde");
    assert_eq!(r.events().last().unwrap(), "[DONE]");
    let metrics = get(s.addr, "/metrics").await.body;
    assert!(metrics.contains("pd_bridge_retries_total 0"), "{metrics}");
}

#[tokio::test]
async fn a_requirement_outranks_the_servers_early_headers() {
    let script = Script { prefill: Some(PrefillScript::Fails), ..Script::saying(&["ok"]) };
    let s = Stack::start(script, |settings| settings.early_headers_after = Some(Duration::ZERO)).await;
    let body = completion(&json!({"stream": true}));
    let r = post(s.addr, "/v1/completions", &[("X-PD-Bridge-Require", "any")], &body).await;
    assert_eq!((r.status, r.verdict()["verdict"].as_str()), (503, Some("refused")), "{r:?}");
    let r = post(s.addr, "/v1/completions", &[], &body).await;
    assert_eq!((r.status, r.verdict()["verdict"].as_str()), (200, Some("pending")), "{r:?}");
}

#[tokio::test]
async fn a_required_bridge_without_a_prefill_worker_is_refused() {
    let s = Stack::plain(Script { prefill: None, ..Script::saying(&["ok"]) }).await;
    let r = post(s.addr, "/v1/completions", &[("X-PD-Bridge-Only", "1")], &completion(&json!({}))).await;
    assert_eq!((r.status, r.verdict()["reason"].as_str()), (503, Some("no_prefill_worker")), "{r:?}");
    s.workers.all_released(1).await;
    let r = post(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
    assert_eq!(r.verdict()["reason"], "no_prefill_worker");
}

#[tokio::test]
async fn a_stop_text_ends_the_answer_and_the_work() {
    let s = Stack::plain(Script { endless: true, ..Script::saying(&["one E", "N", "D two"]) }).await;
    let r = post(
        s.addr,
        "/v1/completions",
        &[],
        &completion(&json!({"stop": ["END"], "stream": true, "max_tokens": 1000})),
    )
    .await;
    assert_eq!(r.streamed_text(), "one ");
    assert!(r.body.contains(r#""finish_reason":"stop""#));
    s.workers.all_released(1).await;
}

#[tokio::test]
async fn a_client_that_leaves_while_streaming_cancels() {
    let s = Stack::plain(Script { endless: true, ..Script::saying(&["a"]) }).await;
    let mut open =
        stream(s.addr, "/v1/completions", &[], &completion(&json!({"stream": true, "max_tokens": 9999})))
            .await;
    open.wait_for("data: ").await;
    drop(open);
    s.workers.all_released(1).await;
}

#[tokio::test]
async fn a_client_that_leaves_while_waiting_cancels_on_both_workers() {
    let s = Stack::plain(Script { prefill: Some(PrefillScript::Hangs), ..Script::saying(&["a"]) }).await;
    let open = stream(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
    s.workers.prefill_started(1).await;
    drop(open);
    s.workers.all_released(2).await;
}

#[tokio::test]
async fn early_headers_tell_the_verdict_later() {
    let s = Stack::plain(Script::saying(&["a"])).await;
    let r =
        post(s.addr, "/v1/completions", &[("X-PD-Bridge-Early", "1")], &completion(&json!({"stream": true})))
            .await;
    assert_eq!(r.verdict()["verdict"], "pending");
    let comment = r.body.find(": x-pd-bridge {\"verdict\":\"complete\"").unwrap();
    assert!(comment < r.body.find("data: ").unwrap());
    assert!(r.body.contains(": prefill 50/100\n\n"));
}

#[tokio::test]
async fn bad_requests_have_a_verdict_too() {
    let s = Stack::start(Script::saying(&["a"]), |settings| settings.max_body_bytes = 4096).await;
    for (path, body, status, param) in [
        ("/v1/completions", json!({"prompt": 1}), 400, Some("prompt")),
        ("/v1/completions", json!({"prompt": [999_999]}), 400, Some("prompt")),
        ("/v1/completions", json!({"prompt": "x".repeat(3000)}), 400, None),
        ("/v1/completions", json!({"prompt": "x".repeat(5000)}), 413, None),
        ("/v1/chat/completions", json!({"messages": []}), 400, Some("messages")),
        ("/v1/chat/completions", json!({"model": "gpt-9", "messages": []}), 404, Some("model")),
    ] {
        let r = post(s.addr, path, &[], &body).await;
        assert_eq!(r.status, status, "{r:?}");
        assert_eq!(r.json()["error"]["param"].as_str(), param, "{r:?}");
        assert!(r.verdict()["verdict"].is_string() && r.header("x-request-id").is_some());
    }
    let r = get(s.addr, "/v1/completions").await;
    assert_eq!((r.status, r.verdict()["verdict"].as_str()), (405, Some("native")));
    let long = "y".repeat(s.settings.max_header_bytes);
    let r = post(s.addr, "/v1/completions", &[("x-long", &long)], &json!({"prompt": "x"})).await;
    assert_eq!((r.status, r.verdict()["verdict"].as_str()), (431, Some("native")));
    assert_eq!(get(s.addr, "/nowhere").await.status, 404);
    assert_eq!(get(s.addr, "/readyz").await.status, 200);
}

#[tokio::test]
async fn a_lost_decoder_is_tried_again_once() {
    let s = Stack::plain(Script { lose_connection: 1, ..Script::saying(&["ok"]) }).await;
    let r = post(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
    assert_eq!(r.status, 200, "{r:?}");
    assert_eq!(r.json()["choices"][0]["text"], "ok");
    // Who needs a bridge waits for the prefill worker's introduction, and for the decoder's word that it holds the prompt.
    let s = Stack::plain(Script { lose_connection: 2, ..Script::saying(&["ok"]) }).await;
    let required = [("X-PD-Bridge-Require", "any")];
    let r = post(s.addr, "/v1/completions", &required, &completion(&json!({}))).await;
    assert_eq!((r.status, r.json()["error"]["code"].as_str()), (503, Some("decode_worker_lost")), "{r:?}");
}

#[tokio::test]
async fn what_no_decoder_has_taken_on_is_tried_more_often() {
    let lost = |times| Script { lose_at: LoseAt::Prepare, lose_connection: times, ..Script::saying(&["ok"]) };
    let s = Stack::plain(lost(3)).await;
    let r = post(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
    assert_eq!((r.status, r.json()["choices"][0]["text"].as_str()), (200, Some("ok")), "{r:?}");
    let s = Stack::plain(lost(5)).await;
    let r = post(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
    assert_eq!((r.status, r.json()["error"]["code"].as_str()), (503, Some("decode_worker_lost")), "{r:?}");
}

#[tokio::test]
async fn an_answer_that_was_not_told_yet_is_had_anew() {
    let lost = |times| Script {
        lose_at: LoseAt::Answer,
        lose_connection: times,
        ..Script::saying(&["xy", "zu", "vw"])
    };
    for (path, body) in [
        ("/v1/completions", completion(&json!({}))),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "hi"}]})),
        ("/v1/responses", json!({"input": "hi"})),
    ] {
        let s = Stack::plain(lost(1)).await;
        let r = post(s.addr, path, &[], &body).await;
        assert_eq!(r.status, 200, "{path}: {r:?}");
        let said = |what| r.body.matches(what).count();
        assert_eq!((said("\"xyzuvw\""), said("xy")), (1, 1), "{path}: {r:?}");
        assert!(get(s.addr, "/metrics").await.body.contains("pd_bridge_retries_total 1"));
        // What kills two workers is not given to a third.
        let s = Stack::plain(lost(2)).await;
        let r = post(s.addr, path, &[], &body).await;
        assert_eq!(
            (r.status, r.json()["error"]["code"].as_str()),
            (503, Some("decode_worker_lost")),
            "{r:?}"
        );
    }
    // What the client has read already can't be taken back.
    let s = Stack::plain(lost(1)).await;
    let r = post(s.addr, "/v1/completions", &[], &completion(&json!({"stream": true}))).await;
    assert!(r.body.contains("\"xy\"") && r.body.contains("decode_worker_lost"), "{r:?}");
    assert!(!r.body.contains("zu") && !r.body.contains("[DONE]"), "{r:?}");
}

#[tokio::test]
async fn draining_finishes_running_answers_and_refuses_new_ones() {
    let slow =
        Script { token_delay: Duration::from_millis(50), ..Script::saying(&["a", "b", "c", "d", "e", "f"]) };
    let s = Stack::plain(slow).await;
    let mut open = stream(s.addr, "/v1/completions", &[], &completion(&json!({"stream": true}))).await;
    open.wait_for("data: ").await;
    s.shutdown.cancel();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let r = post(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
    assert_eq!((r.status, r.verdict()["reason"].as_str()), (503, Some("shutting_down")), "{r:?}");
    open.wait_for("data: [DONE]").await;
}

#[tokio::test]
async fn too_many_requests_are_told_so() {
    let s = Stack::start(Script { endless: true, ..Script::saying(&["a"]) }, |settings| {
        settings.limits.max_in_flight = 1;
        settings.limits.max_queue = 0;
    })
    .await;
    let mut open =
        stream(s.addr, "/v1/completions", &[], &completion(&json!({"stream": true, "max_tokens": 9999})))
            .await;
    open.wait_for("data: ").await;
    let r = post(s.addr, "/v1/completions", &[], &completion(&json!({}))).await;
    assert_eq!((r.status, r.header("retry-after").as_deref()), (429, Some("1")), "{r:?}");
}

#[tokio::test]
async fn keys_are_asked_for_when_there_are_any() {
    let key = ApiKey::of("me", "sk-0123456789abcdef");
    let s = Stack::start(Script::saying(&["a"]), |settings| settings.api_keys = vec![key]).await;
    let body = completion(&json!({}));
    let r = post(s.addr, "/v1/completions", &[], &body).await;
    assert_eq!((r.status, r.verdict()["reason"].as_str()), (401, Some("unauthorized")));
    let r = post(s.addr, "/v1/completions", &[("authorization", "Bearer sk-0123456789abcdef")], &body).await;
    assert_eq!(r.status, 200);
    assert_eq!((get(s.addr, "/v1/models").await.status, get(s.addr, "/healthz").await.status), (401, 200));
    assert_eq!(get(s.addr, "/metrics").await.status, 401);
}
