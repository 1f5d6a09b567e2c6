//! How the served model writes tool calls and thoughts: which of the parsers fit, and what its template knows.

use openai_protocol::common::Tool;
use reasoning_parser::ReasoningParser;
use serde_json::{Map, Value, json};
use shared::template::ChatTemplate;
use tool_parser::ToolParser;

/// Taken when nothing is known of a model: small models follow this format when it is shown to them.
const PLAIN: &str = "qwen";
/// Other names of the same formats.
const ALIASES: [(&str, &str); 4] =
    [("hermes", "qwen"), ("llama3", "llama"), ("llama3_json", "llama"), ("qwen3_coder", "qwen_coder")];
/// Formats whose marks are ordinary text in every vocabulary.
const TEXT_MARKS: [&str; 6] = ["qwen", "qwen_xml", "qwen_coder", "nemotron", "json", "pythonic"];

/// What templates write around a call of the function `probe_name`, most specific first.
const MARKS: [(&str, &str); 18] = [
    ("<tool_call>\n<function=probe_name", "qwen_xml"),
    ("<tool_call>probe_name\n<arg_key>", "glm45_moe"),
    ("<tool_call>probe_name<arg_key>", "glm47_moe"),
    ("<tool_call>", "qwen"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜DSML｜function_calls>", "deepseek32"),
    ("<｜DSML｜tool_calls>", "deepseek_v4"),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek"),
    ("<｜tool▁call▁begin｜>probe_name<｜tool▁sep｜>", "deepseek31"),
    ("<|tool_calls_section_begin|>", "kimik2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|START_ACTION|>", "cohere"),
    ("<|tool_call>call:probe_name", "gemma4"),
    ("<steptml:invoke", "step3"),
    ("<|python_tag|>", "llama"),
    ("{\"name\": \"probe_name\", \"parameters\":", "llama"),
    ("[probe_name(", "pythonic"),
    ("{\"name\": \"probe_name\", \"arguments\":", "json"),
];

/// The served model's way of writing.
#[derive(Clone)]
pub(crate) struct Dialect {
    /// Format of tool calls, by the parser crate's name.
    pub(crate) tools: String,
    /// Format of thoughts; `None` when the model has none.
    pub(crate) reasoning: Option<String>,
    /// The template tells the model which tools there are.
    pub(crate) template_knows_tools: bool,
    tool_parsers: tool_parser::ParserFactory,
    reasoning_parsers: reasoning_parser::ParserFactory,
}

impl Dialect {
    /// Finds out from the template and, where that says nothing, from the model's name.
    pub(crate) fn detect(template: Option<&ChatTemplate>, model_name: &str) -> Self {
        let tool_parsers = tool_parser::ParserFactory::new();
        let reasoning_parsers = reasoning_parser::ParserFactory::new();
        let by_name = || tool_parsers.registry().resolve_model_to_parser(model_name);
        let probe = template.map(Probe::of).unwrap_or_default();
        let named = reasoning_parsers.registry().has_parser_for_model(model_name);
        let named = named.then(|| reasoning_parsers.create(model_name).model_type().to_owned());
        let reasoning = match (named, probe.thinks) {
            // The name says little of a family that only thinks in some of its generations.
            (Some(name), false) if name == "qwen3" => None,
            (Some(name), _) => Some(name),
            (None, true) => Some("base".to_owned()),
            (None, false) => None,
        };
        Self {
            tools: probe.tools.map(str::to_owned).or_else(by_name).unwrap_or_else(|| PLAIN.to_owned()),
            reasoning: reasoning.filter(|name| reasoning_parsers.registry().has_parser(name)),
            template_knows_tools: probe.knows_tools,
            tool_parsers,
            reasoning_parsers,
        }
    }

    /// Takes what the settings say instead of what was found; the names were checked.
    pub(crate) fn with(mut self, tools: Option<&str>, reasoning: Option<&str>) -> Self {
        if let Some(name) = tools.filter(|name| *name != "auto") {
            canonical(name).clone_into(&mut self.tools);
        }
        match reasoning {
            None | Some("auto") => {}
            Some("none") => self.reasoning = None,
            Some(name) => self.reasoning = Some(name.to_owned()),
        }
        self
    }

    /// A fresh parser of tool calls; `json` for calls that a grammar has forced into plain JSON.
    pub(crate) fn tool_parser(&self, forced_json: bool) -> Option<Box<dyn ToolParser>> {
        self.tool_parsers.registry().create_parser(if forced_json { "json" } else { &self.tools })
    }

    /// A fresh parser of thoughts.
    pub(crate) fn reasoning_parser(&self) -> Option<Box<dyn ReasoningParser>> {
        self.reasoning_parsers.registry().create_parser(self.reasoning.as_deref()?)
    }

    /// The parsers need to see special tokens.
    pub(crate) fn needs_special(&self, with_tools: bool) -> bool {
        (with_tools && !TEXT_MARKS.contains(&self.tools.as_str()))
            || self.reasoning_parser().is_some_and(|p| p.requires_special_tokens())
    }
}

/// Names that the settings take for tool formats.
pub(crate) fn tool_formats() -> Vec<String> {
    let mut names = tool_parser::ParserFactory::new().list_parsers();
    names.extend(ALIASES.iter().map(|(alias, _)| (*alias).to_owned()));
    names.push("auto".to_owned());
    names.sort_unstable();
    names
}

/// Names that the settings take for formats of thoughts.
pub(crate) fn reasoning_formats() -> Vec<String> {
    let mut names = reasoning_parser::ParserFactory::new().list_parsers();
    names.extend(["auto".to_owned(), "none".to_owned()]);
    names.sort_unstable();
    names
}

/// A tool as the parser crate wants it.
pub(crate) fn parser_tool(tool: &Value) -> Option<Tool> {
    serde_json::from_value(tool.clone()).ok()
}

fn canonical(name: &str) -> &str {
    ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name)
}

