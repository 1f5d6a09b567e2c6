//! Reads what a model writes: thoughts, text and calls, in the order in which they come.

use super::Tools;
use crate::dialect::Dialect;
use futures_util::FutureExt as _;
use openai_protocol::common::Tool;
use reasoning_parser::ReasoningParser;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use tool_parser::types::ToolCallItem;
use tool_parser::{StreamingParseResult, ToolParser};

/// Most calls in one piece of text.
const MAX_ROUNDS: usize = 1000;

/// One thing that the model wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::http) enum Part {
    /// More of its thoughts.
    Thought(String),
    /// More of its answer.
    Text(String),
    /// A call begins.
    Call {
        /// Which of the answer's calls.
        index: usize,
        id: String,
        name: String,
    },
    /// More of a call's arguments.
    Arguments {
        /// Which of the answer's calls.
        index: usize,
        json: String,
    },
}

/// What to look for in an answer.
#[derive(Clone)]
pub(in crate::http) struct Reading {
    pub(in crate::http) dialect: Dialect,
    pub(in crate::http) tools: Tools,
    pub(in crate::http) plain_json: bool,
    /// The prompt ends inside a thought.
    pub(in crate::http) thought_is_open: bool,
}

/// The reader of one choice.
pub(in crate::http) struct Reader {
    thoughts: Option<Box<dyn ReasoningParser>>,
    calls: Option<Calls>,
    /// Text that begins after a thought or between calls loses its leading white space.
    trim: bool,
}

impl Reader {
    pub(in crate::http) fn new(reading: &Reading) -> Self {
        let mut thoughts = reading.dialect.reasoning_parser();
        if let Some(parser) = thoughts.as_mut().filter(|_| reading.thought_is_open) {
            parser.mark_reasoning_started();
            parser.mark_think_start_stripped();
        }
        let calls = reading.tools.offered().then(|| Calls::new(reading)).flatten();
        Self { thoughts, calls, trim: false }
    }

    /// More of what the model wrote.
    pub(in crate::http) fn push(&mut self, text: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        match self.thoughts.as_mut().map(|p| guarded(|| p.parse_reasoning_streaming_incremental(text))) {
            None => self.text(text, &mut parts),
            Some(Some(Ok(read))) => {
                self.thought(read.reasoning_text, &mut parts);
                self.text(&read.normal_text, &mut parts);
            }
            // A parser that fails has no say any more; nothing that was written is lost.
            Some(Some(Err(_)) | None) => {
                self.thoughts = None;
                self.text(text, &mut parts);
            }
        }
        parts
    }

    /// The model has ended.
    pub(in crate::http) fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        if let Some(Some(Ok(rest))) = self.thoughts.as_mut().map(|p| guarded(|| p.flush())) {
            self.thought(rest.reasoning_text, &mut parts);
            self.text(&rest.normal_text, &mut parts);
        }
        if let Some(calls) = &mut self.calls {
            let text = calls.finish(&mut parts);
            self.plain(text, &mut parts);
        }
        parts
    }

    /// The answer holds a call.
    pub(in crate::http) fn called(&self) -> bool {
        self.calls.as_ref().is_some_and(|c| !c.arguments.is_empty())
    }

    /// What comes next is a thought, as far as is known.
    pub(in crate::http) fn is_thinking(&self) -> bool {
        self.thoughts.as_ref().is_some_and(|p| p.is_in_reasoning())
    }

    fn thought(&mut self, text: String, parts: &mut Vec<Part>) {
        if !text.is_empty() {
            self.trim = true;
            parts.push(Part::Thought(text));
        }
    }

    fn text(&mut self, text: &str, parts: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        let mut found = Vec::new();
        let plain = match &mut self.calls {
            Some(calls) => calls.push(text, &mut found),
            None => text.to_owned(),
        };
        self.plain(plain, parts);
        parts.extend(found);
    }

    fn plain(&mut self, text: String, parts: &mut Vec<Part>) {
        let text = if self.trim || self.called() { text.trim_start().to_owned() } else { text };
        if !text.is_empty() {
            self.trim = false;
            parts.push(Part::Text(text));
        }
    }
}

/// The calls of one choice.
struct Calls {
    parser: Box<dyn ToolParser>,
    tools: Arc<Vec<Tool>>,
    parallel: bool,
    kimi: bool,
    /// Whether each call has arguments yet.
    arguments: Vec<bool>,
    broken: bool,
}

