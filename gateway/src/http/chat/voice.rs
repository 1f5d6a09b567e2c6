//! Says chat answers, as a stream or whole.

use super::wire::{ChatChoice, ChatCompletion, ChatMessage, ChunkChoice, Delta};
use crate::http::logprobs::ChatLogprobs;
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
    choices: Vec<Choice>,
}

/// What a whole answer will say.
#[derive(Default)]
struct Choice {
    content: String,
    logprobs: ChatLogprobs,
    finish_reason: &'static str,
}

impl ChatVoice {
    pub(super) fn new(
        model: Arc<TextModel>,
        head: Head,
        choices: usize,
        scored: bool,
        stream: bool,
        include_usage: bool,
    ) -> Self {
        let head = Head { id: format!("chatcmpl-{}", head.id), ..head };
        Self {
            frame: stream.then(|| ChunkFrame::new(&head, "chat.completion.chunk", include_usage)),
            model,
            head,
            include_usage,
            scored,
            choices: std::iter::repeat_with(Choice::default).take(choices).collect(),
        }
    }

    fn whole(&mut self, usage: &Usage) -> ChatCompletion {
        let scored = self.scored;
        let choice = |(index, choice): (usize, Choice)| ChatChoice {
            index,
            message: ChatMessage { role: "assistant", content: Some(choice.content), refusal: None },
            logprobs: scored.then_some(choice.logprobs),
            finish_reason: choice.finish_reason,
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
            let delta = Delta { role: Some("assistant"), content: Some("") };
            frame.choice(&ChunkChoice { index, delta, logprobs: None, finish_reason: None }, out);
        }
    }

    /// A conversation is never repeated.
    fn prompt(&mut self, _: usize, _: Vec<TokenLogprobs>, _: &mut Frames) {}

    fn said(&mut self, index: usize, piece: Piece, out: &mut Frames) {
        match &self.frame {
            Some(frame) => {
                let mut logprobs = self.scored.then(ChatLogprobs::default);
                if let Some(logprobs) = &mut logprobs {
                    logprobs.extend(&self.model.tokenizer, &piece.tokens);
                }
                let delta = Delta { content: Some(&piece.text), ..Delta::default() };
                frame.choice(&ChunkChoice { index, delta, logprobs, finish_reason: None }, out);
            }
            None => {
                let choice = &mut self.choices[index];
                choice.content.push_str(&piece.text);
                choice.logprobs.extend(&self.model.tokenizer, &piece.tokens);
            }
        }
    }

    fn finished(&mut self, index: usize, finish: Finish, out: &mut Frames) {
        let finish_reason = reason(finish);
        match &self.frame {
            Some(frame) => {
                let delta = Delta::default();
                let last = ChunkChoice { index, delta, logprobs: None, finish_reason: Some(finish_reason) };
                frame.choice(&last, out);
            }
            None => self.choices[index].finish_reason = finish_reason,
        }
    }

    fn ended(&mut self, usage: &Usage, out: &mut Frames) {
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
