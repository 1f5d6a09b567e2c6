//! Whether a client's JSON schema is one at all, before anyone relies on it. What a decoder can follow of it, it says
//! itself.

use serde_json::Value;

const MAX_DEPTH: usize = 64;
const TYPES: [&str; 7] = ["null", "boolean", "object", "array", "number", "string", "integer"];

/// Checks the shape of the keywords that have one.
///
/// # Errors
/// Where it is wrong, and what is expected there.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    at("schema", schema, 0)
}

fn at(path: &str, schema: &Value, depth: usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!("`{path:.200}` is nested deeper than {MAX_DEPTH} levels"));
    }
    let map = match schema {
        Value::Bool(_) => return Ok(()),
        Value::Object(map) => map,
        _ => return Err(format!("`{path}` must be an object or a boolean")),
    };
    for (key, value) in map {
        let path = format!("{path}.{key}");
        let wrong = |wanted: &str| Err(format!("`{path}` must be {wanted}"));
        match key.as_str() {
            "type" => match value {
                Value::String(name) if TYPES.contains(&name.as_str()) => {}
                Value::Array(names)
                    if names.iter().all(|n| n.as_str().is_some_and(|n| TYPES.contains(&n))) => {}
                _ => return wrong(&format!("one of {}, or a list of them", TYPES.join(", "))),
            },
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas" => {
                let Some(map) = value.as_object() else { return wrong("an object of schemas") };
                map.iter().try_for_each(|(name, s)| at(&format!("{path}.{name}"), s, depth + 1))?;
            }
            "anyOf" | "oneOf" | "allOf" | "prefixItems" => {
                let Some(list) = value.as_array().filter(|l| !l.is_empty()) else {
                    return wrong("a list of schemas");
                };
                list.iter().enumerate().try_for_each(|(i, s)| at(&format!("{path}[{i}]"), s, depth + 1))?;
            }
            "items" if value.is_array() => {
                let list = value.as_array().map_or(&[][..], Vec::as_slice);
                list.iter().enumerate().try_for_each(|(i, s)| at(&format!("{path}[{i}]"), s, depth + 1))?;
            }
            "items" | "additionalProperties" | "additionalItems" | "not" | "contains" | "propertyNames"
            | "if" | "then" | "else" => at(&path, value, depth + 1)?,
            "required" if !value.as_array().is_some_and(|l| l.iter().all(Value::is_string)) => {
                return wrong("a list of strings");
            }
            "enum" if value.as_array().is_none_or(Vec::is_empty) => return wrong("a list of values"),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf"
                // Draft 4 had booleans for two of them.
                if !value.is_number() && !value.is_boolean() =>
            {
                return wrong("a number");
            }
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties" | "maxProperties"
                if value.as_f64().is_none_or(|n| n < 0.0 || n.fract() != 0.0) =>
            {
                return wrong("a count");
            }
            "pattern" | "$ref" | "format" | "description" | "title" if !value.is_string() => {
                return wrong("a string");
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn schemas_pass_and_others_are_told_where() {
        let good = json!({"type": "object", "properties": {"type": {"type": ["string", "null"]}, "a": true},
            "required": ["a"], "$defs": {"x": {"enum": [1, "b"]}}, "anyOf": [{"minLength": 1}], "vendor": [1]});
        assert_eq!(check(&good), Ok(()));
        for (bad, place) in [
            (json!([]), "schema"),
            (json!({"type": "objekt"}), "schema.type"),
            (json!({"properties": [1]}), "schema.properties"),
            (json!({"properties": {"x": {"type": 7}}}), "schema.properties.x.type"),
            (json!({"required": "x"}), "schema.required"),
            (json!({"anyOf": []}), "schema.anyOf"),
            (json!({"items": 5}), "schema.items"),
            (json!({"allOf": [1]}), "schema.allOf[0]"),
            (json!({"enum": []}), "schema.enum"),
            (json!({"minLength": -1}), "schema.minLength"),
        ] {
            assert!(check(&bad).unwrap_err().contains(&format!("`{place}`")), "{bad}");
        }
        let deep = (0..100).fold(json!({}), |inner, _| json!({"not": inner}));
        assert!(check(&deep).unwrap_err().contains("deeper"));
    }
}
