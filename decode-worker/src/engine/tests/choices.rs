//! Several answers to one prompt, and log probabilities.

use super::*;
use crate::engine::testing::VOCAB;
use crate::sampler::log_probabilities;
use shared::control::TokenLogprobs;

/// What came of each answer, and the prompt's log probabilities.
#[derive(Debug, Default)]
struct Outcome {
    answers: Vec<(Vec<u32>, Vec<TokenLogprobs>, Option<FinishReason>)>,
    prompt: Vec<TokenLogprobs>,
}

async fn collect(mut events: queue::Receiver<JobEvent>, choices: usize) -> Outcome {
    let mut outcome = Outcome { answers: vec![Default::default(); choices], prompt: vec![] };
    while let Some(event) = events.recv().await {
        match event {
            JobEvent::Token { choice, id, logprobs } => {
                let answer = &mut outcome.answers[choice as usize];
                assert_eq!(answer.2, None, "a token after the end");
                answer.0.push(id);
                answer.1.extend(logprobs);
            }
            JobEvent::Finished { choice, reason, completion_tokens, .. } => {
                let answer = &mut outcome.answers[choice as usize];
                assert_eq!(completion_tokens as usize, answer.0.len());
                assert_eq!(answer.2.replace(reason), None, "ended twice");
            }
            JobEvent::PromptLogprobs(all) => outcome.prompt.extend(all),
            JobEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    outcome
}

/// A job of several answers, drawn with seeds 7, 8, ….
fn several(bench: &Bench, prompt: &[u32], n: u32, choices: u64) -> (Job, queue::Receiver<JobEvent>) {
    let sampler = |i| Sampler::new(Sampling { seed: 7 + i, ..Sampling::default() }, prompt).unwrap();
    let (job, events) = bench.job(prompt, n, Job::queue_len(choices as usize, 64));
    let samplers = (0..choices).map(sampler).collect();
    (Job { samplers, stops: Stops::new(choices as usize), ..job }, events)
}

#[tokio::test]
async fn the_prompt_is_read_once_and_each_answer_is_that_of_its_seed() {
    let bench = bench(TestEngine::default()).await;
    let prompt: Vec<u32> = (0..30).collect();
    let (job, events) = several(&bench, &prompt, 12, 5);
    bench.handle.generate(job);
    let together = collect(events, 5).await;
    assert_eq!(bench.engine.computed.load(Ordering::Relaxed), 30 + 5 * 11);
    bench.idle().await;
    for (seed, (ids, _, reason)) in (7..).zip(&together.answers) {
        let (mut job, events) = bench.job(&prompt, 12, 64);
        job.samplers = vec![Sampler::new(Sampling { seed, ..Sampling::default() }, &prompt).unwrap()];
        bench.handle.generate(job);
        assert_eq!((ids, reason), (&tokens(events).await.0, &Some(FinishReason::Length)));
    }
    assert!(together.answers.iter().any(|other| other.0 != together.answers[0].0));
}

#[tokio::test]
async fn one_answer_can_be_stopped_and_the_others_go_on() {
    let bench = bench(TestEngine { pass: Duration::from_millis(2), ..TestEngine::default() }).await;
    let (job, mut events) = several(&bench, &[1, 2, 3], 60, 3);
    let stops = job.stops.clone();
    stops.stop(99);
    bench.handle.generate(job);
    let mut seen = [0; 3];
    while seen[1] < 10 {
        if let Some(JobEvent::Token { choice, .. }) = events.recv().await {
            seen[choice as usize] += 1;
        }
    }
    stops.stop(1);
    let mut ends = Vec::new();
    while let Some(event) = events.recv().await {
        if let JobEvent::Finished { choice, reason, completion_tokens, .. } = event {
            ends.push((choice, reason, completion_tokens));
        }
    }
    assert!(matches!(ends[0], (1, FinishReason::Stop, 10..=14)), "{ends:?}");
    ends.sort_unstable_by_key(|end| end.0);
    assert_eq!([ends[0].1, ends[2].1], [FinishReason::Length; 2]);
    assert_eq!([ends[0].2, ends[2].2], [60; 2]);
    bench.idle().await;
}

#[tokio::test]
async fn an_answer_stopped_before_the_prompt_is_in_has_at_most_its_first_token() {
    let bench = bench(TestEngine::default()).await;
    let (job, events) = several(&bench, &[1], 60, 1);
    job.stops.stop(0);
    bench.handle.generate(job);
    let outcome = collect(events, 1).await;
    assert!(outcome.answers[0].0.len() <= 1);
    assert_eq!(outcome.answers[0].2, Some(FinishReason::Stop));
}

#[tokio::test]
async fn a_cancel_at_any_point_frees_all_answers() {
    for after in [0, 1, 2, 9, 40] {
        let bench = bench(TestEngine { pass: Duration::from_millis(1), ..TestEngine::default() }).await;
        let (mut job, mut events) = several(&bench, &(0..40).collect::<Vec<_>>(), 10_000, 4);
        job.prompt_logprobs = (after % 2 == 0).then_some(3);
        let cancel = job.cancel.clone();
        bench.handle.generate(job);
        for _ in 0..after {
            events.recv().await.unwrap();
        }
        if after % 3 == 0 {
            drop(events);
        } else {
            cancel.cancel();
        }
        bench.idle().await;
    }
}

#[tokio::test]
async fn a_full_queue_pauses_all_answers_and_loses_no_token() {
    let bench = bench(TestEngine::default()).await;
    let (job, events) = several(&bench, &[1, 2], 200, 4);
    bench.handle.generate(job);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(bench.handle.n_jobs(), 1);
    let outcome = collect(events, 4).await;
    assert!(
        outcome.answers.iter().all(|(ids, _, end)| ids.len() == 200 && *end == Some(FinishReason::Length))
    );
}

#[tokio::test]
async fn memory_of_all_answers_is_counted() {
    let bench = bench(TestEngine { pass: Duration::from_millis(5), ..TestEngine::default() }).await;
    let prompt: Vec<u32> = (0..100).map(|i| i % 50).collect();
    let (job, mut events) = several(&bench, &prompt, 1000, 6);
    bench.handle.generate(job);
    for _ in 0..20 {
        events.recv().await.unwrap();
    }
    let bytes = bench.handle.sequence_bytes();
    assert!(bytes >= 6 * 100 * 16, "{bytes}");
    drop(events);
    bench.idle().await;
}

#[tokio::test]
async fn log_probabilities_are_those_of_the_raw_logits() {
    let bench = bench(TestEngine::default()).await;
    let prompt: Vec<u32> = (0..20).map(|i| i * 3 % 50).collect();
    let (mut job, events) = bench.job(&prompt, 6, 64);
    // A bias changes what is chosen, but not what the model thought of it.
    let sampling = Sampling { logit_bias: vec![(5, 50.0)], ..greedy() };
    job.samplers = vec![Sampler::new(sampling, &prompt).unwrap()];
    (job.logprobs, job.prompt_logprobs) = (Some(2), Some(1));
    bench.handle.generate(job);
    let outcome = collect(events, 1).await;
    assert_eq!(outcome.answers[0].0, [5; 6]);
    let logits = |tokens: &[u32]| -> Vec<f32> {
        let best = answer(tokens, 1)[0];
        (0..VOCAB).map(|t| if t == best { 1.0 } else { 0.0 }).collect()
    };
    let text = [&prompt[..], &[5; 6]].concat();
    let of = |at: usize, top: u32| log_probabilities(&logits(&text[..at]), text[at], top);
    let expected: Vec<_> = (1..20).map(|at| of(at, 1)).collect();
    assert_eq!(outcome.prompt, expected);
    let expected: Vec<_> = (20..26).map(|at| of(at, 2)).collect();
    assert_eq!(outcome.answers[0].1, expected);
    bench.idle().await;
}
