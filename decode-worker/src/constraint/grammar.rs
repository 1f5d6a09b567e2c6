//! From a constraint to the grammar that llguidance compiles, with limits on what is looked at.

use super::ConstraintError;
use super::formats::replace_formats;
use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};
use shared::control::Constraint;

/// Most bytes of a schema: the tools of a large agent fit ten times.
const MAX_SCHEMA_BYTES: usize = 512 << 10;
/// Most bytes of a grammar.
const MAX_GRAMMAR_BYTES: usize = 128 << 10;
/// Most bytes of a regular expression.
const MAX_PATTERN_BYTES: usize = 16 << 10;
/// Most brackets inside each other: the parsers below are recursive.
const MAX_DEPTH: usize = 100;

/// Largest number of repetitions in an expression: more cannot be followed in the time between two tokens.
const MAX_REPETITIONS: u64 = 20_000;

/// White space of a JSON answer: what layouts need, one line break with its indentation or a gap within a line. Small
/// models otherwise fill their budget with empty lines.
const WHITE_SPACE: &str = r"(\r?\n(\x20{0,32}|\t{0,8})|\x20{1,8}|\t{1,2})";

/// What errors call a constraint.
pub(super) fn kind(constraint: &Constraint) -> &'static str {
    match constraint {
        Constraint::JsonObject => "JSON object",
        Constraint::JsonSchema { .. } => "JSON schema",
        Constraint::Lark { .. } => "grammar",
        Constraint::Regex { .. } => "regular expression",
    }
}

/// The grammar of a constraint.
pub(super) fn grammar(constraint: &Constraint) -> Result<TopLevelGrammar, ConstraintError> {
    let kind = kind(constraint);
    match constraint {
        Constraint::JsonObject => Ok(of_schema(json!({"type": "object"}))),
        Constraint::JsonSchema { schema } => {
            check(kind, schema, MAX_SCHEMA_BYTES)?;
            let invalid = |e: serde_json::Error| ConstraintError::Invalid { kind, message: e.to_string() };
            Ok(of_schema(serde_json::from_str(schema).map_err(invalid)?))
        }
        Constraint::Lark { grammar } => {
            check(kind, grammar, MAX_GRAMMAR_BYTES)?;
            Ok(TopLevelGrammar::from_lark(grammar.clone()))
        }
        Constraint::Regex { pattern } => {
            check(kind, pattern, MAX_PATTERN_BYTES)?;
            Ok(TopLevelGrammar::from_regex(pattern))
        }
    }
}

fn of_schema(schema: Value) -> TopLevelGrammar {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(true) => Map::new(),
        // Anything else is not a schema, and the compiler says so.
        other => return TopLevelGrammar::from_json_schema(other),
    };
    replace_formats(&mut schema);
    // The compiler's own options are ours to set, whatever the client's schema says.
    schema.insert("x-guidance".to_owned(), json!({"whitespace_pattern": WHITE_SPACE}));
    TopLevelGrammar::from_json_schema(Value::Object(schema))
}

fn check(kind: &'static str, text: &str, limit: usize) -> Result<(), ConstraintError> {
    if text.len() > limit {
        return Err(ConstraintError::TooLarge { kind, bytes: text.len(), limit });
    }
    if depth(text) > MAX_DEPTH {
        return Err(ConstraintError::TooDeep { kind, limit: MAX_DEPTH });
    }
    if repetitions(text) > MAX_REPETITIONS {
        let message = format!("more than {MAX_REPETITIONS} repetitions");
        return Err(ConstraintError::Invalid { kind, message });
    }
    Ok(())
}

/// Most brackets that are open at once, quotes or not: an upper bound, and only absurd texts come near the limit.
fn depth(text: &str) -> usize {
    let (mut open, mut most) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => {
                open += 1;
                most = most.max(open);
            }
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    most
}

/// Largest number in anything that looks like `{12}`, `{12,}` or `{1,12}`; JSON itself has no such thing.
fn repetitions(text: &str) -> u64 {
    let counts = |part: &str| {
        let (inside, _) = part.split_once('}')?;
        let numbers = inside.split(',').filter(|number| !number.is_empty());
        // What has too many digits is too large as well.
        let parse = |number: &str| {
            number.bytes().all(|b| b.is_ascii_digit()).then(|| number.parse().unwrap_or(u64::MAX))
        };
        numbers.map(parse).collect::<Option<Vec<u64>>>()?.into_iter().max()
    };
    text.split('{').skip(1).filter_map(counts).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_and_repetitions_are_counted() {
        assert_eq!(depth("([{}])()"), 3);
        assert_eq!(depth("))((("), 3);
        for (text, n) in [
            ("a{3}b{2,7}c{9,}", 9),
            ("{\"a\": {\"b\": 1}}", 0),
            ("x{99999999999999999999}", u64::MAX),
            ("x{1,2", 0),
            ("{}{,5}", 5),
        ] {
            assert_eq!(repetitions(text), n, "{text}");
        }
    }
}
