//! Dates and times that every validator takes.
//!
//! llguidance's own expressions for these formats know neither leap years nor when there is a leap second.

use serde_json::{Map, Value};

/// Keywords whose value is a schema by name.
const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];
/// Keywords whose value is data.
const DATA: [&str; 5] = ["const", "enum", "default", "example", "examples"];

const DATE: &str = "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
    |02-(?:0[1-9]|1[0-9]|2[0-8]))\
    |(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)";
const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";

/// Replaces formats by expressions, in this schema and all inside it.
pub(super) fn replace_formats(schema: &mut Map<String, Value>) {
    for (keyword, value) in schema.iter_mut() {
        match value {
            Value::Object(schemas) if NAMED.contains(&keyword.as_str()) => {
                schemas.values_mut().filter_map(Value::as_object_mut).for_each(replace_formats);
            }
            _ if DATA.contains(&keyword.as_str()) => {}
            Value::Object(schema) => replace_formats(schema),
            Value::Array(schemas) => {
                schemas.iter_mut().filter_map(Value::as_object_mut).for_each(replace_formats);
            }
            _ => {}
        }
    }
    // Where there is a pattern besides, the library joins the two.
    if !schema.contains_key("pattern")
        && let Some(pattern) = schema.get("format").and_then(Value::as_str).and_then(pattern)
    {
        schema.remove("format");
        schema.insert("pattern".to_owned(), pattern.into());
    }
}

fn pattern(format: &str) -> Option<String> {
    match format {
        "date" => Some(format!("^{DATE}$")),
        "time" => Some(format!("^{TIME}$")),
        "date-time" => Some(format!("^{DATE}[tT]{TIME}$")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_schemas_are_changed() {
        let format = json!({"format": "date"});
        let mut schema = json!({
            "properties": {"format": {"format": "time"}, "const": {"items": format}, "p": {"format": "date", "pattern": "1"}},
            "const": format, "anyOf": [format, {"format": "email"}],
        });
        replace_formats(schema.as_object_mut().unwrap());
        let date = json!({"pattern": pattern("date")});
        assert_eq!(
            schema,
            json!({
                "properties": {"format": {"pattern": pattern("time")}, "const": {"items": date}, "p": {"format": "date", "pattern": "1"}},
                "const": format, "anyOf": [date, {"format": "email"}],
            })
        );
    }
}
