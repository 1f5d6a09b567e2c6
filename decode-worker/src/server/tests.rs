mod answers;
mod support;

use super::*;
use crate::engine::testing::{BLOCK_TOKENS, VOCAB, answer};
use shared::control::{EventStream, FinishReason, GenerateSpec, Incoming, Require, Sampling};
use shared::wire::{Abort, AbortCode};
use support::{LIMIT, MAX_TOKENS, SLOW, bench, collect, generate, open, prepare, prompt, spec};

#[tokio::test]
async fn native_then_warm_gives_the_same_answer() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let prompt = prompt(21);
    for (id, resident) in [("a", 0), ("b", 20)] {
        assert_eq!(prepare(&client, id, &prompt).await.unwrap(), resident);
        let (receipt, ids, reason) = collect(generate(&client, spec(id, 9)).await).await.unwrap();
        assert_eq!((ids, reason), (answer(&prompt, 9), FinishReason::Length));
        assert_eq!((receipt.cached_tokens, receipt.native_tokens), (resident, 21 - resident));
        assert_eq!((receipt.bridged_tokens, receipt.blocks), (0, resident / BLOCK_TOKENS as u32));
    }
    bench.assert_free().await;
}

#[tokio::test]
async fn a_bridged_prompt_needs_one_native_token() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let prompt = prompt(23);
    prepare(&client, "a", &prompt).await.unwrap();
    let offer = open(&client, "a", 0, 22).await.unwrap();
    let events = generate(&client, GenerateSpec { require: Require::Complete, ..spec("a", 5) }).await;
    bench.send(&offer, &prompt, 22).await;
    let (receipt, ids, _) = collect(events).await.unwrap();
    assert_eq!(ids, answer(&prompt, 5));
    assert_eq!((receipt.cached_tokens, receipt.bridged_tokens, receipt.native_tokens), (22, 22, 1));
    assert_eq!((receipt.blocks, receipt.payload_bytes), (5, 22 * 16));
    assert!(receipt.digest.is_some() && receipt.transfer_failure.is_none());
    bench.assert_free().await;
    // The next turn finds the blocks, and only the rest is asked for.
    let longer = [&prompt[..], &ids, &[1, 2, 3]].concat();
    assert_eq!(prepare(&client, "b", &longer).await.unwrap(), 24);
    let offer = open(&client, "b", 24, 30).await.unwrap();
    let events = generate(&client, spec("b", 5)).await;
    bench.send(&offer, &longer, 30).await;
    let (receipt, ids, _) = collect(events).await.unwrap();
    assert_eq!(ids, answer(&longer, 5));
    assert_eq!((receipt.cached_tokens, receipt.bridged_tokens), (30, 6));
    bench.assert_free().await;
}

#[tokio::test]
async fn a_short_transfer_is_used_as_far_as_it_goes() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let prompt = prompt(23);
    prepare(&client, "a", &prompt).await.unwrap();
    let offer = open(&client, "a", 0, 22).await.unwrap();
    let events = generate(&client, spec("a", 5)).await;
    bench.send(&offer, &prompt, 10).await;
    let (receipt, ids, _) = collect(events).await.unwrap();
    assert_eq!(ids, answer(&prompt, 5));
    assert_eq!((receipt.cached_tokens, receipt.bridged_tokens, receipt.native_tokens), (10, 10, 13));
    assert_eq!(receipt.transfer_failure.unwrap().message, "out of time");
    bench.assert_free().await;
}

#[tokio::test]
async fn failures_of_the_transfer_reach_the_request_at_once() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let prompt = prompt(23);
    let abort = Abort::new(AbortCode::PrefillFailed, "it died");
    for require in [Require::Complete, Require::Any, Require::Nothing] {
        prepare(&client, "a", &prompt).await.unwrap();
        open(&client, "a", 0, 22).await.unwrap();
        let events = generate(&client, GenerateSpec { require, ..spec("a", 0) }).await;
        client.notify(&DecodeRequest::AbortTransfer { request_id: "a".into(), abort: abort.clone() });
        let start = Instant::now();
        let result = collect(events).await;
        assert!(start.elapsed() < Duration::from_secs(1));
        match result {
            Ok((receipt, ..)) => {
                assert_eq!(require, Require::Nothing);
                assert_eq!(receipt.transfer_failure, Some(abort.clone()));
                assert_eq!((receipt.cached_tokens, receipt.native_tokens), (0, 23));
            }
            Err(error) => {
                assert_ne!(require, Require::Nothing);
                assert_eq!((error.code, error.message), (WorkerErrorCode::BridgeRequired, abort.to_string()));
            }
        }
        bench.assert_free().await;
    }
}

