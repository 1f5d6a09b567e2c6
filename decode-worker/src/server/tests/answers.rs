//! Several answers, log probabilities, constraints, and single answers stopped, over the control connection.

use super::support::{Client, constrained, letters};
use super::*;
use shared::control::{Constraint, TokenLogprobs};

/// All that came for one request, by answer.
#[derive(Debug, Default)]
struct Outcome {
    receipt: Option<shared::control::DecodeReceipt>,
    ids: Vec<Vec<u32>>,
    logprobs: Vec<Vec<TokenLogprobs>>,
    ends: Vec<Option<FinishReason>>,
    prompt: Vec<TokenLogprobs>,
}

async fn outcome(mut events: EventStream<DecodeEvent>, choices: usize) -> Result<Outcome, WorkerError> {
    let mut all = Outcome {
        ids: vec![vec![]; choices],
        logprobs: vec![vec![]; choices],
        ends: vec![None; choices],
        ..Outcome::default()
    };
    while all.ends.contains(&None) {
        match events.next().await {
            Some(Incoming::Event(DecodeEvent::Started(receipt))) => all.receipt = Some(*receipt),
            Some(Incoming::Event(DecodeEvent::PromptLogprobs { logprobs })) => {
                assert!(all.receipt.is_some() && all.ids.iter().all(Vec::is_empty));
                all.prompt.extend(logprobs);
            }
            Some(Incoming::Event(DecodeEvent::Token { choice, ids, logprobs })) => {
                all.ids[choice as usize].extend(ids);
                all.logprobs[choice as usize].extend(logprobs);
            }
            Some(Incoming::Event(DecodeEvent::Finished { choice, reason, completion_tokens, .. })) => {
                let choice = choice as usize;
                assert_eq!(completion_tokens as usize, all.ids[choice].len());
                assert_eq!(all.ends[choice].replace(reason), None);
            }
            Some(Incoming::Event(DecodeEvent::Error(error))) => return Err(error),
            Some(Incoming::Event(DecodeEvent::Progress { .. })) => {}
            other => panic!("{other:?}"),
        }
    }
    Ok(all)
}

async fn refusal(client: &Client, spec: GenerateSpec) -> WorkerError {
    outcome(generate(client, spec).await, 1).await.unwrap_err()
}

#[tokio::test]
async fn several_answers_are_those_of_their_seeds() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let sampling = |seed| Sampling { seed, ..Sampling::default() };
    prepare(&client, "a", &prompt(21)).await.unwrap();
    let events = generate(&client, GenerateSpec { choices: 3, sampling: sampling(5), ..spec("a", 30) }).await;
    let together = outcome(events, 3).await.unwrap();
    assert_eq!(together.ends, [Some(FinishReason::Length); 3]);
    assert_ne!(together.ids[0], together.ids[1]);
    bench.assert_free().await;
    for (seed, ids) in (5..).zip(together.ids) {
        prepare(&client, "b", &prompt(21)).await.unwrap();
        let alone = generate(&client, GenerateSpec { sampling: sampling(seed), ..spec("b", 30) }).await;
        assert_eq!(collect(alone).await.unwrap().1, ids);
    }
    bench.assert_free().await;
}

#[tokio::test]
async fn a_stopped_answer_ends_and_the_others_go_on() {
    let bench = bench(SLOW).await;
    let client = bench.client().await;
    prepare(&client, "a", &prompt(5)).await.unwrap();
    let mut events = generate(&client, GenerateSpec { choices: 2, ..spec("a", 60) }).await;
    while !matches!(events.next().await, Some(Incoming::Event(DecodeEvent::Token { .. }))) {}
    let stop = |id: &str, choice| DecodeRequest::StopChoice { request_id: id.into(), choice };
    for unknown in [stop("a", 9), stop("nobody", 0), stop("a", 1)] {
        client.notify(&unknown);
    }
    let mut ends = Vec::new();
    while ends.len() < 2 {
        if let Some(Incoming::Event(DecodeEvent::Finished { choice, reason, completion_tokens, .. })) =
            events.next().await
        {
            ends.push((choice, reason, completion_tokens));
        }
    }
    assert!(matches!(ends[0], (1, FinishReason::Stop, 1..=50)), "{ends:?}");
    assert_eq!(ends[1], (0, FinishReason::Length, 60));
    bench.assert_free().await;
}

