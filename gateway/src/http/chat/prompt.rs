//! From a conversation to the text of a prompt, also where the model's template knows nothing of tools.

use crate::http::error::ApiError;
use crate::model::TextModel;
use serde_json::{Map, Value, json};
use shared::template::{ChatTemplate, TemplateError};
use std::fmt::Write as _;

/// Renders checked messages; `tools` in chat notation.
///
/// # Errors
/// 400 with the template's reason, or when the model has no template.
pub(in crate::http) fn render(
    model: &TextModel,
    messages: &Value,
    tools: &[Value],
    generation_prompt: bool,
    extra: &Map<String, Value>,
) -> Result<String, ApiError> {
    let template = model.template.as_ref().ok_or_else(|| {
        ApiError::unsupported("messages", "this model has no chat template; use /v1/completions")
    })?;
    let rendered = if model.dialect.template_knows_tools {
        let tools = (!tools.is_empty()).then(|| Value::Array(tools.to_vec()));
        with_either_arguments(template, messages, tools.as_ref(), generation_prompt, extra)
    } else {
        template.render(&spelled_out(messages, tools), None, generation_prompt, extra)
    };
    rendered.map_err(|e| ApiError::invalid("messages", format!("the chat template refused: {e}")))
}

/// Most templates want a call's arguments as an object; some join them to a text, which takes a string.
fn with_either_arguments(
    template: &ChatTemplate,
    messages: &Value,
    tools: Option<&Value>,
    generation_prompt: bool,
    extra: &Map<String, Value>,
) -> Result<String, TemplateError> {
    match template.render(messages, tools, generation_prompt, extra) {
        Err(TemplateError::Render(_)) if has_calls(messages) => {
            template.render(&with_text_arguments(messages), tools, generation_prompt, extra)
        }
        rendered => rendered,
    }
}

fn has_calls(messages: &Value) -> bool {
    messages.as_array().is_some_and(|list| list.iter().any(|m| m.get("tool_calls").is_some()))
}

fn with_text_arguments(messages: &Value) -> Value {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().into_iter().flatten() {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments") {
                *arguments = arguments.to_string().into();
            }
        }
    }
    messages
}

/// Writes tools, calls and their results into the messages' text, in the format that the plain parser reads.
fn spelled_out(messages: &Value, tools: &[Value]) -> Value {
    let mut out: Vec<Value> = Vec::new();
    for message in messages.as_array().into_iter().flatten() {
        let content = message["content"].as_str().unwrap_or_default();
        if message["role"] == "tool" {
            let result = format!("<tool_response>\n{content}\n</tool_response>");
            match out.last_mut() {
                // Results of parallel calls are one turn.
                Some(last) if last["tool_results"] == true => {
                    let joined = format!("{}\n{result}", last["content"].as_str().unwrap_or_default());
                    last["content"] = joined.into();
                }
                _ => out.push(json!({"role": "user", "content": result, "tool_results": true})),
            }
            continue;
        }
        let mut message = message.clone();
        if let Some(calls) = message.as_object_mut().and_then(|m| m.remove("tool_calls")) {
            let mut text = content.to_owned();
            for call in calls.as_array().into_iter().flatten() {
                let call =
                    json!({"name": call["function"]["name"], "arguments": call["function"]["arguments"]});
                let gap = if text.is_empty() { "" } else { "\n" };
                let _ = write!(text, "{gap}<tool_call>\n{call}\n</tool_call>");
            }
            message["content"] = text.into();
        }
        out.push(message);
    }
    if !tools.is_empty() {
        tell_of_tools(&mut out, tools);
    }
    out.into()
}

fn tell_of_tools(messages: &mut Vec<Value>, tools: &[Value]) {
    let mut text = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\
         You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
        .to_owned();
    for tool in tools {
        let _ = write!(text, "\n{tool}");
    }
    text.push_str(
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within \
         <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": \
         <args-json-object>}\n</tool_call>",
    );
    match messages.first_mut() {
        Some(first) if first["role"] == "system" => {
            let joined = format!("{}\n\n{text}", first["content"].as_str().unwrap_or_default());
            first["content"] = joined.into();
        }
        _ => messages.insert(0, json!({"role": "system", "content": text})),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_without_tools_is_told_in_text() {
        let call = |a: u32| json!({"id": "c", "function": {"name": "f", "arguments": {"a": a}}});
        let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call(1), call(2)]},
            {"role": "tool", "tool_call_id": "c", "content": "3"}, {"role": "tool", "tool_call_id": "c", "content": "4"}]);
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let got = spelled_out(&messages, &[tool]);
        let system = got[0]["content"].as_str().unwrap();
        assert!(system.starts_with("Be brief.\n\n# Tools") && system.contains(r#""function":{"name":"f"}"#));
        assert_eq!(
            got[2]["content"],
            "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>\n\
             <tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":2}}\n</tool_call>"
        );
        assert_eq!((got.as_array().unwrap().len(), &got[3]["role"]), (4, &json!("user")));
        assert!(got[3]["content"].as_str().unwrap().matches("<tool_response>").count() == 2);
        assert_eq!(spelled_out(&json!([{"role": "user", "content": "x"}]), &[])[0]["content"], "x");
    }

    #[test]
    fn templates_that_join_arguments_get_strings() {
        let template = |body: &str| ChatTemplate::from_text(body, Map::new()).unwrap();
        let messages = json!([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]);
        let render =
            |t: &str| with_either_arguments(&template(t), &messages, None, false, &Map::new()).unwrap();
        let each = |e: &str| format!("{{% for c in messages[0].tool_calls %}}{{{{ {e} }}}}{{% endfor %}}");
        assert_eq!(render(&each("c.function.arguments|tojson")), r#"{"a": 1}"#);
        assert_eq!(render(&each("c.function.name + c.function.arguments")), r#"f{"a":1}"#);
    }
}