#[tokio::test]
async fn waiting_ends_with_its_deadline() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    prepare(&client, "a", &prompt(23)).await.unwrap();
    open(&client, "a", 0, 22).await.unwrap();
    let events = generate(&client, GenerateSpec { transfer_timeout_ms: 30, ..spec("a", 1) }).await;
    let (receipt, ..) = collect(events).await.unwrap();
    assert_eq!(receipt.transfer_failure.unwrap().code, AbortCode::Timeout);
    assert!(receipt.wait_ms >= 30.0);
    bench.assert_free().await;
}

#[tokio::test]
async fn cancel_frees_everything_in_every_state() {
    let bench = bench(SLOW).await;
    let client = bench.client().await;
    let prompt = prompt(23);
    for state in 0..5 {
        prepare(&client, "a", &prompt).await.unwrap();
        let mut events = None;
        if state >= 1 {
            let offer = open(&client, "a", 0, 22).await.unwrap();
            if state >= 2 {
                events = Some(generate(&client, spec("a", 300)).await);
            }
            if state >= 3 {
                bench.send(&offer, &prompt, 22).await;
            }
        }
        if state >= 4
            && let Some(events) = &mut events
        {
            while !matches!(events.next().await, Some(Incoming::Event(DecodeEvent::Token { .. }))) {}
        }
        client.notify(&DecodeRequest::Cancel { request_id: "a".into() });
        if let Some(events) = events {
            assert_eq!(collect_any(events).await.unwrap_err().code, WorkerErrorCode::Cancelled);
        }
        bench.assert_free().await;
    }
}

/// As `collect`, for streams whose beginning was read already.
async fn collect_any(mut events: EventStream<DecodeEvent>) -> Result<(), WorkerError> {
    loop {
        match events.next().await {
            Some(Incoming::Event(DecodeEvent::Error(error))) => return Err(error),
            Some(Incoming::Event(DecodeEvent::Finished { .. })) => return Ok(()),
            Some(_) => {}
            None => panic!("closed"),
        }
    }
}

#[tokio::test]
async fn losing_the_connection_frees_everything() {
    let bench = bench(SLOW).await;
    let client = bench.client().await;
    prepare(&client, "prepared", &prompt(9)).await.unwrap();
    prepare(&client, "waiting", &prompt(23)).await.unwrap();
    open(&client, "waiting", 0, 22).await.unwrap();
    let waiting = generate(&client, spec("waiting", 300)).await;
    prepare(&client, "writing", &prompt(5)).await.unwrap();
    let mut writing = generate(&client, spec("writing", 300)).await;
    while !matches!(writing.next().await, Some(Incoming::Event(DecodeEvent::Token { .. }))) {}
    let other = bench.client().await;
    prepare(&other, "writing", &prompt(5)).await.unwrap();
    drop((client, waiting, writing));
    let mut stats = bench.decoder.core.stats();
    let deadline = Instant::now() + LIMIT;
    while stats.requests != 1 || stats.sequence_bytes > 0 {
        assert!(Instant::now() < deadline, "{stats:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
        stats = bench.decoder.core.stats();
    }
    // The other connection's request of the same name is untouched.
    let (_, ids, _) = collect(generate(&other, spec("writing", 3)).await).await.unwrap();
    assert_eq!(ids, answer(&prompt(5), 3));
    bench.assert_free().await;
}

#[tokio::test]
async fn prepared_requests_expire() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    prepare(&client, "a", &prompt(23)).await.unwrap();
    open(&client, "a", 0, 22).await.unwrap();
    assert_eq!(bench.decoder.core.requests.expire(Instant::now()), 0);
    assert_eq!(bench.decoder.core.requests.expire(Instant::now() + PREPARED_LIFETIME), 1);
    bench.assert_free().await;
    let error = collect(generate(&client, spec("a", 3)).await).await.unwrap_err();
    assert_eq!(error.code, WorkerErrorCode::InvalidRequest);
}

