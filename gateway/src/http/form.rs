//! The form an answer must have: `response_format`, and what other servers call `guided_…` or `structured_outputs`.

use super::error::ApiError;
use super::params::{Fields, wrong_type};
use super::schema;
use crate::pipeline::Shaped;
use serde_json::{Map, Value};
use shared::control::Constraint;

const FORMAT: &str = "response_format";
const STRUCTURED: &str = "structured_outputs";

/// Reads them; at most one may say something.
///
/// # Errors
/// 400 naming the parameter.
pub(super) fn read(f: &Fields) -> Result<Option<Shaped>, ApiError> {
    let mut found = Vec::new();
    found.extend(response_format(f)?);
    for (param, kind) in [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_grammar", "grammar"),
        ("guided_choice", "choice"),
    ] {
        if let Some(value) = f.value(param) {
            found.push(Shaped { constraint: guided(param, kind, value)?, param });
        }
    }
    match f.value(STRUCTURED) {
        None => {}
        Some(Value::Object(map)) => {
            for (kind, value) in map.iter().filter(|(_, v)| !v.is_null()) {
                let constraint = guided(STRUCTURED, kind, value)?;
                found.push(Shaped { constraint, param: STRUCTURED });
            }
        }
        Some(other) => return Err(wrong_type(STRUCTURED, "an object", other)),
    }
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => Err(ApiError::invalid(found[1].param, "an answer can have one form only")),
    }
}

/// The constraint of a form in OpenAI's notation, as `response_format` or, in the newer API, `text.format` has it:
/// the schema lies under `json_schema` in the one and beside the type in the other.
///
/// # Errors
/// 400 naming `param`.
pub(super) fn openai(param: &'static str, value: &Value) -> Result<Option<Shaped>, ApiError> {
    let Value::Object(map) = value else { return Err(wrong_type(param, "an object", value)) };
    let shaped = |constraint| Some(Shaped { constraint, param });
    match map.get("type") {
        Some(Value::String(kind)) => match kind.as_str() {
            "text" => Ok(None),
            "json_object" => match map.get("schema").filter(|s| !s.is_null()) {
                Some(schema) => Ok(shaped(json_schema(param, schema)?)),
                None => Ok(shaped(Constraint::JsonObject)),
            },
            "json_schema" => Ok(shaped(named_schema(param, map)?)),
            other => Err(ApiError::unsupported(
                param,
                format!("`{other:.40}` is not one of text, json_object, json_schema"),
            )),
        },
        Some(other) => Err(wrong_type(param, "an object with a `type` of text", other)),
        None => Err(ApiError::invalid(param, "a format needs a `type`")),
    }
}

fn response_format(f: &Fields) -> Result<Option<Shaped>, ApiError> {
    f.value(FORMAT).map_or(Ok(None), |value| openai(FORMAT, value))
}

fn named_schema(param: &'static str, format: &Map<String, Value>) -> Result<Constraint, ApiError> {
    let inner = match format.get("json_schema") {
        Some(Value::Object(inner)) => inner,
        Some(other) => return Err(wrong_type(param, "an object in `json_schema`", other)),
        None => format,
    };
    match inner.get("name") {
        Some(Value::String(name)) if !name.is_empty() => {}
        Some(other) => return Err(wrong_type(param, "a string in `name`", other)),
        None => return Err(ApiError::invalid(param, "a schema needs a `name`")),
    }
    if let Some(strict) = inner.get("strict").filter(|v| !v.is_null() && !v.is_boolean()) {
        return Err(wrong_type(param, "a boolean in `strict`", strict));
    }
    let schema = inner.get("schema").ok_or_else(|| ApiError::invalid(param, "`schema` is required"))?;
    json_schema(param, schema)
}

fn json_schema(param: &'static str, value: &Value) -> Result<Constraint, ApiError> {
    schema::check(value).map_err(|why| ApiError::invalid(param, why))?;
    Ok(Constraint::JsonSchema { schema: value.to_string() })
}

fn guided(param: &'static str, kind: &str, value: &Value) -> Result<Constraint, ApiError> {
    let text = || value.as_str().ok_or_else(|| wrong_type(param, "a string", value));
    match kind {
        "json" => match value {
            Value::String(text) => {
                let schema =
                    serde_json::from_str(text).map_err(|e| ApiError::invalid(param, e.to_string()))?;
                json_schema(param, &schema)
            }
            schema => json_schema(param, schema),
        },
        "json_object" if value == true => Ok(Constraint::JsonObject),
        "regex" => Ok(Constraint::Regex { pattern: text()?.to_owned() }),
        "grammar" => Ok(Constraint::Lark { grammar: text()?.to_owned() }),
        "choice" => choice(param, value),
        other => Err(ApiError::unsupported(param, format!("`{other:.40}` is not offered"))),
    }
}

fn choice(param: &'static str, value: &Value) -> Result<Constraint, ApiError> {
    let words = value.as_array().filter(|l| !l.is_empty() && l.iter().all(Value::is_string));
    let words = words.ok_or_else(|| wrong_type(param, "a list of strings", value))?;
    // A string of the grammar is written as one of JSON.
    let words: Vec<String> = words.iter().map(Value::to_string).collect();
    Ok(Constraint::Lark { grammar: format!("start: {}", words.join(" | ")) })
}

#[cfg(test)]
mod tests {
    use super::super::params::fields;
    use super::*;
    use serde_json::json;

    fn got(body: Value) -> Result<Option<Constraint>, String> {
        match read(&fields(body)) {
            Ok(shaped) => Ok(shaped.map(|s| s.constraint)),
            Err(error) => Err(error.body()["error"]["param"].as_str().unwrap().to_owned()),
        }
    }

    #[test]
    fn forms_become_constraints() {
        let schema = json!({"type": "object"});
        let is_schema = |body| {
            assert_eq!(got(body), Ok(Some(Constraint::JsonSchema { schema: schema.to_string() })));
        };
        assert_eq!(got(json!({})), Ok(None));
        assert_eq!(got(json!({"response_format": {"type": "text"}})), Ok(None));
        assert_eq!(
            got(json!({"response_format": {"type": "json_object"}})),
            Ok(Some(Constraint::JsonObject))
        );
        is_schema(json!({"response_format": {"type": "json_schema",
            "json_schema": {"name": "x", "strict": true, "schema": schema}}}));
        is_schema(json!({"guided_json": schema}));
        is_schema(json!({"guided_json": schema.to_string()}));
        is_schema(json!({"structured_outputs": {"json": schema, "regex": null}}));
        let pattern = "a+".to_owned();
        assert_eq!(got(json!({"guided_regex": "a+"})), Ok(Some(Constraint::Regex { pattern })));
        let grammar = r#"start: "a\"" | "b""#.to_owned();
        assert_eq!(got(json!({"guided_choice": ["a\"", "b"]})), Ok(Some(Constraint::Lark { grammar })));
    }

    #[test]
    fn bad_forms_are_named() {
        for (body, param) in [
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {"type": "xml"}}), "response_format"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
                "response_format",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}}}),
                "response_format",
            ),
            (json!({"guided_json": "{"}), "guided_json"),
            (json!({"guided_regex": 1}), "guided_regex"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"structured_outputs": {"magic": 1}}), "structured_outputs"),
            (json!({"response_format": {"type": "json_object"}, "guided_regex": "x"}), "guided_regex"),
        ] {
            assert_eq!(got(body), Err(param.to_owned()));
        }
    }
}
