//! The conversation of a request: checked, and in the form that templates expect.

use crate::http::error::ApiError;
use crate::http::params::{Fields, wrong_type};
use serde_json::Value;

/// Roles that templates know.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Checks the messages and makes every content a string, which is what templates expect.
pub(super) fn read(f: &Fields) -> Result<Value, ApiError> {
    let list = match f.value("messages") {
        None => return Err(ApiError::invalid("messages", "`messages` is required")),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(ApiError::invalid("messages", "`messages` is empty")),
        Some(other) => return Err(wrong_type("messages", "a list", other)),
    };
    list.iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

fn message(i: usize, message: &Value) -> Result<Value, ApiError> {
    let Value::Object(message) = message else {
        return Err(wrong_type(&format!("messages[{i}]"), "an object", message));
    };
    let param = |name: &str| format!("messages[{i}].{name}");
    let role = match message.get("role") {
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role.as_str(),
        Some(Value::String(role)) => {
            return Err(ApiError::invalid(
                param("role"),
                format!("`{role}` is not one of {}", ROLES.join(", ")),
            ));
        }
        Some(other) => return Err(wrong_type(&param("role"), "a string", other)),
        None => return Err(ApiError::invalid(param("role"), "a message needs a role")),
    };
    let content = match message.get("content") {
        Some(Value::String(text)) => Value::String(text.clone()),
        Some(Value::Array(parts)) => Value::String(text_of(&param("content"), parts)?),
        None | Some(Value::Null) if role == "assistant" => Value::String(String::new()),
        None | Some(Value::Null) => {
            return Err(ApiError::invalid(param("content"), format!("a {role} message needs content")));
        }
        Some(other) => return Err(wrong_type(&param("content"), "a string or a list of parts", other)),
    };
    let mut out = message.clone();
    // `developer` is the newer name of the same role, which templates of open models do not know.
    out.insert("role".to_owned(), Value::from(if role == "developer" { "system" } else { role }));
    out.insert("content".to_owned(), content);
    Ok(Value::Object(out))
}

fn text_of(param: &str, parts: &[Value]) -> Result<String, ApiError> {
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        let param = format!("{param}[{i}]");
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text"), Some(piece)) => text.push_str(piece),
            (Some("text"), None) => {
                return Err(wrong_type(&format!("{param}.text"), "a string", &part["text"]));
            }
            (Some(kind), _) => {
                return Err(ApiError::unsupported(
                    param,
                    format!("this is a text model, it can't take `{kind}` parts"),
                ));
            }
            (None, _) => return Err(ApiError::invalid(param, "a part needs a type")),
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::params::fields;
    use serde_json::json;

    fn param(list: &Value) -> Option<String> {
        read(&fields(json!({ "messages": list })))
            .err()
            .and_then(|e| Some(e.body()["error"]["param"].as_str()?.to_owned()))
    }

    #[test]
    fn parts_become_text() {
        let f = fields(json!({"messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "name": "x"}]}));
        let got = read(&f).unwrap();
        assert_eq!(
            got,
            json!([{"role": "system", "content": "ab"}, {"role": "assistant", "content": "", "name": "x"}])
        );
    }

    #[test]
    fn bad_messages_are_named() {
        for (list, name) in [
            (json!([]), "messages"),
            (json!("x"), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "king", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
                "messages[0].content[0]",
            ),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        ] {
            assert_eq!(param(&list).as_deref(), Some(name));
        }
    }
}