impl Calls {
    fn new(reading: &Reading) -> Option<Self> {
        Some(Self {
            parser: reading.dialect.tool_parser(reading.plain_json)?,
            tools: reading.tools.parsed.clone(),
            parallel: reading.tools.parallel,
            kimi: reading.dialect.tools.starts_with("kimi"),
            arguments: Vec::new(),
            broken: false,
        })
    }

    /// Returns the text that is no call.
    fn push(&mut self, text: &str, parts: &mut Vec<Part>) -> String {
        let mut plain = String::new();
        // A parser drops what it is handed in one piece with the mark of a call, so a piece ends where one may begin.
        for piece in pieces(text) {
            self.piece(piece, &mut plain, parts);
        }
        plain
    }

    fn piece(&mut self, piece: &str, plain: &mut String, parts: &mut Vec<Part>) {
        let mut chunk = piece;
        // The parser handles one call at a time and keeps the rest until it is asked again.
        for _ in 0..MAX_ROUNDS {
            if self.broken {
                break;
            }
            let (parser, tools) = (&mut self.parser, &self.tools);
            let read = guarded(|| parser.parse_incremental(chunk, tools).now_or_never());
            let Some(Some(Ok(StreamingParseResult { normal_text, calls }))) = read else {
                self.broken = true;
                break;
            };
            let nothing = normal_text.is_empty() && calls.is_empty();
            plain.push_str(&normal_text);
            calls.into_iter().for_each(|item| self.item(item, parts));
            chunk = "";
            if nothing {
                return;
            }
        }
        // Nothing that was written is lost.
        plain.push_str(chunk);
    }

    fn finish(&mut self, parts: &mut Vec<Part>) -> String {
        if self.broken {
            return String::new();
        }
        let parser = &mut self.parser;
        let rest = guarded(|| (parser.get_unstreamed_tool_args(), parser.take_unstreamed_normal_text()));
        let (items, text) = rest.unwrap_or_default();
        items.into_iter().flatten().for_each(|item| self.item(item, parts));
        for (index, has) in self.arguments.iter_mut().enumerate() {
            if !std::mem::replace(has, true) {
                parts.push(Part::Arguments { index, json: "{}".to_owned() });
            }
        }
        text
    }

    fn item(&mut self, item: ToolCallItem, parts: &mut Vec<Part>) {
        if let Some(name) = item.name.filter(|name| !name.is_empty()) {
            let index = self.arguments.len();
            self.arguments.push(false);
            if self.wanted(index) {
                let id = self.id(index, &name);
                parts.push(Part::Call { index, id, name });
            }
        }
        let Some(index) = self.arguments.len().checked_sub(1) else { return };
        if !item.parameters.is_empty() {
            self.arguments[index] = true;
            if self.wanted(index) {
                parts.push(Part::Arguments { index, json: item.parameters });
            }
        }
    }

    /// Without parallel calls the first one counts.
    fn wanted(&self, index: usize) -> bool {
        self.parallel || index == 0
    }

    fn id(&self, index: usize, name: &str) -> String {
        if self.kimi {
            return format!("functions.{name}:{index}");
        }
        let mut id = format!("call_{}", uuid::Uuid::new_v4().simple());
        id.truncate(29);
        id
    }
}

