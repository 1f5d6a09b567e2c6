//! Workers killed at every point of a request, requests abandoned by the thousand: the client gets a whole answer or
//! one clean error, and afterwards everything is as it was.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; counts are shown"
)]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pd_tests::fakes::{Act, Meddle};
use pd_tests::http::{self, Event, completion, metric, send};
use pd_tests::scene::{Scene, prompt};
use pd_tests::wait;
use serde_json::Value;
use shared::verdict::{Verdict, VerdictKind};
use shared::wire::FrameKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Rounds per point.
fn rounds() -> usize {
    setting("PD_TEST_FAULT_ROUNDS", 2)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Victim {
    Prefill,
    Decode,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Point {
    BeforeTheRequest,
    AtTheOpen,
    AtTheFirstRows,
    InTheMiddle,
    AtTheCommit,
    AfterTheFirstToken,
}

const POINTS: [(Victim, Point); 11] = [
    (Victim::Prefill, Point::BeforeTheRequest),
    (Victim::Prefill, Point::AtTheOpen),
    (Victim::Prefill, Point::AtTheFirstRows),
    (Victim::Prefill, Point::InTheMiddle),
    (Victim::Prefill, Point::AtTheCommit),
    (Victim::Prefill, Point::AfterTheFirstToken),
    (Victim::Decode, Point::BeforeTheRequest),
    (Victim::Decode, Point::AtTheOpen),
    (Victim::Decode, Point::InTheMiddle),
    (Victim::Decode, Point::AtTheCommit),
    (Victim::Decode, Point::AfterTheFirstToken),
];

/// A meddle that kills `pid` once, when a frame fits.
fn killer(
    pid: u32,
    fits: impl Fn(&shared::wire::FrameHeader, u64) -> bool + Send + Sync + 'static,
) -> Meddle {
    let done = Arc::new(AtomicBool::new(false));
    Meddle::with(move |h, i| {
        if fits(h, i) && !done.swap(true, Ordering::SeqCst) {
            kill_now(pid);
        }
        Act::Pass
    })
}

fn kill_now(pid: u32) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
}

/// How a streamed request ended, after every check that needs no context.
struct End {
    text: String,
    error: Option<Value>,
    verdict: Verdict,
    started: bool,
}

async fn ask(addr: &str, prompt: &str, max_tokens: u32, on_first_token: impl FnOnce()) -> End {
    let mut body = completion(prompt, max_tokens);
    body["stream"] = true.into();
    let mut response = send(addr, "POST", "/v1/completions", &[http::BRIDGE], Some(&body)).await.unwrap();
    let (verdict, status) = (response.verdict(), response.status);
    let mut bytes = vec![];
    let mut on_first_token = Some(on_first_token);
    while let Some((_, piece)) = response.piece().await.unwrap() {
        bytes.extend_from_slice(&piece);
        if status == 200
            && let Some(act) = on_first_token.take()
        {
            act();
        }
    }
    let body = String::from_utf8(bytes).unwrap();
    if status != 200 {
        let error: Value = serde_json::from_str(&body).unwrap();
        assert!(error["error"]["message"].is_string(), "{body}");
        return End { text: String::new(), error: Some(error), verdict, started: false };
    }
    let events = http::events(&body);
    let done = events.iter().filter(|e| **e == Event::Done).count();
    let data = |e: &Event| if let Event::Data(v) = e { Some(v.clone()) } else { None };
    let errors: Vec<Value> = events.iter().filter_map(data).filter(|v| v["error"].is_object()).collect();
    assert!(
        errors.len() <= 1 && done <= 1 && errors.len() + done >= 1,
        "neither an end nor an error: {body}"
    );
    let text = events
        .iter()
        .filter_map(data)
        .filter_map(|v| v["choices"][0]["text"].as_str().map(str::to_owned))
        .collect();
    End { text, error: errors.into_iter().next(), verdict, started: true }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_at_any_point_gives_a_right_answer_or_one_error() {
    let mut scene = Scene::new().await;
    let mut counts = std::collections::BTreeMap::<String, usize>::new();
    for (victim, point) in POINTS {
        for round in 0..rounds() {
            let what = format!("{victim:?} killed {point:?}, round {round}");
            let text = prompt(300);
            let truth = scene.truth(&text, 24).await;
            let pid = match victim {
                Victim::Prefill => scene.prefill.process.pid(),
                Victim::Decode => scene.decode.process.pid(),
            };
            match point {
                Point::BeforeTheRequest => kill_now(pid),
                Point::AtTheOpen => scene.meddle(killer(pid, |h, _| h.kind == FrameKind::Open)),
                Point::AtTheFirstRows => scene.meddle(killer(pid, |h, _| h.kind == FrameKind::Data)),
                Point::InTheMiddle => scene.meddle(killer(pid, |_, i| i == 60)),
                Point::AtTheCommit => scene.meddle(killer(pid, |h, _| h.kind == FrameKind::Commit)),
                Point::AfterTheFirstToken => scene.meddle(Meddle::nothing()),
            }
            let addr = scene.gateway.addr.clone();
            let asking = tokio::spawn({
                let text = text.clone();
                async move {
                    ask(&addr, &text, 24, || {
                        if point == Point::AfterTheFirstToken {
                            kill_now(pid);
                        }
                    })
                    .await
                }
            });
            // Someone restarts what died, as a supervisor would.
            let worker = match victim {
                Victim::Prefill => &mut scene.prefill,
                Victim::Decode => &mut scene.decode,
            };
            let died = tokio::task::block_in_place(|| worker.process.wait(Duration::from_secs(20)));
            assert!(died.is_some(), "{what}: the victim was never killed");
            tokio::task::block_in_place(|| worker.restart());
            let end = tokio::time::timeout(Duration::from_secs(90), asking).await;
            let end = end.unwrap_or_else(|_| panic!("{what}: no end")).unwrap();
            let outcome = if end.error.is_some() { "error" } else { end.verdict.verdict.as_str() };
            *counts.entry(format!("{victim:?} {point:?}: {outcome}")).or_default() += 1;
            if let Some(error) = &end.error {
                assert!(truth.starts_with(&end.text), "{what}: wrong text before {error}");
                // Losing the prefill worker is never a reason not to answer, nor is losing anybody before a token.
                assert!(victim == Victim::Decode && end.started, "{what}: {error}");
            } else {
                assert_eq!(end.text, truth, "{what}: {:?}", end.verdict);
            }
            if end.verdict.verdict == VerdictKind::Complete {
                assert_eq!(end.verdict.cached_tokens, 299, "{what}");
            }
            scene.meddle(Meddle::nothing());
            scene.bridges_again().await;
            scene.decode.decoder().await.settled().await;
        }
    }
    for (outcome, n) in counts {
        eprintln!("{n} × {outcome}");
    }
    let reply = scene.ask(&prompt(300), 4).await;
    assert_eq!(reply.verdict().verdict, VerdictKind::Complete, "afterwards");
    assert_eq!(metric(&scene.gateway.metrics().await, "pd_bridge_requests_in_flight", ""), 0.0);
}

/// FIELD-CASES 9: clients left during the transfer, and memory stayed taken on both workers.
#[tokio::test(flavor = "multi_thread")]
async fn field_09_a_thousand_abandoned_requests_leave_nothing() {
    const WARM_UP: usize = 200;
    let requests = setting("PD_TEST_ABANDONED", 1000);
    let scene = Scene::with(&["--store-bytes", "8000000"], &["--prefix-cache-bytes", "8000000"]).await;
    let decoder = scene.decode.decoder().await;
    let abandon = |n: usize| {
        let addr = scene.gateway.addr.clone();
        async move {
            futures_util::future::join_all((0..n).map(|_| {
                let addr = addr.clone();
                async move {
                    let mut body = completion(&prompt(rand::random_range(20..400)), 200);
                    body["stream"] = rand::random::<bool>().into();
                    let patience = Duration::from_micros(rand::random_range(0..40_000));
                    let route = if rand::random_range(0..4) == 0 { http::NATIVE } else { http::BRIDGE };
                    let asking = async {
                        let response = send(&addr, "POST", "/v1/completions", &[route], Some(&body)).await;
                        if let Ok(response) = response {
                            let _ = response.finish().await;
                        }
                    };
                    let _ = tokio::time::timeout(patience, asking).await;
                }
            }))
            .await;
        }
    };
    let quiet = || async {
        decoder.settled().await;
        wait::until("nothing in flight", Duration::from_secs(30), || async {
            (metric(&scene.gateway.metrics().await, "pd_bridge_requests_in_flight", "") == 0.0).then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(300)).await;
    };
    for _ in 0..WARM_UP / 20 {
        abandon(20).await;
    }
    quiet().await;
    let measure = || {
        [&scene.gateway.process, &scene.prefill.process, &scene.decode.process]
            .map(|p| (p.memory_bytes("VmRSS").unwrap_or(0), p.sockets().unwrap_or(0)))
    };
    let before = measure();
    for _ in 0..requests / 20 {
        abandon(20).await;
    }
    quiet().await;
    let after = measure();
    eprintln!("before {before:?}\nafter  {after:?}");
    for ((name, before), after) in ["gateway", "prefill", "decode"].iter().zip(before).zip(after) {
        assert!(after.0 < before.0 + (24 << 20), "{name} grew from {} to {} bytes", before.0, after.0);
        assert!(after.1 <= before.1 + 1, "{name} holds {} sockets, {} before", after.1, before.1);
    }
    // Everything still works, and the store is within its budget.
    let text = prompt(200);
    assert_eq!(scene.ask(&text, 8).await.text(), scene.truth(&text, 8).await);
    let stats = decoder.settled().await;
    assert!(stats.store_bytes <= stats.store_budget_bytes, "{stats:?}");
}

/// FIELD-CASES 17 with a real decoder: it stops within a token, not at the end of the answer.
#[tokio::test]
async fn field_17_a_real_decoder_stops_within_a_token() {
    let scene = Scene::new().await;
    let decoder = scene.decode.decoder().await;
    let mut body = completion(&prompt(100), 7000);
    body["stream"] = true.into();
    let mut response =
        send(&scene.gateway.addr, "POST", "/v1/completions", &[http::BRIDGE], Some(&body)).await.unwrap();
    response.piece().await.unwrap().unwrap();
    assert_eq!(decoder.stats().await.requests, 1);
    drop(response);
    wait::until("the decoder stops", Duration::from_millis(1500), || async {
        (decoder.stats().await.requests == 0).then_some(())
    })
    .await;
    decoder.settled().await;
}
