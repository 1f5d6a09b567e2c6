//! Constraints over the real vocabulary: answers by chance are always valid, hostile constraints stop nobody.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; times are shown"
)]

#[allow(unreachable_pub, reason = "the end-to-end crate exports it")]
#[path = "../../tests/src/schemas.rs"]
mod schemas;

use decode_worker::constraint::{Compiler, Matcher, TokenMask};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use shared::control::Constraint;
use shared::model::Model;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Longest time that one mask may hold up the engine.
const LONGEST_STEP: Duration = Duration::from_millis(500);

/// The start model's special tokens come first, then single bytes up to here, then words.
const SINGLE_BYTES_END: u32 = 252;

struct Setting {
    model: Model,
    compiler: Compiler,
}

fn setting() -> &'static Setting {
    static SETTING: OnceLock<Setting> = OnceLock::new();
    SETTING.get_or_init(|| {
        let default =
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
        let model = std::env::var_os("PD_TEST_MODEL").map_or_else(default, PathBuf::from);
        let model = Model::open(&model).unwrap();
        let compiler =
            Compiler::new(&model.tokenizer, model.spec.vocab_size, &model.spec.eos_token_ids).unwrap();
        Setting { model, compiler }
    })
}

/// Any token of a mask; every second time one of the single bytes, if it has any: escapes, digits, white space and broken
/// UTF-8 are made of them, and they would drown among whole words.
fn any_of(mask: &TokenMask, random: &mut ChaCha8Rng) -> u32 {
    let all: Vec<_> =
        (0..setting().model.spec.vocab_size as u32).filter(|&token| mask.allows(token)).collect();
    let bytes = all.partition_point(|&token| token < SINGLE_BYTES_END);
    let choices = if bytes > 0 && random.random_bool(0.5) { &all[..bytes] } else { &all[..] };
    choices[random.random_range(0..choices.len())]
}

/// Writes an answer by chance, ending wherever chance says so.
fn answer(mut matcher: Matcher, random: &mut ChaCha8Rng) -> String {
    let tokenizer = &setting().model.tokenizer;
    let mut ids = Vec::new();
    for _ in 0..4000 {
        if matcher.is_finished() {
            return tokenizer.decode_with_special(&ids).unwrap();
        }
        let token = any_of(&matcher.mask().unwrap(), random);
        matcher.accept(token).unwrap();
        if matcher.end_tokens().contains(&token) {
            assert!(matcher.is_finished());
        } else {
            assert!(!tokenizer.is_special(token), "token {token} is special");
            ids.push(token);
        }
    }
    panic!("no end: {}", tokenizer.decode(&ids).unwrap());
}

