//! What breaks in the field, with real workers and a bad network between them.
//!
//! Numbers are those of `tests/FIELD-CASES.md`; a case can have more tests beside these, under the same number.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use pd_tests::decoder::fresh_id;
use pd_tests::fakes::{Act, Meddle};
use pd_tests::http::{self, completion, post};
use pd_tests::scene::{BLOCK, Scene, prompt};
use pd_tests::stack::{Gateway, Worker};
use pd_tests::{tiny, wait};
use shared::control::Require;
use shared::verdict::VerdictKind;
use shared::wire::FrameKind;
use std::time::{Duration, Instant};

/// A transfer went wrong in some way: the answer is right, the verdict says `failed` and why, nothing stays behind.
async fn fails(scene: &Scene, meddle: Meddle, reasons: &[&str]) {
    scene.meddle(meddle);
    let prompt = prompt(200);
    let reply = scene.ask(&prompt, 8).await;
    assert_eq!(reply.status, 200);
    let v = reply.verdict();
    assert_eq!((v.verdict, v.bridged_tokens, v.cached_tokens), (VerdictKind::Failed, 0, 0), "{v:?}");
    assert!(reasons.contains(&v.reason.as_deref().unwrap()), "{v:?}, expected {reasons:?}");
    assert_eq!(reply.text(), scene.truth(&prompt, 8).await, "{v:?}");
    scene.decode.decoder().await.settled().await;
    scene.meddle(Meddle::nothing());
    let reply = scene.ask(&format!("{prompt} and more of it, to make a bridge worthwhile"), 1).await;
    let v = reply.verdict();
    assert_eq!(v.verdict, VerdictKind::Complete, "the next request: {v:?}");
}

#[tokio::test]
async fn a_clean_bridge_is_complete_and_gives_the_same_answer() {
    let scene = Scene::new().await;
    for tokens in [2, 16, 17, 33, 500] {
        let prompt = prompt(tokens);
        let reply = scene.ask(&prompt, 24).await;
        let v = reply.verdict();
        let t = u32::try_from(tokens).unwrap();
        assert_eq!((v.verdict, v.prompt_tokens, v.cached_tokens), (VerdictKind::Complete, t, t - 1), "{v:?}");
        assert_eq!((v.bridged_tokens, v.native_tokens), (t - 1, 1));
        assert_eq!(v.payload_bytes, u64::from(t - 1) * 4 * 2 * 2 * 16 * 4);
        assert_eq!(v.digest.as_deref().map(str::len), Some(16));
        assert_eq!(reply.text(), scene.truth(&prompt, 24).await);
        assert_eq!(reply.usage()["prompt_tokens_details"]["cached_tokens"], t - 1);
        let seen = scene.last_transfer().await;
        assert!(seen.rows.values().all(|rows| *rows == t - 1) && seen.rows.len() == tiny::LAYERS * 2);
    }
}

#[tokio::test]
async fn field_01_another_models_cache_is_never_decoded() {
    let other = tempfile::tempdir().unwrap();
    tiny::write(&other.path().join("tiny"), tiny::NARROW, 8);
    let prefill = Worker::prefill(&other.path().join("tiny"), &[]);
    let decode = Worker::decode(tiny::model(), &[]);
    let (d, p) = (&decode.addresses.control, &prefill.addresses.control);
    let gateway = Gateway::start_unready(tiny::model(), d, Some(p), &[]);
    gateway.ready(false).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let text = prompt(200);
    let reply = post(&gateway.addr, "/v1/completions", &[http::BRIDGE], &completion(&text, 8)).await;
    let v = reply.verdict();
    assert_eq!((v.verdict, v.reason.as_deref()), (VerdictKind::Native, Some("no_prefill_worker")), "{v:?}");
}

#[tokio::test]
async fn field_02_a_bad_network_card_does_not_change_answers() {
    let scene = Scene::new().await;
    let flip = |n| {
        Meddle::with(move |h, i| if h.kind == FrameKind::Data && i == n { Act::FlipBit } else { Act::Pass })
    };
    fails(&scene, flip(1), &["checksum"]).await;
    fails(&scene, flip(20), &["checksum"]).await;
}