/// Cuts a text before every character that may begin a mark.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let mut cuts = rest.char_indices().skip(1).filter(|(_, c)| matches!(c, '<' | '[' | '{'));
        let (piece, after) = rest.split_at(cuts.next().map_or(rest.len(), |(at, _)| at));
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// A parser that panics on what a model wrote must not take the answer with it.
fn guarded<T>(parse: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(parse)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::params::fields;
    use proptest::prelude::*;
    use serde_json::json;

    fn reading(format: &str, reasoning: &str, parallel: bool) -> Reading {
        let function = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
        let body = json!({"tools": [function("add"), function("now")], "parallel_tool_calls": parallel});
        Reading {
            dialect: Dialect::detect(None, "x").with(Some(format), Some(reasoning)),
            tools: Tools::read(&fields(body)).unwrap(),
            plain_json: false,
            thought_is_open: false,
        }
    }

    /// Thoughts, text, and calls as `name(arguments)`.
    fn read(reading: &Reading, pieces: &[&str]) -> (String, String, Vec<String>) {
        let mut reader = Reader::new(reading);
        let mut parts: Vec<Part> = pieces.iter().flat_map(|p| reader.push(p)).collect();
        parts.extend(reader.finish());
        let (mut thoughts, mut text, mut calls) = (String::new(), String::new(), Vec::<String>::new());
        for part in parts {
            match part {
                Part::Thought(t) => thoughts.push_str(&t),
                Part::Text(t) => text.push_str(&t),
                Part::Call { index, id, name } => {
                    assert!(index == calls.len() && id.len() == 29);
                    calls.push(name);
                }
                Part::Arguments { index, json } => calls[index].push_str(&json),
            }
        }
        assert_eq!(reader.called(), !calls.is_empty());
        (thoughts, text, calls)
    }

    const TWO: &str = "Let me see. <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": [2, \"x\"]}}\n</tool_call>\n\
                       <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";

    #[test]
    fn calls_are_read_however_the_text_is_cut() {
        let want = (
            String::new(),
            "Let me see. ".to_owned(),
            vec!["add{\"a\":1,\"b\":[2,\"x\"]}".to_owned(), "now{}".to_owned()],
        );
        assert_eq!(read(&reading("hermes", "none", true), &[TWO]), want);
        let chars: Vec<String> = TWO.chars().map(String::from).collect();
        let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
        assert_eq!(read(&reading("hermes", "none", true), &chars), want);
        assert_eq!(read(&reading("hermes", "none", false), &chars).2.len(), 1);
    }

    #[test]
    fn text_is_cut_before_marks_and_whole_again() {
        assert_eq!(pieces("é<a[{x").collect::<Vec<_>>(), ["é", "<a", "[", "{x"]);
        assert_eq!(pieces("").count(), 0);
    }

    #[test]
    fn other_formats_are_read_too() {
        let llama = "{\"name\": \"add\", \"parameters\": {\"a\": 1}}";
        assert_eq!(read(&reading("llama3", "none", true), &[llama]).2, ["add{\"a\":1}"]);
        let mistral = "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"now\", \"arguments\": {}}]";
        assert_eq!(read(&reading("mistral", "none", true), &[mistral]).2, ["add{\"a\":1}", "now{}"]);
        let plain = Reading { plain_json: true, ..reading("mistral", "none", true) };
        let list =
            "[{\"name\": \"add\", \"parameters\": {\"a\": 1}}, {\"name\": \"now\", \"parameters\": {}}]";
        assert_eq!(read(&plain, &[list]).2, ["add{\"a\":1}", "now{}"]);
    }

    #[test]
    fn thoughts_are_apart_from_the_answer() {
        let got =
            read(&reading("hermes", "qwen3", true), &["<think>", "hm\n", "</think>", "\n\nyes", " sir"]);
        assert_eq!(got, ("hm\n".into(), "yes sir".into(), vec![]));
        let open = Reading { thought_is_open: true, ..reading("hermes", "qwen3", true) };
        assert_eq!(read(&open, &["hm", "</think>", TWO]).2.len(), 2);
        assert_eq!(read(&reading("hermes", "none", true), &["<think>x</think>"]).1, "<think>x</think>");
    }

    #[test]
    fn what_is_no_call_is_text() {
        for text in [
            "<tool_call",
            "a <tool_call>\nnot json",
            "{\"name\": \"x\"}",
            "<tool_call>\n{\"name\": \"else\", \"arguments\": {}}\n</tool_call>",
        ] {
            let (_, got, calls) = read(&reading("hermes", "none", true), &[text]);
            assert!(calls.is_empty() && got.contains(text.split('\n').next().unwrap()), "{text}: {got}");
        }
    }

    proptest! {
        #[test]
        fn no_format_panics_or_hangs(text in "[<>|a{}\"\\[\\]:,\n ]{0,60}", format in 0usize..40, cut in 1usize..7) {
            let formats = crate::dialect::tool_formats();
            let reading = reading(&formats[format % formats.len()], "qwen3", true);
            let chars: Vec<char> = text.chars().collect();
            let pieces: Vec<String> = chars.chunks(cut).map(|c| c.iter().collect()).collect();
            let mut reader = Reader::new(&reading);
            for piece in &pieces {
                reader.push(piece);
            }
            reader.finish();
        }
    }
}
