//! Grammars (llguidance's Lark) of answers that must hold calls, thoughts before a form, or either of both.

use super::{Choice, Tools};
use crate::dialect::Dialect;
use crate::pipeline::Shaped;
use openai_protocol::common::Tool;
use serde_json::{Value, json};
use shared::control::Constraint;
use std::fmt::Write as _;

/// How calls are written when a grammar forces them: in the model's own format where that is JSON between marks of
/// ordinary text, else as a list that the plain parser reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Framing {
    open: &'static str,
    call_open: &'static str,
    arguments: &'static str,
    call_close: &'static str,
    separator: &'static str,
    close: &'static str,
}

const HERMES: Framing = Framing {
    open: "",
    call_open: "<tool_call>\n",
    arguments: "arguments",
    call_close: "\n</tool_call>",
    separator: "\n",
    close: "",
};
const LLAMA: Framing =
    Framing { open: "", call_open: "", arguments: "parameters", call_close: "", separator: ";", close: "" };
const JSON: Framing = Framing {
    open: "[",
    call_open: "",
    arguments: "parameters",
    call_close: "",
    separator: ", ",
    close: "]",
};

/// What an answer may be, and how its calls are to be read.
#[derive(Debug, Default, PartialEq)]
pub(in crate::http) struct Rule {
    pub(in crate::http) constraint: Option<Shaped>,
    /// Calls come as plain JSON, not in the model's own format.
    pub(in crate::http) plain_json: bool,
}

/// Puts together what `tool_choice` and the form ask for. `thinking`: the model thinks before it answers; when
/// `thought_is_open`, the prompt has begun the thought already.
pub(in crate::http) fn rule(
    dialect: &Dialect,
    tools: &Tools,
    form: Option<&Shaped>,
    thinking: Option<Thinking>,
) -> Rule {
    let forced = matches!(tools.choice, Choice::Required | Choice::Named(_));
    let either = tools.choice == Choice::Auto && form.is_some();
    let framing = framing(dialect);
    let mut rules = String::new();
    let (param, body) = match form {
        _ if forced => ("tools", calls(&mut rules, framing, tools)),
        Some(form) if either => {
            let value = value(&mut rules, &form.constraint);
            (form.param, format!("{} | {value}", calls(&mut rules, framing, tools)))
        }
        // A form alone needs no grammar around it.
        Some(form) if thinking.is_none() => {
            return Rule { constraint: Some(form.clone()), plain_json: false };
        }
        Some(form) => (form.param, value(&mut rules, &form.constraint)),
        None => return Rule::default(),
    };
    let start = match thinking {
        None => "start: answer\n".to_owned(),
        Some(Thinking::Open) => format!("start: thought GAP? answer\n{THOUGHT}"),
        Some(Thinking::Possible) => format!("start: (\"<think>\" thought GAP?)? answer\n{THOUGHT}"),
    };
    let grammar = format!("{start}answer: {body}\n{rules}");
    let plain_json = (forced || either) && framing == JSON;
    Rule { constraint: Some(Shaped { constraint: Constraint::Lark { grammar }, param }), plain_json }
}

const THOUGHT: &str = "thought[suffix=\"</think>\"]: /(.|\\n)*/\nGAP: /[ \\n]{1,4}/\n";

/// Where a model's thought stands when the answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) enum Thinking {
    /// The prompt has begun it.
    Open,
    /// The model may begin one.
    Possible,
}

fn framing(dialect: &Dialect) -> Framing {
    match dialect.tools.as_str() {
        "qwen" => HERMES,
        "llama" => LLAMA,
        _ => JSON,
    }
}

fn calls(rules: &mut String, f: Framing, tools: &Tools) -> String {
    let mut names = Vec::new();
    for (i, tool) in tools.callable().enumerate() {
        names.push(format!("call{i}"));
        let open = format!("{}{{\"name\": \"{}\", \"{}\": ", f.call_open, tool.function.name, f.arguments);
        let close = format!("}}{}", f.call_close);
        let _ = writeln!(rules, "call{i}: {} args{i} {}", quoted(&open), quoted(&close));
        let _ = writeln!(rules, "args{i}: %json {}", schema(tool));
    }
    let _ = writeln!(rules, "call: {}", names.join(" | "));
    let several = tools.parallel && !matches!(tools.choice, Choice::Named(_));
    let list = if several { format!("call ({} call)*", quoted(f.separator)) } else { "call".to_owned() };
    let mut body = String::new();
    if !f.open.is_empty() {
        let _ = write!(body, "{} ", quoted(f.open));
    }
    body.push_str(&list);
    if !f.close.is_empty() {
        let _ = write!(body, " {}", quoted(f.close));
    }
    let _ = writeln!(rules, "calls: {body}");
    "calls".to_owned()
}