#[tokio::test]
async fn field_03_a_sender_that_dies_after_one_layer_gives_nothing() {
    let scene = Scene::new().await;
    fails(&scene, Meddle::with(|h, _| if h.layer == 1 { Act::Cut } else { Act::Pass }), &["connection_lost"])
        .await;
    let inside = |h: &shared::wire::FrameHeader, _| if h.layer == 3 { Act::CutInside } else { Act::Pass };
    fails(&scene, Meddle::with(inside), &["connection_lost"]).await;
    let commit =
        |h: &shared::wire::FrameHeader, _| if h.kind == FrameKind::Commit { Act::Cut } else { Act::Pass };
    fails(&scene, Meddle::with(commit), &["connection_lost"]).await;
}

#[tokio::test]
async fn field_04_a_short_transfer_is_at_most_partial() {
    let scene = Scene::new().await;
    for end in [BLOCK, 5 * BLOCK] {
        scene.meddle(Meddle::short(end));
        let prompt = prompt(200);
        let reply = scene.ask(&prompt, 8).await;
        let v = reply.verdict();
        assert_eq!((v.verdict, v.bridged_tokens, v.cached_tokens), (VerdictKind::Partial, end, end), "{v:?}");
        assert!(v.reason.is_some());
        assert_eq!(reply.text(), scene.truth(&prompt, 8).await);
    }
}

#[tokio::test]
async fn field_05_missing_last_rows_are_noticed_although_the_commit_fits() {
    let scene = Scene::new().await;
    let last_rows = |h: &shared::wire::FrameHeader, _| {
        if h.kind == FrameKind::Data && h.layer == 2 && h.token_start + h.token_count == 199 {
            Act::Drop
        } else {
            Act::Pass
        }
    };
    fails(&scene, Meddle::covered_up(last_rows), &["incomplete"]).await;
    fails(&scene, Meddle::with(last_rows), &["incomplete", "checksum"]).await;
    let twice = |h: &shared::wire::FrameHeader, i| {
        if h.kind == FrameKind::Data && i == 5 { Act::Double } else { Act::Pass }
    };
    fails(&scene, Meddle::covered_up(twice), &["incomplete", "protocol_error"]).await;
}

