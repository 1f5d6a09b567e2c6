//! Answers that follow a schema's masks with the model's whims taken out: tokens picked at random from what is allowed,
//! rare ones as often as common ones. Each must end, and a validator that knows nothing of ours must find it valid.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking; what was seen is shown"
)]

use decode_worker::constraint::{Compiler, Matcher};
use pd_tests::paths;
use pd_tests::schemas::random_schema;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;
use shared::control::Constraint;
use shared::model::Model;

const SCHEMAS: u64 = 200;
const WALKS_EACH: u64 = 3;
/// More than any of the schemas has room for.
const MAX_TOKENS: usize = 6000;
/// Single bytes are the first tokens of the vocabulary: escapes, digits and broken UTF-8 are made of them.
const SHORT_TOKENS: u32 = 300;

/// One of the allowed tokens. Two of three times one of the short ones, if there are any.
fn pick(random: &mut ChaCha8Rng, allowed: &[u32]) -> u32 {
    let short = allowed.partition_point(|&token| token < SHORT_TOKENS);
    let choices = if short > 0 && random.random_ratio(2, 3) { &allowed[..short] } else { allowed };
    choices[random.random_range(0..choices.len())]
}

fn walk(mut matcher: Matcher, vocab_size: u32, random: &mut ChaCha8Rng) -> Result<Vec<u32>, String> {
    let mut tokens = Vec::new();
    while !matcher.is_finished() {
        if tokens.len() == MAX_TOKENS {
            return Err("it does not end".to_owned());
        }
        let mask = matcher.mask().map_err(|e| e.to_string())?;
        let allowed: Vec<_> = (0..vocab_size).filter(|&token| mask.allows(token)).collect();
        if allowed.is_empty() {
            return Err(format!("a dead end after {tokens:?}"));
        }
        let token = pick(random, &allowed);
        if matcher.end_tokens().contains(&token) {
            break;
        }
        matcher.accept(token).map_err(|e| e.to_string())?;
        tokens.push(token);
    }
    Ok(tokens)
}

fn judge(schema: &Value, text: &str) -> Result<(), String> {
    let value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
    validator.validate(&value).map_err(|e| e.to_string())
}

#[test]
fn every_walk_ends_valid() {
    let model = Model::open(&paths::model()).unwrap();
    let vocab_size = u32::try_from(model.spec.vocab_size).unwrap();
    let compiler = Compiler::new(&model.tokenizer, model.spec.vocab_size, &model.spec.eos_token_ids).unwrap();
    let (mut bad, mut n_tokens, mut longest) = (Vec::new(), 0, 0);
    for seed in 0..SCHEMAS {
        let schema = random_schema(seed);
        let matcher = compiler.compile(&Constraint::JsonSchema { schema: schema.to_string() }).unwrap();
        for n in 0..WALKS_EACH {
            let mut random = ChaCha8Rng::seed_from_u64(seed * WALKS_EACH + n);
            let walked = walk(matcher.clone(), vocab_size, &mut random);
            let text = walked
                .as_ref()
                .map_or(String::new(), |tokens| model.tokenizer.decode_with_special(tokens).unwrap());
            n_tokens += walked.as_ref().map_or(0, Vec::len);
            longest = walked.as_ref().map_or(0, Vec::len).max(longest);
            if let Err(error) = walked.and_then(|_| judge(&schema, &text)) {
                bad.push(format!("{seed}: {error}\n{schema}\n{text}"));
            }
        }
    }
    eprintln!(
        "{SCHEMAS} schemas, {WALKS_EACH} walks each: {n_tokens} tokens in all, {longest} in the longest"
    );
    assert!(bad.is_empty(), "{} walks are bad:\n{}", bad.len(), bad.join("\n\n"));
}
