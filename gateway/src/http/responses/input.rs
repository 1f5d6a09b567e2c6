//! `input`: a text, or the items of a conversation, as the messages of a chat.

use crate::http::chat::messages::tool_call;
use crate::http::error::ApiError;
use crate::http::params::{Fields, wrong_type};
use serde_json::{Map, Value, json};

/// Reads it.
///
/// # Errors
/// 400 naming the item.
pub(super) fn read(f: &Fields) -> Result<Vec<Value>, ApiError> {
    match f.value("input") {
        None => Err(ApiError::invalid("input", "`input` is required")),
        Some(Value::String(text)) => Ok(vec![json!({"role": "user", "content": text})]),
        Some(Value::Array(items)) if !items.is_empty() => {
            let mut messages = Messages::default();
            for (i, item) in items.iter().enumerate() {
                messages.add(&format!("input[{i}]"), item)?;
            }
            Ok(messages.0)
        }
        Some(Value::Array(_)) => Err(ApiError::invalid("input", "`input` is empty")),
        Some(other) => Err(wrong_type("input", "a string or a list of items", other)),
    }
}

#[derive(Default)]
struct Messages(Vec<Value>);

impl Messages {
    fn add(&mut self, param: &str, item: &Value) -> Result<(), ApiError> {
        let Value::Object(item) = item else { return Err(wrong_type(param, "an object", item)) };
        match item.get("type") {
            None => self.message(param, item),
            Some(Value::String(kind)) => match kind.as_str() {
                "message" => self.message(param, item),
                "function_call" => self.call(param, item),
                "function_call_output" => self.result(param, item),
                "reasoning" => self.thought(param, item),
                "item_reference" => Err(ApiError::unsupported(
                    param,
                    "nothing is stored here that could be referred to: send the item itself",
                )),
                other => {
                    Err(ApiError::unsupported(param, format!("items of type `{other:.40}` are not offered")))
                }
            },
            Some(other) => Err(wrong_type(&format!("{param}.type"), "a string", other)),
        }
    }

    fn message(&mut self, param: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let named = format!("{param}.role");
        let role = match item.get("role") {
            Some(Value::String(role)) => match role.as_str() {
                "developer" | "system" => "system",
                "user" => "user",
                "assistant" => "assistant",
                other => {
                    let why = format!("`{other:.40}` is not one of user, assistant, system, developer");
                    return Err(ApiError::invalid(named, why));
                }
            },
            Some(other) => return Err(wrong_type(&named, "a string", other)),
            None => return Err(ApiError::invalid(named, "a message needs a role")),
        };
        let text = content(&format!("{param}.content"), item.get("content"))?;
        match self.0.last_mut() {
            // What was thought before belongs to it.
            Some(last) if role == "assistant" && last["content"] == "" && last["tool_calls"].is_null() => {
                last["content"] = text.into();
            }
            _ => self.0.push(json!({"role": role, "content": text})),
        }
        Ok(())
    }

    fn call(&mut self, param: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let id = string(param, item, "call_id")?;
        let name = string(param, item, "name")?;
        let arguments = string(param, item, "arguments")?;
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let call = tool_call(param, &call)?;
        match self.0.last_mut().filter(|last| last["role"] == "assistant") {
            Some(last) => match last["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => last["tool_calls"] = json!([call]),
            },
            None => self.0.push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
        }
        Ok(())
    }

    fn result(&mut self, param: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let id = string(param, item, "call_id")?;
        let text = content(&format!("{param}.output"), item.get("output"))?;
        self.0.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
        Ok(())
    }

    fn thought(&mut self, param: &str, item: &Map<String, Value>) -> Result<(), ApiError> {
        let mut text = String::new();
        for name in ["content", "summary"] {
            let parts = match item.get(name) {
                None | Some(Value::Null) => continue,
                Some(Value::Array(parts)) => parts,
                Some(other) => return Err(wrong_type(&format!("{param}.{name}"), "a list of parts", other)),
            };
            // A summary is told only where the thought itself is not.
            if text.is_empty() {
                text.extend(parts.iter().filter_map(|p| p["text"].as_str()));
            }
        }
        self.0.push(json!({"role": "assistant", "content": "", "reasoning_content": text}));
        Ok(())
    }
}

fn string<'a>(param: &str, item: &'a Map<String, Value>, name: &str) -> Result<&'a str, ApiError> {
    let param = format!("{param}.{name}");
    match item.get(name) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(wrong_type(&param, "a string", other)),
        None => Err(ApiError::invalid(param, format!("`{name}` is required"))),
    }
}

fn content(param: &str, content: Option<&Value>) -> Result<String, ApiError> {
    let parts = match content {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        Some(other) => return Err(wrong_type(param, "a string or a list of parts", other)),
        None => return Err(ApiError::invalid(param, "is required")),
    };
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        let param = format!("{param}[{i}]");
        match (part["type"].as_str(), part["text"].as_str().or(part["refusal"].as_str())) {
            (Some("input_text" | "output_text" | "text" | "refusal"), Some(piece)) => text.push_str(piece),
            (Some("input_text" | "output_text" | "text" | "refusal"), None) => {
                return Err(wrong_type(&format!("{param}.text"), "a string", &part["text"]));
            }
            (Some(kind), _) => {
                let why = format!("this is a text model, it can't take `{kind:.40}` parts");
                return Err(ApiError::unsupported(param, why));
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

    fn got(input: impl Into<Value>) -> Result<Value, String> {
        match read(&fields(json!({ "input": input.into() }))) {
            Ok(messages) => Ok(messages.into()),
            Err(error) => Err(error.body()["error"]["param"].as_str().unwrap().to_owned()),
        }
    }

    #[test]
    fn items_become_messages() {
        assert_eq!(got(json!("hi")), Ok(json!([{"role": "user", "content": "hi"}])));
        let items = json!([
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"x\": 1}"},
            {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "three"}]}]);
        let call = |id: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
        let want = json!([
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "", "reasoning_content": "hm",
             "tool_calls": [call("c", json!({"x": 1})), call("d", json!({}))]},
            {"role": "tool", "tool_call_id": "c", "content": "3"}, {"role": "assistant", "content": "three"}]);
        assert_eq!(got(items), Ok(want));
    }

    #[test]
    fn bad_items_are_named() {
        for (input, name) in [
            (json!(null), "input"),
            (json!([]), "input"),
            (json!(7), "input"),
            (json!([1]), "input[0]"),
            (json!([{"role": "king", "content": "x"}]), "input[0].role"),
            (json!([{"role": "user"}]), "input[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]),
                "input[0].content[0]",
            ),
            (json!([{"type": "item_reference", "id": "x"}]), "input[0]"),
            (json!([{"type": "web_search_call"}]), "input[0]"),
            (json!([{"type": "function_call", "call_id": "c", "name": "f"}]), "input[0].arguments"),
            (
                json!([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]),
                "input[0].function.arguments",
            ),
        ] {
            assert_eq!(got(input), Err(name.to_owned()));
        }
    }
}
