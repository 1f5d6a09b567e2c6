//! The conversation of a request: checked, and in the form that templates expect.

use crate::http::error::ApiError;
use crate::http::params::{Fields, wrong_type};
use crate::http::tools;
use serde_json::{Map, Value};

/// Roles that templates know.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Checks the messages and makes every content a string, which is what templates expect.
pub(in crate::http) fn read(f: &Fields) -> Result<Value, ApiError> {
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
    match message.get("tool_call_id") {
        Some(Value::String(_)) => {}
        None | Some(Value::Null) if role != "tool" => {}
        None | Some(Value::Null) => {
            return Err(ApiError::invalid(
                param("tool_call_id"),
                "a tool message says which call it answers",
            ));
        }
        Some(other) => return Err(wrong_type(&param("tool_call_id"), "a string", other)),
    }
    match message.get("tool_calls") {
        None => {}
        // Templates ask whether it is there.
        Some(Value::Null) => {
            out.remove("tool_calls");
        }
        Some(Value::Array(calls)) if calls.is_empty() => {
            out.remove("tool_calls");
        }
        Some(Value::Array(_)) if role != "assistant" => {
            return Err(ApiError::invalid(param("tool_calls"), "only an assistant calls tools"));
        }
        Some(Value::Array(calls)) => {
            let param = param("tool_calls");
            let calls = calls.iter().enumerate().map(|(j, call)| tool_call(&format!("{param}[{j}]"), call));
            out.insert("tool_calls".to_owned(), calls.collect::<Result<Vec<_>, _>>()?.into());
        }
        Some(other) => return Err(wrong_type(&param("tool_calls"), "a list", other)),
    }
    for name in ["name", "reasoning_content", "reasoning"] {
        match message.get(name) {
            None | Some(Value::Null | Value::String(_)) => {}
            Some(other) => return Err(wrong_type(&param(name), "a string", other)),
        }
    }
    // Templates know the thoughts of earlier turns by one name only.
    if !out.contains_key("reasoning_content")
        && let Some(thoughts @ Value::String(_)) = message.get("reasoning")
    {
        out.insert("reasoning_content".to_owned(), thoughts.clone());
    }
    Ok(Value::Object(out))
}

/// A call of an earlier turn, its arguments as the object that templates want.
///
/// # Errors
/// 400 naming the part that is wrong.
pub(in crate::http) fn tool_call(param: &str, call: &Value) -> Result<Value, ApiError> {
    let Value::Object(map) = call else { return Err(wrong_type(param, "an object", call)) };
    if map.contains_key("type") {
        tools::check_type(param, map)?;
    }
    if let Some(other) = map.get("id").filter(|id| !id.is_string()) {
        return Err(wrong_type(&format!("{param}.id"), "a string", other));
    }
    let param = format!("{param}.function");
    let function = match map.get("function") {
        Some(Value::Object(function)) => function,
        Some(other) => return Err(wrong_type(&param, "an object", other)),
        None => return Err(ApiError::invalid(param, "a call names a function")),
    };
    match function.get("name") {
        Some(Value::String(_)) => {}
        Some(other) => return Err(wrong_type(&format!("{param}.name"), "a string", other)),
        None => return Err(ApiError::invalid(format!("{param}.name"), "a call names a function")),
    }
    let named = format!("{param}.arguments");
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => Value::Object(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|e| ApiError::invalid(&*named, format!("the arguments are not JSON: {e}")))?,
        Some(object @ Value::Object(_)) => object.clone(),
        Some(other) => return Err(wrong_type(&named, "a string of JSON", other)),
    };
    if !arguments.is_object() {
        return Err(wrong_type(&named, "a string with a JSON object", &arguments));
    }
    let mut call = map.clone();
    call.entry("type").or_insert_with(|| "function".into());
    let mut function = function.clone();
    function.insert("arguments".to_owned(), arguments);
    call.insert("function".to_owned(), Value::Object(function));
    Ok(Value::Object(call))
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
    fn arguments_of_calls_become_objects() {
        let call = |arguments: Value| json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let f = fields(json!({"messages": [
            {"role": "assistant", "content": null, "tool_calls": [call(json!("{\"a\": 1}")), call(json!(""))]},
            {"role": "tool", "tool_call_id": "c", "content": "3"}]}));
        let got = read(&f).unwrap();
        assert_eq!(got[0]["tool_calls"], json!([call(json!({"a": 1})), call(json!({}))]));
        assert_eq!((&got[0]["content"], &got[1]["tool_call_id"]), (&json!(""), &json!("c")));
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
            (json!([{"role": "tool", "content": "x"}]), "messages[0].tool_call_id"),
            (json!([{"role": "user", "content": "x", "tool_calls": [{}]}]), "messages[0].tool_calls"),
            (json!([{"role": "assistant", "tool_calls": [1]}]), "messages[0].tool_calls[0]"),
            (
                json!([{"role": "assistant", "tool_calls": [{"id": "a"}]}]),
                "messages[0].tool_calls[0].function",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (json!([{"role": "assistant", "content": "x", "reasoning": 1}]), "messages[0].reasoning"),
        ] {
            assert_eq!(param(&list).as_deref(), Some(name));
        }
    }
}
