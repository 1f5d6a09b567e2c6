//! Microseconds per token of the sampler and of constraint masks.
//!
//! cargo run --release -p decode-worker --example sampling -- [MODEL]
#![allow(clippy::print_stdout, reason = "its purpose")]

use decode_worker::constraint::Compiler;
use decode_worker::sampler::{Sampler, log_probabilities};
use serde_json::json;
use shared::control::{Constraint, Sampling};
use shared::model::Model;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

const ROUNDS: usize = 200;

fn main() -> Result<(), Box<dyn Error>> {
    for n in [49_152, 151_936] {
        sampler(n)?;
    }
    match std::env::args().nth(1) {
        Some(model) => masks(Path::new(&model)),
        None => Ok(()),
    }
}

/// As few likely tokens as a model has.
fn logits(n: u32, round: u32) -> Vec<f32> {
    let bits = |i: u32| i.wrapping_add(round).wrapping_mul(2_654_435_761) >> 8;
    (0..n).map(|i| (bits(i) as f32 / (1 << 24) as f32).powi(20) * 20.0 - 10.0).collect()
}

fn sampler(n: u32) -> Result<(), Box<dyn Error>> {
    let base = Sampling::default;
    let penalties =
        Sampling { presence_penalty: 0.5, frequency_penalty: 0.2, repetition_penalty: 1.1, ..base() };
    let cases = [
        ("greedy", Sampling::greedy()),
        ("temperature", base()),
        ("top_k 40", Sampling { top_k: 40, ..base() }),
        ("top_p 0.9", Sampling { top_p: 0.9, ..base() }),
        ("top_p 0.9, temperature 5 (flat)", Sampling { top_p: 0.9, temperature: 5.0, ..base() }),
        ("min_p 0.05", Sampling { min_p: 0.05, ..base() }),
        ("top_k 40, top_p 0.9, min_p 0.05", Sampling { top_k: 40, top_p: 0.9, min_p: 0.05, ..base() }),
        ("penalties, prompt of 4,000", penalties),
    ];
    let prompt: Vec<u32> = (0..4000).collect();
    for (name, sampling) in cases {
        let mut sampler = Sampler::new(sampling, &prompt)?;
        report(&format!("{n} logits, {name}"), |round| {
            let mut logits = logits(n, round as u32);
            let start = Instant::now();
            sampler.sample(&mut logits, None);
            start.elapsed()
        });
    }
    report(&format!("{n} logits, log probabilities, top 20"), |round| {
        let logits = logits(n, round as u32);
        let start = Instant::now();
        std::hint::black_box(log_probabilities(&logits, 5, 20));
        start.elapsed()
    });
    Ok(())
}

fn masks(path: &Path) -> Result<(), Box<dyn Error>> {
    let model = Model::open(path)?;
    let n = model.spec.vocab_size as u32;
    let start = Instant::now();
    let compiler = Compiler::new(&model.tokenizer, n as usize, &model.spec.eos_token_ids)?;
    println!("vocabulary of {n}: compiler ready in {:.0?}", start.elapsed());
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"], "properties": {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5}}});
    let text =
        r#"{"name": "Ada Lovelace, countess", "age": 36, "tags": ["mathematics", "poetry", "engines"]}"#;
    let cases = [
        ("JSON object", Constraint::JsonObject, text),
        ("JSON schema", Constraint::JsonSchema { schema: schema.to_string() }, text),
        ("regular expression", Constraint::Regex { pattern: "[A-Za-z ,.]{1,200}".to_owned() }, "A sentence, of some words and length."),
        ("grammar", Constraint::Lark { grammar: "start: expr\nexpr: term ((\"+\"|\"-\") term)*\nterm: atom ((\"*\"|\"/\") atom)*\natom: /[0-9]+/ | \"(\" expr \")\"".to_owned() }, "(12+34)*56-7/(8+9*(10-11))"),
    ];
    for (name, constraint, text) in cases {
        let start = Instant::now();
        let first = compiler.compile(&constraint)?;
        let compiled = start.elapsed();
        let start = Instant::now();
        compiler.compile(&constraint)?;
        println!("{name}: compiled in {compiled:.0?}, again in {:.0?}", start.elapsed());
        let ids = model.tokenizer.encode(text, false)?;
        for (which, rounds) in [("first answer", 1), ("later answers", 20)] {
            let mut times = Vec::new();
            for _ in 0..rounds {
                let mut matcher = first.clone();
                for &id in &ids {
                    let start = Instant::now();
                    let mask = matcher.mask()?;
                    std::hint::black_box(mask.len());
                    matcher.accept(id)?;
                    times.push(start.elapsed());
                }
            }
            show(&format!("{name}, mask and accept, {which}"), times);
        }
    }
    Ok(())
}

fn report(name: &str, mut once: impl FnMut(usize) -> Duration) {
    show(name, (0..ROUNDS).map(&mut once).collect());
}

fn show(name: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6;
    println!("{name}: {:.0} us (p10 {:.0}, p90 {:.0}, worst {:.0})", at(50), at(10), at(90), at(100));
}
