//! Schemas of request bodies: what passes them is not refused for its shape.

use crate::http::sampling::MAX_BIASES;
use serde_json::{Map, Value, json};

/// `/v1/chat/completions`
pub(super) fn chat(model: &str, vocab_size: usize) -> Value {
    let mut fields = shared(model);
    extend(&mut fields, classic(vocab_size));
    extend(
        &mut fields,
        json!({"messages": messages(), "max_tokens": tokens(1), "max_completion_tokens": tokens(1),
            "logprobs": {"type": ["boolean", "null"]},
            "tools": {"type": "array", "maxItems": 512, "items": tool()},
            "tool_choice": {"anyOf": [{"enum": ["none", "auto"]}, {"type": "object",
                "required": ["type", "function"], "properties": {"type": {"const": "function"},
                    "function": {"type": "object", "required": ["name"], "properties": {"name": name()}}}}]},
            "parallel_tool_calls": {"type": "boolean"},
            "reasoning_effort": {"type": ["string", "null"]}, "response_format": format()}),
    );
    options_need_a_stream(object(&["messages"], fields))
}

/// `/v1/completions`
pub(super) fn completion(model: &str, vocab_size: usize) -> Value {
    let mut fields = shared(model);
    extend(&mut fields, classic(vocab_size));
    let text = json!({"type": "string", "minLength": 1});
    let ids = json!({"type": "array", "minItems": 1, "items": token_id(vocab_size)});
    extend(
        &mut fields,
        json!({"prompt": {"anyOf": [text, ids, {"type": "array", "minItems": 1, "maxItems": 8, "items": text},
                {"type": "array", "minItems": 1, "maxItems": 8, "items": ids}]},
            "max_tokens": tokens(1), "echo": {"type": ["boolean", "null"]},
            "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20}, "response_format": format()}),
    );
    options_need_a_stream(object(&["prompt"], fields))
}

/// `/v1/responses`
pub(super) fn response(model: &str) -> Value {
    let mut fields = shared(model);
    fields.insert("n".to_owned(), json!({"enum": [1, null]}));
    let part = json!({"type": "object", "required": ["type", "text"],
        "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}}});
    let message = json!({"type": "object", "required": ["role", "content"],
        "properties": {"type": {"const": "message"}, "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}}});
    let call = json!({"type": "object", "required": ["type", "call_id", "name", "arguments"],
        "properties": {"type": {"const": "function_call"}, "call_id": {"type": "string"}, "name": name(),
            "arguments": {"type": "string", "const": "{}"}}});
    let output = json!({"type": "object", "required": ["type", "call_id", "output"],
        "properties": {"type": {"const": "function_call_output"}, "call_id": {"type": "string"},
            "output": {"type": "string"}}});
    let mut tool = tool()["properties"]["function"].clone();
    tool["required"] = json!(["type", "name"]);
    tool["properties"]["type"] = json!({"const": "function"});
    extend(
        &mut fields,
        json!({"input": {"anyOf": [{"type": "string"},
                {"type": "array", "minItems": 1, "items": {"anyOf": [message, call, output]}}]},
            "instructions": {"type": ["string", "null"]}, "max_output_tokens": tokens(1),
            "tools": {"type": "array", "items": tool}, "tool_choice": {"enum": ["none", "auto"]},
            "parallel_tool_calls": {"type": "boolean"}, "store": {"type": ["boolean", "null"]},
            "reasoning": {"type": ["object", "null"], "properties": {"effort": {"type": ["string", "null"]}}}}),
    );
    object(&["input"], fields)
}

/// `/tokenize`
pub(super) fn tokenize(model: &str) -> Value {
    let common = json!({"model": {"enum": [model, null]}, "add_special_tokens": {"type": "boolean"},
        "return_token_strs": {"type": ["boolean", "null"]}});
    let with = |key: &str, schema: Value| {
        let mut fields = common.as_object().cloned().unwrap_or_default();
        fields.insert(key.to_owned(), schema);
        let other = if key == "prompt" { "messages" } else { "prompt" };
        fields.insert(other.to_owned(), json!({"type": "null"}));
        object(&[key], fields)
    };
    json!({"anyOf": [with("prompt", json!({"type": "string"})), with("messages", messages())]})
}

/// `/detokenize`
pub(super) fn detokenize(model: &str, vocab_size: usize) -> Value {
    json!({"type": "object", "required": ["tokens"],
        "properties": {"model": {"enum": [model, null]}, "tokens": {"type": "array", "items": token_id(vocab_size)}}})
}

fn shared(model: &str) -> Map<String, Value> {
    let number =
        |least: f64, most: f64| json!({"type": ["number", "null"], "minimum": least, "maximum": most});
    let stop = json!({"type": "string", "minLength": 1, "maxLength": 256});
    let fields = json!({
        "model": {"enum": [model, null]},
        "stream": {"type": ["boolean", "null"]},
        "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 16},
        "temperature": number(0.0, 2.0), "top_p": number(0.0, 1.0), "min_p": number(0.0, 1.0),
        "top_k": {"type": ["integer", "null"], "minimum": -1, "maximum": u32::MAX},
        "presence_penalty": number(-2.0, 2.0), "frequency_penalty": number(-2.0, 2.0),
        "repetition_penalty": number(0.01, 10.0),
        "seed": {"type": ["integer", "null"], "minimum": i64::MIN, "maximum": i64::MAX},
        "stop": {"anyOf": [{"type": "null"}, stop, {"type": "array", "maxItems": 4, "items": stop}]},
        "user": {"type": ["string", "null"]},
        "metadata": {"type": ["object", "null"], "maxProperties": 16, "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512}}});
    fields.as_object().cloned().unwrap_or_default()
}

/// What chat and text completions have and responses have not.
fn classic(vocab_size: usize) -> Value {
    json!({"logit_bias": {"type": "object", "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": format!("^({})$", below(vocab_size))},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
        "stream_options": {"type": "object", "properties": {"include_usage": {"type": ["boolean", "null"]}}}})
}

fn options_need_a_stream(mut body: Value) -> Value {
    body["if"] =
        json!({"required": ["stream_options"], "properties": {"stream_options": {"type": "object"}}});
    body["then"] = json!({"required": ["stream"], "properties": {"stream": {"const": true}}});
    body
}

/// A pattern of the decimal numbers below `limit`, which is at least 1, without leading zeros.
fn below(limit: usize) -> String {
    let last = limit.saturating_sub(1).to_string();
    let mut patterns = vec![last.clone()];
    for (i, digit) in last.bytes().enumerate() {
        let least = if i == 0 && last.len() > 1 { b'1' } else { b'0' };
        if digit > least {
            let (head, rest) = (&last[..i], last.len() - 1 - i);
            patterns.push(format!("{head}[{}-{}][0-9]{{{rest}}}", char::from(least), char::from(digit - 1)));
        }
    }
    if last.len() > 1 {
        patterns.push("[0-9]".to_owned());
    }
    if last.len() > 2 {
        patterns.push(format!("[1-9][0-9]{{1,{}}}", last.len() - 2));
    }
    patterns.join("|")
}

fn messages() -> Value {
    let part = json!({"type": "object", "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}}});
    let content = json!({"anyOf": [{"type": "string"}, {"type": "array", "items": part}]});
    let plain = json!({"type": "object", "required": ["role", "content"],
        "properties": {"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": content,
            "name": {"type": ["string", "null"]}, "tool_calls": {"type": "null"}, "tool_call_id": {"type": ["string", "null"]},
            "reasoning": {"type": ["string", "null"]}, "reasoning_content": {"type": ["string", "null"]}}});
    let result = json!({"type": "object", "required": ["role", "content", "tool_call_id"],
        "properties": {"role": {"const": "tool"}, "content": content, "tool_call_id": {"type": "string"},
            "name": {"type": ["string", "null"]}, "tool_calls": {"type": "null"},
            "reasoning": {"type": ["string", "null"]}, "reasoning_content": {"type": ["string", "null"]}}});
    json!({"type": "array", "minItems": 1, "items": {"anyOf": [plain, result]}})
}

fn tool() -> Value {
    json!({"type": "object", "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": {"type": "object", "required": ["name"],
            "properties": {"name": name(), "description": {"type": ["string", "null"]},
                "parameters": {"type": "object", "maxProperties": 1, "properties": {"type": {"const": "object"}},
                    "additionalProperties": false},
                "strict": {"type": ["boolean", "null"]}}}}})
}

fn format() -> Value {
    json!({"anyOf": [{"type": "null"}, {"type": "object", "required": ["type"],
        "properties": {"type": {"enum": ["text", "json_object"]}}}]})
}

fn name() -> Value {
    json!({"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"})
}

fn tokens(least: u32) -> Value {
    json!({"type": ["integer", "null"], "minimum": least, "maximum": u32::MAX})
}

fn token_id(vocab_size: usize) -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": vocab_size.saturating_sub(1)})
}

/// A body. A null is as good as no field, unless the field is required.
fn object(required: &[&str], mut fields: Map<String, Value>) -> Value {
    for (name, schema) in &mut fields {
        if !required.contains(&name.as_str()) {
            *schema = nullable(schema.take());
        }
    }
    json!({"type": "object", "required": required, "properties": Value::Object(fields)})
}

fn nullable(schema: Value) -> Value {
    match schema.get("type") {
        Some(Value::String(kind)) if kind == "null" => schema,
        Some(Value::String(kind)) if schema.get("enum").is_none() && schema.get("const").is_none() => {
            let kinds = json!([kind, "null"]);
            let mut schema = schema;
            schema["type"] = kinds;
            schema
        }
        Some(Value::Array(kinds)) if kinds.contains(&"null".into()) => schema,
        _ => json!({"anyOf": [schema, {"type": "null"}]}),
    }
}

fn extend(fields: &mut Map<String, Value>, more: Value) {
    if let Value::Object(more) = more {
        fields.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_has_the_numbers_below_a_limit_and_no_others() {
        for limit in [1, 9, 10, 11, 90, 100, 101, 110, 999, 1000, 1234, 2048] {
            let pattern = regex::Regex::new(&format!("^({})$", below(limit))).unwrap();
            for n in 0..3000 {
                assert_eq!(pattern.is_match(&n.to_string()), n < limit, "{n} below {limit}: {pattern}");
            }
            assert!(!pattern.is_match("") && !pattern.is_match("01") && !pattern.is_match("-1"));
        }
    }
}