/// What a template does with a conversation that has a tool, a call and a thought.
#[derive(Default)]
struct Probe {
    knows_tools: bool,
    tools: Option<&'static str>,
    thinks: bool,
}

impl Probe {
    fn of(template: &ChatTemplate) -> Self {
        let tool = json!([{"type": "function", "function": {"name": "probe_name", "description": "probe",
            "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}}}}]);
        let user = json!({"role": "user", "content": "hi"});
        let render = |messages: Value, tools: Option<&Value>| {
            template.render(&messages, tools, true, &Map::new()).unwrap_or_default()
        };
        let told = render(json!([user]), Some(&tool));
        let call = |arguments: Value| {
            let call = json!({"id": "call12345", "type": "function",
                "function": {"name": "probe_name", "arguments": arguments}});
            render(json!([user, {"role": "assistant", "content": "", "tool_calls": [call]}]), Some(&tool))
        };
        let mut called = call(json!({"probe_key": "v"}));
        if called.is_empty() {
            called = call(json!("{\"probe_key\": \"v\"}"));
        }
        let knows_tools = told.contains("probe_name");
        let thought = render(
            json!([user, {"role": "assistant", "content": "x", "reasoning_content": "probe_thought"}]),
            None,
        );
        Self {
            knows_tools,
            tools: MARKS.iter().find(|(mark, _)| called.contains(mark)).map(|(_, name)| *name),
            thinks: told.contains("<think>") || thought.contains("<think>"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(template: &str, name: &str) -> Dialect {
        Dialect::detect(Some(&ChatTemplate::from_text(template, Map::new()).unwrap()), name)
    }

    const PLAIN_CHAT: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";

    #[test]
    fn the_template_decides_then_the_name() {
        let calls = |body: &str| {
            format!(
                "{{% if tools %}}{{{{ tools|tojson }}}}{{% endif %}}{{% for m in messages %}}{{% for c in m.tool_calls %}}{body}{{% endfor %}}{{% endfor %}}"
            )
        };
        let hermes = calls("<tool_call>\n{{ c.function|tojson }}\n</tool_call>");
        let d = detect(&hermes, "x");
        assert_eq!((d.tools.as_str(), d.template_knows_tools, d.reasoning), ("qwen", true, None));
        let xml = calls("<tool_call>\n<function={{ c.function.name }}>");
        assert_eq!(detect(&xml, "llama-3.2").tools, "qwen_xml");
        let llama =
            calls("{\"name\": \"{{ c.function.name }}\", \"parameters\": {{ c.function.arguments|tojson }}}");
        assert_eq!(detect(&llama, "x").tools, "llama");
        let d = detect(PLAIN_CHAT, "SmolLM2");
        assert_eq!((d.tools.as_str(), d.template_knows_tools), ("qwen", false));
        assert_eq!(detect(PLAIN_CHAT, "Kimi-K2").tools, "kimik2");
        assert!(detect(PLAIN_CHAT, "DeepSeek-R1").reasoning.is_some());
        assert!(detect(PLAIN_CHAT, "Qwen2.5-7B").reasoning.is_none());
        let thinking = format!("{PLAIN_CHAT}<think>\n");
        assert_eq!(detect(&thinking, "x").reasoning.as_deref(), Some("base"));
    }

    #[test]
    fn settings_win_and_every_mark_names_a_parser() {
        let d = detect(PLAIN_CHAT, "x").with(Some("llama3"), Some("qwen3"));
        assert_eq!((d.tools.as_str(), d.reasoning.as_deref()), ("llama", Some("qwen3")));
        assert!(d.tool_parser(false).is_some() && d.reasoning_parser().is_some());
        assert!(d.needs_special(true) && !d.needs_special(false));
        let names = tool_formats();
        assert!(MARKS.iter().all(|(_, name)| names.contains(&(*name).to_owned())));
        assert!(detect(PLAIN_CHAT, "DeepSeek-R1").with(None, Some("none")).reasoning.is_none());
    }
}
