//! Every schema of the JSON Schema Test Suite (draft 2020-12) through the compiler, every instance through the matcher.
//!
//! A schema must compile, or its refusal is on record in `json_schema_suite.json` with the reason. An instance that the
//! suite calls valid must be followed to its end, one that it calls invalid must not, or that is on record. A
//! difference from the record in any direction fails.
//!
//! Instances are written as `JSON.stringify` writes them, then, if that is refused, with their keys in the order in which
//! the schema names them: a matcher takes properties in the schema's order only, as OpenAI's structured outputs do.
//!
//! The optional tests of formats are among them, because formats are asserted here.
//!
//! The suite comes with the source package of PyPI's `jsonschema` (`tests/suites/json_schema.sh`).
//! `PD_TEST_RECORD=FILE` writes what was seen in the record's form.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use decode_worker::constraint::{Compiler, Matcher};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use shared::control::Constraint;
use shared::model::Model;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Deserialize)]
struct Group {
    description: String,
    schema: Value,
    tests: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    description: String,
    data: Value,
    valid: bool,
}

/// What differs from the suite, by "file: group" or "file: group: case", with the reason.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Record {
    refused_schemas: BTreeMap<String, String>,
    refused_although_valid: BTreeMap<String, String>,
    accepted_although_invalid: BTreeMap<String, String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn suite() -> PathBuf {
    let output = Command::new(root().join("tests/suites/json_schema.sh")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()).join("draft2020-12")
}

/// The value with the keys of all objects in the order in which `schema` first names them.
fn ordered(value: &Value, schema: &str) -> Value {
    match value {
        Value::Object(map) => {
            let place = |key: &str| schema.find(&Value::from(key).to_string()).unwrap_or(usize::MAX);
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| place(key));
            Value::Object(
                entries.into_iter().map(|(k, v)| (k.clone(), ordered(v, schema))).collect::<Map<_, _>>(),
            )
        }
        Value::Array(list) => Value::Array(list.iter().map(|v| ordered(v, schema)).collect()),
        other => other.clone(),
    }
}

fn accepts(matcher: &Matcher, model: &Model, text: &str) -> bool {
    let mut matcher = matcher.clone();
    let end = matcher.end_tokens()[0];
    for token in model.tokenizer.encode(text, false).unwrap().into_iter().chain([end]) {
        let mask = matcher.mask().unwrap();
        assert!(!mask.is_empty(), "a dead end before {text:?} ends");
        if matcher.accept(token).is_err() {
            return false;
        }
        assert!(token != end || mask.allows(end), "the end was taken but not offered: {text:?}");
    }
    true
}

fn judge(compiler: &Compiler, model: &Model, file: &str, group: &Group, seen: &mut Record) -> usize {
    let name = format!("{file}: {}", group.description);
    let schema = group.schema.to_string();
    let matcher = match compiler.compile(&Constraint::JsonSchema { schema: schema.clone() }) {
        Ok(matcher) => matcher,
        Err(error) => {
            seen.refused_schemas.insert(name, error.to_string());
            return 0;
        }
    };
    for case in &group.tests {
        let taken = accepts(&matcher, model, &case.data.to_string())
            || accepts(&matcher, model, &ordered(&case.data, &schema).to_string());
        if taken != case.valid {
            let list =
                if taken { &mut seen.accepted_although_invalid } else { &mut seen.refused_although_valid };
            list.insert(format!("{name}: {}", case.description), case.data.to_string());
        }
    }
    group.tests.len()
}

#[test]
fn the_suite_goes_as_recorded() {
    let model = std::env::var_os("PD_TEST_MODEL")
        .map_or_else(|| root().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"), PathBuf::from);
    let model = Model::open(&model).unwrap();
    let compiler = Compiler::new(&model.tokenizer, model.spec.vocab_size, &model.spec.eos_token_ids).unwrap();
    let mut seen = Record::default();
    let (mut n_schemas, mut n_cases) = (0, 0);
    let folders = [suite(), suite().join("optional/format")];
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for path in files.iter().filter(|path| path.extension().is_some_and(|e| e == "json")) {
        let groups: Vec<Group> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let folder = path.parent().unwrap().file_name().unwrap().to_string_lossy();
        let name = path.file_stem().unwrap().to_string_lossy();
        let file = if folder == "format" { format!("format/{name}") } else { name.into_owned() };
        for group in &groups {
            n_schemas += 1;
            n_cases += judge(&compiler, &model, &file, group, &mut seen);
        }
    }
    eprintln!(
        "{n_schemas} schemas, {} refused; {n_cases} instances, {} valid ones refused, {} invalid ones taken",
        seen.refused_schemas.len(),
        seen.refused_although_valid.len(),
        seen.accepted_although_invalid.len(),
    );
    if let Some(path) = std::env::var_os("PD_TEST_RECORD") {
        std::fs::write(path, serde_json::to_string_pretty(&seen).unwrap() + "\n").unwrap();
    }
    assert!(
        n_schemas > 370 && n_cases > 700,
        "{n_schemas} schemas, {n_cases} instances: the suite is not whole"
    );
    let record: Record = serde_json::from_str(include_str!("json_schema_suite.json")).unwrap();
    for (what, seen, record) in [
        ("schemas refused", seen.refused_schemas, record.refused_schemas),
        ("valid instances refused", seen.refused_although_valid, record.refused_although_valid),
        ("invalid instances accepted", seen.accepted_although_invalid, record.accepted_although_invalid),
    ] {
        let new: Vec<_> = seen.iter().filter(|(name, _)| !record.contains_key(*name)).collect();
        let gone: Vec<_> = record.keys().filter(|name| !seen.contains_key(*name)).collect();
        assert!(
            new.is_empty() && gone.is_empty(),
            "{what}: not on record {new:#?}; on record only {gone:#?}"
        );
    }
}
