//! Says chat answers, as a stream or whole.

use super::wire::{
    ChatChoice, ChatCompletion, ChatMessage, ChunkChoice, Delta, FunctionCall, FunctionDelta, ToolCall,
    ToolCallDelta,
};
use crate::http::logprobs::ChatLogprobs;
use crate::http::tools::reader::{Part, Reader, Reading};
use crate::http::usage::Usage;
use crate::http::voice::{ChunkFrame, Frames, Head, Voice, reason};
use crate::model::TextModel;
use crate::pipeline::{Finish, Piece};
use shared::control::TokenLogprobs;
use std::sync::Arc;

/// The voice of `/v1/chat/completions`.
pub(super) struct ChatVoice {
    model: Arc<TextModel>,
    head: Head,
    /// Streams only.
    frame: Option<ChunkFrame>,
    include_usage: bool,
    scored: bool,
    thought_tokens: u64,
    choices: Vec<Choice>,
}

struct Choice {
    reader: Reader,
    /// Tokens that were not told yet.
    logprobs: ChatLogprobs,
    /// Whole answers: what was said.
    message: ChatMessage,
    finish_reason: &'static str,
}

impl ChatVoice {
    pub(super) fn new(
        model: Arc<TextModel>,
        head: Head,
        choices: usize,
        reading: &Reading,
        scored: bool,
        stream: bool,
        include_usage: bool,
    ) -> Self {
        let head = Head { id: format!("chatcmpl-{}", head.id), ..head };
        let choice = || Choice {
            reader: Reader::new(reading),
            logprobs: ChatLogprobs::default(),
            message: ChatMessage { role: "assistant", ..ChatMessage::default() },
            finish_reason: "stop",
        };
        Self {
            frame: stream.then(|| ChunkFrame::new(&head, "chat.completion.chunk", include_usage)),
            model,
            head,
            include_usage,
            scored,
            thought_tokens: 0,
            choices: std::iter::repeat_with(choice).take(choices).collect(),
        }
    }

    fn say(&mut self, index: usize, parts: Vec<Part>, out: &mut Frames) {
        let choice = &mut self.choices[index];
        let Some(frame) = &self.frame else {
            parts.into_iter().for_each(|part| choice.message.add(part));
            return;
        };
        for part in &parts {
            // Tokens whose text was held back come with the next part.
            let logprobs = self.scored.then(|| std::mem::take(&mut choice.logprobs));
            frame.choice(&ChunkChoice { index, delta: delta(part), logprobs, finish_reason: None }, out);
        }
    }

    fn whole(&mut self, usage: &Usage) -> ChatCompletion {
        let scored = self.scored;
        let choice = |(index, choice): (usize, Choice)| {
            let mut message = choice.message;
            if message.tool_calls.is_empty() {
                message.content.get_or_insert_default();
            }
            message.reasoning.clone_from(&message.reasoning_content);
            let logprobs = scored.then_some(choice.logprobs);
            ChatChoice { index, message, logprobs, finish_reason: choice.finish_reason }
        };
        ChatCompletion {
            id: self.head.id.clone(),
            object: "chat.completion",
            created: self.head.created_unix_s,
            model: self.head.model.clone(),
            choices: std::mem::take(&mut self.choices).into_iter().enumerate().map(choice).collect(),
            usage: *usage,
        }
    }
}

impl Voice for ChatVoice {
    fn started(&mut self, _: usize, out: &mut Frames) {
        let Some(frame) = &self.frame else { return };
        for index in 0..self.choices.len() {
            let delta = Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
            frame.choice(&ChunkChoice { index, delta, ..ChunkChoice::default() }, out);
        }
    }

    /// A conversation is never repeated.
    fn prompt(&mut self, _: usize, _: Vec<TokenLogprobs>, _: &mut Frames) {}

    fn said(&mut self, index: usize, piece: Piece, out: &mut Frames) {
        let choice = &mut self.choices[index];
        if self.scored {
            choice.logprobs.extend(&self.model.tokenizer, &piece.tokens);
        }
        let parts = choice.reader.push(&piece.text);
        if choice.reader.is_thinking() {
            self.thought_tokens += u64::from(piece.used);
        }
        self.say(index, parts, out);
    }

    fn finished(&mut self, index: usize, finish: Finish, out: &mut Frames) {
        let parts = self.choices[index].reader.finish();
        self.say(index, parts, out);
        let choice = &mut self.choices[index];
        choice.finish_reason = match finish {
            Finish::Stop if choice.reader.called() => "tool_calls",
            finish => reason(finish),
        };
        if let Some(frame) = &self.frame {
            let rest = std::mem::take(&mut choice.logprobs);
            let logprobs = (self.scored && !rest.content.is_empty()).then_some(rest);
            let finish_reason = Some(choice.finish_reason);
            frame.choice(&ChunkChoice { index, logprobs, finish_reason, ..ChunkChoice::default() }, out);
        }
    }

    fn ended(&mut self, usage: &Usage, out: &mut Frames) {
        let usage = &usage.with_reasoning(self.thought_tokens);
        match &self.frame {
            Some(frame) => {
                if self.include_usage {
                    frame.usage(usage, out);
                }
                out.done();
            }
            None => {
                let whole = self.whole(usage);
                out.body(&whole);
            }
        }
    }
}

impl ChatMessage {
    fn add(&mut self, part: Part) {
        match part {
            Part::Thought(text) => self.reasoning_content.get_or_insert_default().push_str(&text),
            Part::Text(text) => self.content.get_or_insert_default().push_str(&text),
            Part::Call { id, name, .. } => self.tool_calls.push(ToolCall {
                id,
                kind: "function",
                function: FunctionCall { name, arguments: String::new() },
            }),
            Part::Arguments { json, .. } => {
                if let Some(call) = self.tool_calls.last_mut() {
                    call.function.arguments.push_str(&json);
                }
            }
        }
    }
}

fn delta(part: &Part) -> Delta<'_> {
    let call = |index, id, kind, function| Delta {
        tool_calls: Some([ToolCallDelta { index, id, kind, function }]),
        ..Delta::default()
    };
    match part {
        Part::Thought(text) => {
            Delta { reasoning_content: Some(text), reasoning: Some(text), ..Delta::default() }
        }
        Part::Text(text) => Delta { content: Some(text), ..Delta::default() },
        Part::Call { index, id, name } => {
            call(*index, Some(id), Some("function"), FunctionDelta { name: Some(name), arguments: "" })
        }
        Part::Arguments { index, json } => {
            call(*index, None, None, FunctionDelta { name: None, arguments: json })
        }
    }
}