#[tokio::test]
async fn field_07_a_stalled_transfer_ends_with_its_deadline() {
    let scene = Scene::new().await;
    let begun = Instant::now();
    fails(&scene, Meddle::with(|_, i| if i == 4 { Act::Stall } else { Act::Pass }), &["timeout"]).await;
    assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn field_10_a_lease_that_nobody_uses_expires() {
    let worker = Worker::decode(tiny::model(), &["--block-tokens", "16"]);
    let decoder = worker.decoder().await;
    let tokens: Vec<u32> = (3..103).collect();
    decoder.native(&tokens, 1).await;
    let before = decoder.settled().await;
    let id = fresh_id("forgotten");
    assert!(decoder.prepare(&id, &tokens).await.unwrap() >= 96);
    assert!(decoder.stats().await.store_references > 0);
    wait::until("the lease expires", Duration::from_secs(90), || async {
        (decoder.stats().await.store_references == 0).then_some(())
    })
    .await;
    let after = decoder.settled().await;
    assert_eq!((after.requests, after.store_blocks), (before.requests, before.store_blocks));
    let answer = decoder.generate(&id, 1, Require::Nothing).await;
    assert!(answer.error.is_some(), "an expired request can't be answered");
}

/// A connection that is lost takes its requests with it.
#[tokio::test]
async fn field_10_a_lost_gateway_holds_nothing() {
    let worker = Worker::decode(tiny::model(), &["--block-tokens", "16"]);
    let watcher = worker.decoder().await;
    let tokens: Vec<u32> = (3..103).collect();
    watcher.native(&tokens, 1).await;
    let gone = worker.decoder().await;
    gone.prepare("a", &tokens).await.unwrap();
    gone.prepare("b", &tokens[..50]).await.unwrap();
    gone.offer("b", 48..49, 60_000).await.unwrap();
    let mut events = gone.start("a", 5000, Require::Nothing).await;
    assert!(events.next().await.is_some());
    assert!(watcher.stats().await.requests >= 2);
    drop((gone, events));
    watcher.settled().await;
}

#[tokio::test]
async fn field_12_a_hit_never_changes_the_answer() {
    let scene = Scene::new().await;
    let shared_part = prompt(300);
    for (turn, tail) in ["first", "second, longer than the first", "", "third"].iter().enumerate() {
        let text = format!("{shared_part}{tail}");
        let reply = scene.ask(&text, 32).await;
        assert_eq!(reply.text(), scene.truth(&text, 32).await, "turn {turn}: {:?}", reply.verdict());
        if turn > 0 {
            let v = reply.verdict();
            assert!(v.cached_tokens - v.bridged_tokens >= 288, "not a hit: {v:?}");
        }
    }
    // Two chats with one beginning, at the same time.
    let texts: Vec<String> = (0..4).map(|i| format!("{shared_part}{i}{i}")).collect();
    let asks = texts.iter().map(|t| scene.ask(t, 32));
    for (reply, text) in futures_util::future::join_all(asks).await.iter().zip(&texts) {
        assert_eq!(reply.text(), scene.truth(text, 32).await);
    }
}

#[tokio::test]
async fn field_13_a_layer_without_values_is_no_layer() {
    let scene = Scene::new().await;
    let no_values = |h: &shared::wire::FrameHeader, _| {
        if h.kind == FrameKind::Data && h.layer == 1 && h.part == 1 { Act::Drop } else { Act::Pass }
    };
    fails(&scene, Meddle::covered_up(no_values), &["incomplete"]).await;
}

#[tokio::test]
async fn field_19_times_are_told_apart() {
    let scene = Scene::new().await;
    let v = scene.ask(&prompt(2000), 4).await.verdict();
    assert_eq!(v.verdict, VerdictKind::Complete);
    let ttft = v.ttft_ms.unwrap();
    assert!(v.prefill_ms > 0.0 && v.ingest_ms >= 0.0 && v.transfer_ms >= 0.0);
    assert!(v.prefill_ms + v.transfer_ms + v.ingest_ms <= ttft * 1.05 + 5.0, "{v:?}");
}

#[tokio::test]
async fn field_20_exactly_the_planned_rows_are_sent_whatever_the_prefill_worker_remembers() {
    let mut scene = Scene::new().await;
    let text = prompt(203);
    let rows_of =
        |seen: &pd_tests::fakes::Seen| seen.rows.values().copied().collect::<std::collections::BTreeSet<_>>();
    assert_eq!(scene.ask(&text, 4).await.verdict().verdict, VerdictKind::Complete);
    assert_eq!(rows_of(&scene.last_transfer().await), [202].into());
    // The decoder forgets everything, the prefill worker does not.
    scene.decode.restart();
    scene.bridges_again().await;
    let reply = scene.ask(&text, 4).await;
    let v = reply.verdict();
    assert_eq!((v.verdict, v.bridged_tokens), (VerdictKind::Complete, 202), "{v:?}");
    assert_eq!(rows_of(&scene.last_transfer().await), [202].into());
    assert_eq!(reply.text(), scene.truth(&text, 4).await);
    // The decoder remembers, the prefill worker forgets.
    scene.prefill.restart();
    scene.bridges_again().await;
    let longer = format!("{text}{}", prompt(100));
    let reply = scene.ask(&longer, 4).await;
    let v = reply.verdict();
    assert_eq!((v.verdict, v.cached_tokens), (VerdictKind::Complete, 302), "{v:?}");
    assert_eq!(v.bridged_tokens, 302 - 202 / BLOCK * BLOCK);
    assert_eq!(rows_of(&scene.last_transfer().await), [v.bridged_tokens].into());
    assert_eq!(reply.text(), scene.truth(&longer, 4).await);
}

#[tokio::test]
async fn a_second_turn_sends_only_what_is_new() {
    let scene = Scene::new().await;
    let first = prompt(400);
    let one = scene.ask(&first, 20).await;
    let second = format!("{first}{}{}", one.text(), prompt(90));
    let two = scene.ask(&second, 4).await;
    let (v1, v2) = (one.verdict(), two.verdict());
    assert_eq!(v2.verdict, VerdictKind::Complete);
    let per_token = v1.payload_bytes / u64::from(v1.bridged_tokens);
    assert!(v2.bridged_tokens < v2.prompt_tokens - 399 / BLOCK * BLOCK + 1, "{v2:?}");
    assert_eq!(v2.payload_bytes, per_token * u64::from(v2.bridged_tokens));
    assert_eq!(two.text(), scene.truth(&second, 4).await);
}

#[tokio::test]
async fn field_21_an_oversized_transfer_is_refused_alone() {
    // Room for about 1,000 tokens of this model (1 KiB each).
    let scene = Scene::with(&["--store-bytes", "1000000"], &[]).await;
    let addr = scene.gateway.addr.clone();
    let small = prompt(100);
    let truth = scene.truth(&small, 400).await;
    let running = tokio::spawn(async move {
        post(&addr, "/v1/completions", &[http::BRIDGE], &completion(&small, 400)).await
    });
    let big = prompt(4000);
    let reply = scene.ask(&big, 4).await;
    let v = reply.verdict();
    if reply.status == 200 {
        assert!(
            matches!(v.verdict, VerdictKind::Failed | VerdictKind::Partial | VerdictKind::Native),
            "{v:?}"
        );
        assert_eq!(reply.text(), scene.truth(&big, 4).await);
    } else {
        assert!(reply.status.is_client_error() || reply.status == 503, "{reply:?}");
        assert!(reply.json()["error"]["message"].is_string());
    }
    let other = running.await.unwrap();
    assert_eq!((other.status.as_u16(), other.text()), (200, truth), "the request beside it");
    assert_eq!(
        scene.ask(&prompt(200), 4).await.verdict().verdict,
        VerdictKind::Complete,
        "the request after it"
    );
    let stats = scene.decode.decoder().await.settled().await;
    assert!(stats.store_bytes <= stats.store_budget_bytes, "{stats:?}");
}

/// A receiver that grants nothing more bounds what the sender holds, and stops its request alone.
#[tokio::test]
async fn field_22_the_sender_never_exceeds_its_credit() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("wide");
    tiny::write(&model, tiny::WIDE, 7);
    let scene = Scene::of(&model, &[], &[]).await;
    let text = prompt(4000);
    let bytes = 3999 * 16 * 1024;
    // Without any meddling the transfer is larger than one credit, and goes through.
    let v = scene.ask(&text, 2).await.verdict();
    assert_eq!((v.verdict, v.payload_bytes), (VerdictKind::Complete, bytes), "{v:?}");
    let seen = scene.last_transfer().await;
    assert!(seen.credit_bytes >= bytes);

    scene.meddle(Meddle::no_more_credit());
    let text = prompt(4000);
    let reply = scene.ask(&text, 2).await;
    let v = reply.verdict();
    assert_eq!((v.verdict, v.reason.as_deref()), (VerdictKind::Failed, Some("timeout")), "{v:?}");
    assert_eq!(reply.text(), scene.truth(&text, 2).await);
    let seen = scene.last_transfer().await;
    assert!(seen.credit_bytes < bytes, "the first credit allows everything: this test means nothing");
    assert!(seen.payload_bytes <= seen.credit_bytes, "{} of {}", seen.payload_bytes, seen.credit_bytes);
    let peak = scene.prefill.process.memory_bytes("VmHWM").unwrap_or(0);
    // Weights of 2 MiB, two caches of 64 MiB each, and what may be on its way.
    assert!(peak < (300 << 20), "{} MiB", peak >> 20);
}