#[tokio::test]
async fn nonsense_is_refused_for_that_request_alone() {
    use WorkerErrorCode::{Busy, InvalidRequest, TooLong};
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let code = |result: Result<u32, WorkerError>| result.unwrap_err().code;
    assert_eq!(code(prepare(&client, "a", &[]).await), InvalidRequest);
    assert_eq!(code(prepare(&client, "a", &[VOCAB]).await), InvalidRequest);
    assert_eq!(code(prepare(&client, "a", &prompt(MAX_TOKENS)).await), TooLong);
    prepare(&client, "a", &prompt(23)).await.unwrap();
    assert_eq!(code(prepare(&client, "a", &prompt(23)).await), InvalidRequest);
    for (start, end) in [(0, 23), (4, 22), (3, 22), (0, 0), (8, 4), (0, u32::MAX)] {
        assert_eq!(open(&client, "a", start, end).await.unwrap_err().code, InvalidRequest, "{start}..{end}");
    }
    assert_eq!(open(&client, "nobody", 0, 4).await.unwrap_err().code, InvalidRequest);
    client.notify(&DecodeRequest::Cancel { request_id: "nobody".into() });

    prepare(&client, "big", &prompt(300)).await.unwrap();
    assert_eq!(open(&client, "big", 0, 299).await.unwrap_err().code, TooLong);
    open(&client, "big", 0, 90).await.unwrap();
    prepare(&client, "second", &prompt(30)).await.unwrap();
    assert_eq!(open(&client, "second", 0, 29).await.unwrap_err().code, Busy);
    // Trying again replaces the first transfer, so its bytes do not count twice.
    open(&client, "big", 0, 90).await.unwrap();
    for id in ["b", "c"] {
        prepare(&client, id, &[1]).await.unwrap();
    }
    assert_eq!(code(prepare(&client, "d", &[1]).await), Busy);
    let bad = Sampling { temperature: -1.0, ..Sampling::default() };
    let error = collect(generate(&client, GenerateSpec { sampling: bad, ..spec("b", 3) }).await).await;
    assert_eq!(error.unwrap_err().code, InvalidRequest);
    let (_, ids, _) = collect(generate(&client, spec("second", 3)).await).await.unwrap();
    assert_eq!(ids, answer(&prompt(30), 3));
    client.notify(&DecodeRequest::Cancel { request_id: "a".into() });
    client.notify(&DecodeRequest::Cancel { request_id: "big".into() });
    client.notify(&DecodeRequest::Cancel { request_id: "c".into() });
    bench.assert_free().await;
}

#[tokio::test]
async fn answers_end_with_the_context() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    prepare(&client, "a", &prompt(MAX_TOKENS - 3)).await.unwrap();
    let (_, ids, reason) = collect(generate(&client, spec("a", 1000)).await).await.unwrap();
    assert_eq!((ids.len(), reason), (3, FinishReason::Length));
}

#[tokio::test]
async fn projections_come_layer_by_layer() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let mut events = client.request(&DecodeRequest::GetProjections).await.unwrap();
    for names in
        [vec!["k_proj.weight", "v_proj.weight"], vec!["k_proj.bias", "k_proj.weight", "v_proj.weight"]]
    {
        let Some(Incoming::Binary(bytes)) = events.next().await else { panic!("no projections") };
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut found = tensors.names();
        found.sort_unstable();
        assert_eq!(found, names);
        assert_eq!(tensors.tensor("k_proj.weight").unwrap().shape(), [1, 2]);
    }
    assert!(matches!(events.next().await, Some(Incoming::Event(DecodeEvent::ProjectionsEnd))));
}

#[tokio::test]
async fn inspections_are_files_in_the_folder() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let inspect = |id: &str, file: &str| DecodeRequest::Inspect { request_id: id.into(), file: file.into() };
    prepare(&client, "a", &prompt(6)).await.unwrap();
    let refused = client.call(&inspect("a", "../a"), LIMIT).await.unwrap();
    assert!(matches!(refused, DecodeEvent::Error(_)));
    let done = client.call(&inspect("a", "a.safetensors"), LIMIT).await.unwrap();
    assert!(
        matches!(&done, DecodeEvent::Inspected(r) if r.native_tokens == 6 && r.cached_tokens == 0),
        "{done:?}"
    );

    prepare(&client, "b", &prompt(6)).await.unwrap();
    let offer = open(&client, "b", 0, 5).await.unwrap();
    let mut events = client.request(&inspect("b", "b.safetensors")).await.unwrap();
    bench.send(&offer, &prompt(6), 5).await;
    let done = events.next().await.unwrap();
    assert!(matches!(&done, Incoming::Event(DecodeEvent::Inspected(r)) if r.bridged_tokens == 5), "{done:?}");

    let read = |name: &str| std::fs::read(bench.dir.path().join(name)).unwrap();
    let (a, b) = (read("a.safetensors"), read("b.safetensors"));
    let (a, b) = (
        safetensors::SafeTensors::deserialize(&a).unwrap(),
        safetensors::SafeTensors::deserialize(&b).unwrap(),
    );
    assert_eq!(a.tensor("layers.1.k").unwrap().shape(), [1, 5, 1]);
    assert_eq!(a.tensor("layers.0.attn_input").unwrap().shape(), [5, 1]);
    assert!(b.tensor("layers.0.attn_input").is_err());
    for name in ["layers.0.k", "layers.1.v", "logits"] {
        assert_eq!(a.tensor(name).unwrap().data(), b.tensor(name).unwrap().data(), "{name}");
    }
    bench.assert_free().await;
}