fn value(rules: &mut String, constraint: &Constraint) -> String {
    match constraint {
        Constraint::JsonObject => {
            let _ = writeln!(rules, "value: %json {}", with_bounded_space(json!({"type": "object"})));
        }
        Constraint::JsonSchema { schema } => {
            // It was written from a value.
            let schema = with_bounded_space(serde_json::from_str(schema).unwrap_or_default());
            let _ = writeln!(rules, "value: %json {schema}");
        }
        Constraint::Lark { grammar } => {
            let _ = writeln!(rules, "value: %lark {{\n{grammar}\n}}");
        }
        Constraint::Regex { pattern } => {
            // Between slashes of the grammar a slash must not stand alone.
            let pattern = pattern.replace("\\/", "/").replace('/', "\\/").replace('\n', "\\n");
            let _ = writeln!(rules, "value: /{pattern}/");
        }
    }
    "value".to_owned()
}

/// Small models otherwise fill their budget with line breaks.
fn with_bounded_space(mut schema: Value) -> Value {
    if let Value::Object(map) = &mut schema {
        let pattern = json!({"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"});
        map.insert("x-guidance".to_owned(), pattern);
    }
    schema
}

fn schema(tool: &Tool) -> Value {
    let mut schema = match &tool.function.parameters {
        Value::Object(map) if !map.is_empty() => tool.function.parameters.clone(),
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    };
    if let Value::Object(map) = &mut schema {
        map.entry("type").or_insert_with(|| "object".into());
        // One way of writing it: a small model would otherwise fill its budget with white space.
        let options = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        map.insert("x-guidance".to_owned(), options);
    }
    schema
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::params::fields;

    fn tools(choice: &str, parallel: bool) -> Tools {
        let list = json!([
            {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
            {"type": "function", "function": {"name": "now"}}]);
        Tools::read(&fields(json!({"tools": list, "tool_choice": choice, "parallel_tool_calls": parallel})))
            .unwrap()
    }

    fn lark(rule: &Rule) -> &str {
        match &rule.constraint.as_ref().unwrap().constraint {
            Constraint::Lark { grammar } => grammar,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_form_alone_stays_what_it_is() {
        let dialect = Dialect::detect(None, "x");
        let form = Shaped { constraint: Constraint::JsonObject, param: "response_format" };
        let got = rule(&dialect, &Tools::default(), Some(&form), None);
        assert_eq!(got, Rule { constraint: Some(form.clone()), plain_json: false });
        assert_eq!(rule(&dialect, &tools("auto", true), None, None), Rule::default());
        let thinking = rule(&dialect, &Tools::default(), Some(&form), Some(Thinking::Open));
        assert!(lark(&thinking).starts_with("start: thought GAP? answer\n"));
    }

    #[test]
    fn forced_calls_have_the_model_s_format() {
        let dialect = Dialect::detect(None, "x");
        let got = rule(&dialect, &tools("required", true), None, None);
        let want = r#"start: answer
answer: calls
call0: "<tool_call>\n{\"name\": \"add\", \"arguments\": " args0 "}\n</tool_call>"
args0: %json {"type":"object","properties":{"a":{"type":"integer"}},"x-guidance":{"whitespace_flexible":false,"item_separator":", ","key_separator":": "}}
call1: "<tool_call>\n{\"name\": \"now\", \"arguments\": " args1 "}\n</tool_call>"
args1: %json {"type":"object","properties":{},"additionalProperties":false,"x-guidance":{"whitespace_flexible":false,"item_separator":", ","key_separator":": "}}
call: call0 | call1
calls: call ("\n" call)*
"#;
        assert_eq!(lark(&got), want);
        assert!(!got.plain_json);
        let one = rule(&dialect, &tools("required", false), None, None);
        assert!(lark(&one).ends_with("calls: call\n"));
        let mistral = dialect.with(Some("mistral"), None);
        let got = rule(&mistral, &tools("required", true), None, None);
        assert!(got.plain_json && lark(&got).ends_with("calls: \"[\" call (\", \" call)* \"]\"\n"));
    }
}