#[test]
fn answers_by_chance_are_valid() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut bad = Vec::new();
    for seed in 0..200 {
        let schema = schemas::random_schema(seed);
        let validator = jsonschema::options().should_validate_formats(true).build(&schema).unwrap();
        let constraint = Constraint::JsonSchema { schema: schema.to_string() };
        let matcher =
            setting().compiler.compile(&constraint).unwrap_or_else(|e| panic!("{seed}: {e}\n{schema}"));
        for _ in 0..2 {
            let text = answer(matcher.clone(), &mut random);
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|e| panic!("{seed}: {e}\n{schema}\n{text}"));
            if let Err(error) = validator.validate(&value) {
                bad.push(format!("{seed}: {error}\n{schema}\n{value}"));
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

fn schema(schema: &Value) -> Constraint {
    Constraint::JsonSchema { schema: schema.to_string() }
}

fn regex(pattern: &str) -> Constraint {
    Constraint::Regex { pattern: pattern.to_owned() }
}

fn lark(grammar: String) -> Constraint {
    Constraint::Lark { grammar }
}

/// Constraints made to take for ever, or all memory, or all stack.
fn hostile() -> Vec<(&'static str, Constraint)> {
    let numbered = |n: usize, each: &dyn Fn(usize) -> String, between: &str| {
        (0..n).map(each).collect::<Vec<_>>().join(between)
    };
    let any_of: Vec<Value> =
        (0..6).map(|i| json!({"properties": {format!("p{i}"): {"type": "integer"}}})).collect();
    let all_of: Vec<Value> = (0..12).map(|_| json!({"anyOf": any_of})).collect();
    let chain: serde_json::Map<String, Value> =
        (0..5000).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}))).collect();
    let many: serde_json::Map<String, Value> =
        (0..5000).map(|i| (format!("property {i}"), json!({"type": "string"}))).collect();
    let overlapping: serde_json::Map<String, Value> = (0..40)
        .map(|i| (format!("^(a|b)*a(a|b){{{i}}}$"), json!({"type": "string", "maxLength": i})))
        .collect();
    let mut nested = json!({"type": "integer"});
    for _ in 0..45 {
        nested = json!({"type": "array", "items": nested});
    }
    vec![
        ("repetition squared", regex("(a{1,1000}){1,1000}")),
        ("exponential automaton", regex("(a|b)*a(a|b){1000}")),
        ("large classes", regex(r"(\p{L}{1,200}|\p{N}{1,300}){1,100}")),
        ("huge repetition", regex("a{1000000000}")),
        ("huge repetition later", schema(&json!({"type": "string", "pattern": "^ab{1000000000}c$"}))),
        ("large repetition later", regex("ab{20000}c")),
        ("large bounded repetition", regex("a[a-z]{1,20000}(x|y)")),
        ("nested large repetition", regex("a([a-z]{1,20000}-){1,20000}")),
        ("many alternatives", regex(&numbered(3000, &|i| format!("{i}x*"), "|"))),
        ("nested groups", regex(&format!("{}a{}", "(".repeat(2000), ")".repeat(2000)))),
        ("product of alternatives", schema(&json!({"type": "object", "allOf": all_of}))),
        ("chain of references", schema(&json!({"$ref": "#/$defs/d0", "$defs": chain}))),
        ("itself", schema(&json!({"$ref": "#"}))),
        (
            "many properties",
            schema(&json!({"type": "object", "properties": many, "additionalProperties": false})),
        ),
        ("overlapping patterns", schema(&json!({"type": "object", "patternProperties": overlapping}))),
        (
            "long array",
            schema(&json!({"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}})),
        ),
        (
            "long array of strings",
            schema(
                &json!({"type": "array", "maxItems": 100_000, "items": {"maxLength": 1000, "type": "string"}}),
            ),
        ),
        ("long string", schema(&json!({"type": "string", "minLength": 1_000_000_000u64}))),
        ("long range", schema(&json!({"type": "integer", "minimum": 1, "maximum": 1e300}))),
        (
            "fine steps",
            schema(&json!({"type": "number", "multipleOf": 1.234_567_8e-9, "minimum": 0.1, "maximum": 1e9})),
        ),
        (
            "coprime steps",
            schema(&json!({"allOf": [{"type": "integer", "multipleOf": 999_983}, {"multipleOf": 999_979}]})),
        ),
        ("many words", schema(&json!({"enum": (0..40_000).map(|i| format!("w{i}")).collect::<Vec<_>>()}))),
        ("nested arrays", schema(&nested)),
        ("remote reference", schema(&json!({"$ref": "http://127.0.0.1:9/schema.json"}))),
        ("file reference", schema(&json!({"$ref": "file:///etc/passwd"}))),
        (
            "chain of rules",
            lark(format!(
                "start: r0\n{}\nr5000: \"x\"",
                numbered(5000, &|i| format!("r{i}: r{}", i + 1), "\n")
            )),
        ),
        ("ambiguous", lark("start: a\na: a a | a a a | \"x\" | \"\"".to_owned())),
        (
            "ambiguous lexemes",
            lark(format!(
                "start: (t0|{})+\n{}",
                numbered(60, &|i| format!("t{i}"), "|"),
                numbered(60, &|i| format!("t{i}: /[a-z]{{1,{}}}[0-9]*/", i + 1), "\n")
            )),
        ),
        ("left recursion through nothing", lark("start: start start | e\ne: \"\"".to_owned())),
        ("repeated rule", lark("start: r{1,100000}\nr: \"a\" | \"b\" r".to_owned())),
        ("nested repeats", lark("start: ((((\"a\"{1,100}){1,100}){1,100}){1,100}){1,100}".to_owned())),
        ("nested parentheses", lark(format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000)))),
        ("schema inside", lark("start: %json {\"type\": \"array\", \"minItems\": 1000000}".to_owned())),
        ("substrings", lark(format!("start: %regex {{\"substring_chars\": \"{}\"}}", "ab".repeat(20_000)))),
        ("lookaround", lark("start: /(?=a)b/".to_owned())),
        ("intersection", lark("start: A\nA: /(a|b)*a(a|b){30}/ & /(a|b)*b(a|b){31}/ & ~/(ab)*/".to_owned())),
    ]
}

#[test]
fn hostile_constraints_stop_nobody() {
    let compiler = &setting().compiler;
    let mut random = ChaCha8Rng::seed_from_u64(2);
    let mut slow = Vec::new();
    for (name, constraint) in hostile() {
        let start = Instant::now();
        let compiled = compiler.compile(&constraint);
        let took = start.elapsed();
        if took > Duration::from_secs(6) {
            slow.push((name, took));
        }
        let mut matcher = match compiled {
            Ok(matcher) => matcher,
            Err(error) => {
                eprintln!("{name}: refused after {took:.0?}: {error}");
                continue;
            }
        };
        let (mut longest, mut steps, mut end) = (Duration::ZERO, 0, "still going".to_owned());
        while steps < 60 && !matcher.is_finished() {
            let start = Instant::now();
            let step = matcher.mask().and_then(|mask| {
                let token = any_of(&mask, &mut random);
                matcher.accept(token)
            });
            longest = longest.max(start.elapsed());
            steps += 1;
            if let Err(error) = step {
                end = error.to_string();
                break;
            }
        }
        eprintln!("{name}: compiled in {took:.0?}, {steps} steps, longest {longest:.0?}, {end}");
        if longest > LONGEST_STEP {
            slow.push((name, longest));
        }
    }
    assert!(slow.is_empty(), "too slow: {slow:?}");
    // After all that a plain one still compiles.
    let start = Instant::now();
    compiler.compile(&Constraint::JsonObject).unwrap();
    assert!(start.elapsed() < Duration::from_secs(6));
}
