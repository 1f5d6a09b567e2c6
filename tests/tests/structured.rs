//! Answers of the real model to random JSON schemas, judged by a validator that knows nothing of ours.
//!
//! `PD_TEST_SCHEMAS` says how many schemas (20; the bar is 200).
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking; what was seen is shown"
)]

use futures_util::{StreamExt as _, stream};
use pd_tests::decoder::{Decoder, fresh_id};
use pd_tests::paths;
use pd_tests::schemas::random_schema;
use pd_tests::stack::Worker;
use serde_json::Value;
use shared::control::{Constraint, FinishReason, GenerateSpec, Require, Sampling, WorkerErrorCode};
use shared::model::Model;
use std::time::Instant;

/// Requests at once.
const CONCURRENT: usize = 8;
/// Ample: the schemas are finite, but a small model may fill every string to its end.
const MAX_NEW_TOKENS: u32 = 1500;

/// What became of one schema.
#[allow(dead_code, reason = "shown by Debug when a test fails")]
#[derive(Debug)]
enum Verdict {
    Valid { tokens: usize },
    Invalid { error: String },
    CutOff { tokens: usize },
}

async fn judge(decoder: &Decoder, model: &Model, seed: u64) -> (u64, Verdict, String) {
    let schema = random_schema(seed);
    let names: Vec<_> = schema["properties"].as_object().unwrap().keys().cloned().collect();
    let question = format!(
        "<|im_start|>user\nInvent an example with {} as JSON.<|im_end|>\n<|im_start|>assistant\n",
        names.join(", ")
    );
    let prompt = model.tokenizer.encode(&question, false).unwrap();
    let id = fresh_id("structured");
    let constraint = Constraint::JsonSchema { schema: schema.to_string() };
    decoder.prepare_constrained(&id, &prompt, Some(constraint)).await.unwrap();
    let sampling = match seed % 3 {
        0 => Sampling::greedy(),
        1 => Sampling { temperature: 0.7, top_p: 0.9, seed, ..Sampling::default() },
        _ => Sampling { temperature: 1.0, seed, ..Sampling::default() },
    };
    let answer = decoder
        .generate_as(GenerateSpec {
            request_id: id,
            max_new_tokens: MAX_NEW_TOKENS,
            sampling,
            stop_token_ids: model.spec.eos_token_ids.clone(),
            require: Require::Nothing,
            transfer_timeout_ms: 1000,
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            window: 0,
        })
        .await;
    assert!(answer.error.is_none(), "{seed}: {:?}", answer.error);
    let text = model.tokenizer.decode_with_special(&answer.ids).unwrap();
    let tokens = answer.ids.len();
    if answer.finish != Some(FinishReason::Stop) {
        return (seed, Verdict::CutOff { tokens }, text);
    }
    let validator = jsonschema::options().should_validate_formats(true).build(&schema).unwrap();
    let verdict = match serde_json::from_str::<Value>(&text) {
        Err(error) => Verdict::Invalid { error: error.to_string() },
        Ok(value) => match validator.validate(&value) {
            Ok(()) => Verdict::Valid { tokens },
            Err(error) => Verdict::Invalid { error: error.to_string() },
        },
    };
    (seed, verdict, text)
}

#[tokio::test]
async fn every_answer_is_valid() {
    let n: u64 = std::env::var("PD_TEST_SCHEMAS").ok().and_then(|v| v.parse().ok()).unwrap_or(20);
    let model = Model::open(&paths::model()).unwrap();
    let worker = Worker::decode(&paths::model(), &[]);
    let decoder = worker.decoder().await;
    let start = Instant::now();
    let verdicts: Vec<_> = stream::iter(0..n)
        .map(|seed| judge(&decoder, &model, seed))
        .buffer_unordered(CONCURRENT)
        .inspect(|(seed, verdict, _)| eprintln!("schema {seed}: {verdict:?} ({:.0?})", start.elapsed()))
        .collect()
        .await;
    let took = start.elapsed();
    let (mut valid, mut tokens_in_all, mut bad) = (0u32, 0, Vec::new());
    for (seed, verdict, text) in verdicts {
        match verdict {
            Verdict::Valid { tokens } => {
                valid += 1;
                tokens_in_all += tokens;
            }
            other => bad.push(format!("{seed}: {other:?}\n{}\n{text}", random_schema(seed))),
        }
    }
    eprintln!(
        "{valid} of {n} answers valid, {:.0} tokens each, {took:.0?}, {CONCURRENT} at once",
        tokens_in_all as f64 / f64::from(valid.max(1))
    );
    assert!(bad.is_empty(), "{} of {n} are not:\n{}", bad.len(), bad.join("\n\n"));
    decoder.settled().await;
}

#[tokio::test]
async fn a_bad_constraint_is_refused_before_any_work() {
    let worker = Worker::decode(&paths::model(), &[]);
    let decoder = worker.decoder().await;
    for constraint in [
        Constraint::JsonSchema { schema: "{".to_owned() },
        Constraint::JsonSchema { schema: r#"{"type": "object", "not": {"required": ["a"]}}"#.to_owned() },
        Constraint::Regex { pattern: "a(".to_owned() },
        Constraint::Lark { grammar: "start: nowhere".to_owned() },
    ] {
        let error = decoder.prepare_constrained(&fresh_id("bad"), &[1, 2, 3], Some(constraint.clone())).await;
        let error = error.expect_err(&format!("{constraint:?} was taken"));
        assert_eq!(error.code, WorkerErrorCode::InvalidRequest, "{error}");
    }
    assert!(decoder.native(&[1, 2, 3], 2).await.error.is_none());
    decoder.settled().await;
}