#[tokio::test]
async fn a_prompt_with_log_probabilities_is_computed_here() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    for _ in 0..2 {
        // The second time its blocks are in the store, and still not used.
        prepare(&client, "a", &prompt(300)).await.unwrap();
        let wanted = GenerateSpec { logprobs: Some(2), prompt_logprobs: Some(1), ..spec("a", 4) };
        let all = outcome(generate(&client, wanted).await, 1).await.unwrap();
        let receipt = all.receipt.unwrap();
        assert_eq!((receipt.cached_tokens, receipt.native_tokens, receipt.blocks), (0, 300, 0));
        assert_eq!((all.prompt.len(), all.logprobs[0].len()), (299, 4));
        assert!(all.prompt.iter().all(|p| p.top.len() == 1 && p.logprob < 0.0));
        // Greedy: each token is the likeliest.
        for (id, told) in all.ids[0].iter().zip(&all.logprobs[0]) {
            assert_eq!((told.top.len(), told.top[0]), (2, (*id, told.logprob)));
        }
    }
    bench.assert_free().await;
}

#[tokio::test]
async fn constrained_answers_have_the_form_and_end_with_it() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let form = Constraint::Regex { pattern: "a[bc]{3}(no|yes)".into() };
    for (id, choices, seed) in [("greedy", 1, None), ("drawn", 6, Some(3))] {
        constrained(&client, id, &prompt(9), form.clone()).await.unwrap();
        let sampling = seed.map_or(Sampling::greedy(), |seed| Sampling { seed, ..Sampling::default() });
        let wanted = GenerateSpec { choices, sampling, ..spec(id, 50) };
        let all = outcome(generate(&client, wanted).await, choices as usize).await.unwrap();
        for (ids, end) in all.ids.iter().zip(&all.ends) {
            let text = letters(ids);
            let (middle, end_of) = text.strip_prefix('a').unwrap().split_at(3);
            assert!(middle.chars().all(|c| "bc".contains(c)) && ["no", "yes"].contains(&end_of), "{text}");
            assert_eq!(*end, Some(FinishReason::Stop));
        }
    }
    bench.assert_free().await;
}

#[tokio::test]
async fn bad_constraints_and_numbers_are_refused_before_any_work() {
    use WorkerErrorCode::InvalidRequest;
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let bad = Constraint::Regex { pattern: "(".into() };
    let error = constrained(&client, "a", &prompt(9), bad).await.unwrap_err();
    assert_eq!(error.code, InvalidRequest);
    assert!(error.message.contains("regular expression") || error.message.contains("regex"), "{error}");
    // Nothing is left of it, and its name is free again.
    bench.assert_free().await;
    prepare(&client, "a", &prompt(9)).await.unwrap();
    for (choices, logprobs, prompt_logprobs) in [
        (0, None, None),
        (129, None, None),
        (u32::MAX, None, None),
        (1, Some(101), None),
        (1, None, Some(u32::MAX)),
    ] {
        let wild = GenerateSpec { choices, logprobs, prompt_logprobs, ..spec("a", 3) };
        assert_eq!(refusal(&client, wild).await.code, InvalidRequest);
    }
    // It is still there for a request that makes sense.
    assert_eq!(collect(generate(&client, spec("a", 3)).await).await.unwrap().1, answer(&prompt(9), 3));
    bench.assert_free().await;
}

#[tokio::test]
async fn a_cancel_while_a_constraint_is_compiled_leaves_nothing() {
    let bench = bench(Duration::ZERO).await;
    let client = bench.client().await;
    let form = Constraint::Regex { pattern: "(a|b|c|d){40,90}x(e|f){20,80}".into() };
    for _ in 0..20 {
        let request = DecodeRequest::Prepare {
            request_id: "a".into(),
            tokens: prompt(9).into(),
            constraint: Some(form.clone()),
        };
        let mut events = client.request(&request).await.unwrap();
        client.notify(&DecodeRequest::Cancel { request_id: "a".into() });
        assert!(events.next().await.is_some());
        bench.assert_free().await;
    }
}