#[tokio::test]
async fn field_23_the_first_request_after_a_restart_succeeds() {
    let mut scene = Scene::new().await;
    let text = prompt(150);
    let truth = scene.truth(&text, 6).await;
    assert_eq!(scene.ask(&text, 6).await.text(), truth);
    for _ in 0..3 {
        scene.decode.restart();
        let reply = scene.ask(&text, 6).await;
        assert_eq!((reply.status.as_u16(), reply.text()), (200, truth.clone()), "decoder restarted");
        scene.prefill.restart();
        let text = prompt(150);
        let reply = scene.ask(&text, 6).await;
        assert_eq!(
            (reply.status.as_u16(), reply.text()),
            (200, scene.truth(&text, 6).await),
            "prefill worker restarted"
        );
        scene.bridges_again().await;
    }
    // A request that is under way when the decoder dies is tried again on the new one.
    let addr = scene.gateway.addr.clone();
    let long = prompt(6000);
    let asking = {
        let long = long.clone();
        tokio::spawn(
            async move { post(&addr, "/v1/completions", &[http::NATIVE], &completion(&long, 4)).await },
        )
    };
    tokio::time::sleep(Duration::from_millis(60)).await;
    scene.decode.restart();
    let reply = asking.await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.text()), (200, scene.truth(&long, 4).await));
}

#[tokio::test]
async fn an_idle_stack_holds_nothing() {
    let scene = Scene::new().await;
    let decoder = scene.decode.decoder().await;
    scene.ask(&prompt(100), 2).await;
    let stats = decoder.settled().await;
    assert_eq!(stats.store_blocks, 6);
}
