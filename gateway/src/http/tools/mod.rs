//! Tools that a client offers the model, and what the model must do with them.

pub(super) mod grammar;
pub(super) mod reader;

use super::error::ApiError;
use super::params::{Fields, wrong_type};
use super::schema;
use crate::dialect::parser_tool;
use openai_protocol::common::Tool;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most tools of a request.
const MAX_TOOLS: usize = 512;
const MAX_NAME_CHARS: usize = 64;

/// The tools of one request.
#[derive(Debug, Clone, Default)]
pub(super) struct Tools {
    /// As templates want them: `{"type": "function", "function": {…}}`.
    pub(super) list: Vec<Value>,
    /// The same for the parser.
    pub(super) parsed: Arc<Vec<Tool>>,
    pub(super) choice: Choice,
    /// More than one call in an answer.
    pub(super) parallel: bool,
}

/// What the model must do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Choice {
    /// No call.
    #[default]
    None,
    /// As it likes.
    Auto,
    /// At least one call.
    Required,
    /// Exactly this one.
    Named(String),
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls` as the chat endpoint has them.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub(super) fn read(f: &Fields) -> Result<Self, ApiError> {
        let list = match f.value("tools") {
            None => &[][..],
            Some(Value::Array(list)) if list.len() <= MAX_TOOLS => list,
            Some(Value::Array(_)) => {
                return Err(ApiError::invalid("tools", format!("at most {MAX_TOOLS} tools")));
            }
            Some(other) => return Err(wrong_type("tools", "a list", other)),
        };
        let list = list.iter().enumerate().map(|(i, tool)| nested(i, tool)).collect::<Result<Vec<_>, _>>()?;
        Self::of(f, list)
    }

    /// The same with the tools in chat notation, checked as far as their own shape goes.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub(super) fn of(f: &Fields, list: Vec<Value>) -> Result<Self, ApiError> {
        let parallel = f.value("parallel_tool_calls").is_none() || f.boolean("parallel_tool_calls")?;
        let choice = choice(f, &list)?;
        let parsed = list.iter().filter_map(parser_tool).collect();
        Ok(Self { list, parsed: Arc::new(parsed), choice, parallel })
    }

    /// The model is told of them.
    pub(super) fn offered(&self) -> bool {
        self.choice != Choice::None
    }

    /// The tools that may be called.
    pub(super) fn callable(&self) -> impl Iterator<Item = &Tool> {
        let named = match &self.choice {
            Choice::Named(name) => Some(name.as_str()),
            _ => None,
        };
        self.parsed.iter().filter(move |tool| named.is_none_or(|name| tool.function.name == name))
    }
}

fn nested(i: usize, tool: &Value) -> Result<Value, ApiError> {
    let param = format!("tools[{i}]");
    let Value::Object(map) = tool else { return Err(wrong_type(&param, "an object", tool)) };
    check_type(&param, map)?;
    let param = format!("{param}.function");
    match map.get("function") {
        Some(Value::Object(function)) => check_function(&param, function)?,
        Some(other) => return Err(wrong_type(&param, "an object", other)),
        None => return Err(ApiError::invalid(param, "a tool needs a function")),
    }
    Ok(tool.clone())
}

/// Only functions can be called.
///
/// # Errors
/// 400 naming the parameter.
pub(super) fn check_type(param: &str, map: &Map<String, Value>) -> Result<(), ApiError> {
    let param = format!("{param}.type");
    match map.get("type") {
        Some(Value::String(kind)) if kind == "function" => Ok(()),
        Some(Value::String(kind)) => {
            Err(ApiError::unsupported(param, format!("`{kind:.40}` is not offered, only `function`")))
        }
        Some(other) => Err(wrong_type(&param, "a string", other)),
        None => Err(ApiError::invalid(param, "a tool needs a type")),
    }
}

/// Name, description and schema of a function.
///
/// # Errors
/// 400 naming the parameter.
pub(super) fn check_function(param: &str, function: &Map<String, Value>) -> Result<(), ApiError> {
    let named = |name: &str| format!("{param}.{name}");
    match function.get("name") {
        Some(Value::String(name)) if is_name(name) => {}
        Some(Value::String(_)) => {
            let why = format!("a name has 1 to {MAX_NAME_CHARS} letters, digits, `_`, `-` or `.`");
            return Err(ApiError::invalid(named("name"), why));
        }
        Some(other) => return Err(wrong_type(&named("name"), "a string", other)),
        None => return Err(ApiError::invalid(named("name"), "a function needs a name")),
    }
    let given = |name: &str| function.get(name).filter(|v| !v.is_null());
    if let Some(other) = given("description").filter(|v| !v.is_string()) {
        return Err(wrong_type(&named("description"), "a string", other));
    }
    if let Some(other) = given("strict").filter(|v| !v.is_boolean()) {
        return Err(wrong_type(&named("strict"), "a boolean", other));
    }
    match given("parameters") {
        None => Ok(()),
        Some(parameters @ Value::Object(map)) => {
            schema::check(parameters).map_err(|why| ApiError::invalid(named("parameters"), why))?;
            match map.get("type") {
                None => Ok(()),
                Some(kind) if kind == "object" => Ok(()),
                Some(_) => Err(ApiError::invalid(named("parameters"), "`schema.type` must be object")),
            }
        }
        Some(other) => Err(wrong_type(&named("parameters"), "an object", other)),
    }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_CHARS).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
}

fn choice(f: &Fields, list: &[Value]) -> Result<Choice, ApiError> {
    const PARAM: &str = "tool_choice";
    let choice = match f.value(PARAM) {
        None if list.is_empty() => return Ok(Choice::None),
        None => return Ok(Choice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "none" => return Ok(Choice::None),
            "auto" if list.is_empty() => return Ok(Choice::None),
            "auto" => Choice::Auto,
            "required" => Choice::Required,
            other => {
                let why = format!("`{other:.40}` is not one of none, auto, required");
                return Err(ApiError::invalid(PARAM, why));
            }
        },
        Some(Value::Object(map)) => {
            check_type(PARAM, map)?;
            // The newer API has the name beside the type.
            let holder = map.get("function").and_then(Value::as_object).unwrap_or(map);
            match holder.get("name") {
                Some(Value::String(name)) => Choice::Named(name.clone()),
                Some(other) => return Err(wrong_type("tool_choice.function.name", "a string", other)),
                None => {
                    return Err(ApiError::invalid("tool_choice.function.name", "which function is meant?"));
                }
            }
        }
        Some(other) => return Err(wrong_type(PARAM, "a string or an object", other)),
    };
    let known = |name: &str| list.iter().any(|tool| tool["function"]["name"] == name);
    match &choice {
        Choice::Required if list.is_empty() => Err(ApiError::invalid(PARAM, "there are no `tools`")),
        Choice::Named(name) if !known(name) => {
            Err(ApiError::invalid(PARAM, format!("there is no tool `{name:.64}`")))
        }
        _ => Ok(choice),
    }
}

/// A tool in chat notation.
pub(super) fn in_chat_notation(function: &Map<String, Value>) -> Value {
    let wanted = ["name", "description", "parameters", "strict"];
    let kept = function.iter().filter(|(key, value)| wanted.contains(&key.as_str()) && !value.is_null());
    let function: Map<String, Value> = kept.map(|(key, value)| (key.clone(), value.clone())).collect();
    json!({"type": "function", "function": function})
}

#[cfg(test)]
mod tests {
    use super::super::params::fields;
    use super::*;

    fn param(body: Value) -> String {
        Tools::read(&fields(body)).unwrap_err().body()["error"]["param"].as_str().unwrap().to_owned()
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn choices_follow_openai() {
        let choice = |body| Tools::read(&fields(body)).unwrap().choice;
        let tools = json!([tool("a"), tool("b")]);
        assert_eq!(choice(json!({})), Choice::None);
        assert_eq!(choice(json!({"tools": tools})), Choice::Auto);
        assert_eq!(choice(json!({"tools": tools, "tool_choice": "none"})), Choice::None);
        assert_eq!(choice(json!({"tools": tools, "tool_choice": "required"})), Choice::Required);
        let named = json!({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "b"}}});
        assert_eq!(choice(named.clone()), Choice::Named("b".into()));
        let tools = Tools::read(&fields(named)).unwrap();
        assert_eq!(tools.callable().map(|t| t.function.name.as_str()).collect::<Vec<_>>(), ["b"]);
    }

    #[test]
    fn bad_tools_are_named() {
        let with = |tool: Value| json!({"tools": [tool]});
        let function = |f: Value| with(json!({"type": "function", "function": f}));
        for (body, name) in [
            (json!({"tools": {}}), "tools"),
            (with(json!(1)), "tools[0]"),
            (with(json!({"type": "web_search"})), "tools[0].type"),
            (with(json!({"function": {}})), "tools[0].type"),
            (with(json!({"type": "function"})), "tools[0].function"),
            (function(json!({})), "tools[0].function.name"),
            (function(json!({"name": "a b"})), "tools[0].function.name"),
            (function(json!({"name": "a", "description": 1})), "tools[0].function.description"),
            (function(json!({"name": "a", "parameters": []})), "tools[0].function.parameters"),
            (
                function(json!({"name": "a", "parameters": {"type": "string"}})),
                "tools[0].function.parameters",
            ),
            (
                function(json!({"name": "a", "parameters": {"properties": {"x": {"type": "y"}}}})),
                "tools[0].function.parameters",
            ),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tools": [tool("a")], "tool_choice": "any"}), "tool_choice"),
            (
                json!({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}),
                "tool_choice",
            ),
            (json!({"tools": [tool("a")], "parallel_tool_calls": 1}), "parallel_tool_calls"),
        ] {
            assert_eq!(param(body), name);
        }
    }
}
