//! `metadata`: names that a client gives its requests. It is checked and not kept: nothing is stored here.

use super::error::ApiError;
use super::params::{Fields, wrong_type};
use serde_json::{Map, Value};

const MAX_PAIRS: usize = 16;
const MAX_KEY_CHARS: usize = 64;
const MAX_VALUE_CHARS: usize = 512;

/// At most 16 pairs of short strings.
///
/// # Errors
/// 400 naming the pair.
pub(super) fn check(f: &Fields) -> Result<Option<&Map<String, Value>>, ApiError> {
    let map = match f.value("metadata") {
        None => return Ok(None),
        Some(Value::Object(map)) if map.len() <= MAX_PAIRS => map,
        Some(Value::Object(_)) => {
            return Err(ApiError::invalid("metadata", format!("at most {MAX_PAIRS} pairs")));
        }
        Some(other) => return Err(wrong_type("metadata", "an object", other)),
    };
    for (key, value) in map {
        let param = format!("metadata.{key:.64}");
        if key.chars().count() > MAX_KEY_CHARS {
            return Err(ApiError::invalid(param, format!("a key has at most {MAX_KEY_CHARS} characters")));
        }
        match value.as_str() {
            Some(text) if text.chars().count() <= MAX_VALUE_CHARS => {}
            Some(_) => {
                let why = format!("a value has at most {MAX_VALUE_CHARS} characters");
                return Err(ApiError::invalid(param, why));
            }
            None => return Err(wrong_type(&param, "a string", value)),
        }
    }
    Ok(Some(map))
}
