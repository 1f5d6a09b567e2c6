//! How an endpoint says an answer: events in, bytes of a body out.

use super::error::ApiError;
use super::usage::Usage;
use crate::pipeline::{Finish, Piece};
use bytes::Bytes;
use serde::Serialize;
use shared::control::TokenLogprobs;
use std::collections::VecDeque;

/// Turns what happens to a request into an endpoint's objects, either as events of a stream or as one whole.
///
/// Choices are numbered over all prompts: the first prompt's choices come first.
pub(super) trait Voice: Send {
    /// A prompt is in and its first token exists.
    fn started(&mut self, prompt: usize, out: &mut Frames);
    /// Log probabilities of a prompt's tokens from the second on.
    fn prompt(&mut self, prompt: usize, scores: Vec<TokenLogprobs>, out: &mut Frames);
    /// More of a choice.
    fn said(&mut self, choice: usize, piece: Piece, out: &mut Frames);
    /// A choice is complete.
    fn finished(&mut self, choice: usize, finish: Finish, out: &mut Frames);
    /// Everything is complete.
    fn ended(&mut self, usage: &Usage, out: &mut Frames);
    /// An error in mid-stream, in the form that SDKs understand; nothing follows.
    fn failed(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body());
    }
}

/// Pieces of a body that are ready to be sent, in order.
#[derive(Debug, Default)]
pub(super) struct Frames(VecDeque<Bytes>);

impl Frames {
    /// An SSE event.
    pub(super) fn data(&mut self, value: &impl Serialize) {
        self.framed(b"data: ", value, b"\n\n");
    }

    /// An SSE event whose beginning and end are the same each time.
    pub(super) fn framed(&mut self, prefix: &[u8], value: &impl Serialize, suffix: &[u8]) {
        let mut bytes = Vec::with_capacity(prefix.len() + suffix.len() + 128);
        bytes.extend_from_slice(prefix);
        // Plain data can't fail to become JSON.
        let _ = serde_json::to_writer(&mut bytes, value);
        bytes.extend_from_slice(suffix);
        self.0.push_back(bytes.into());
    }

    /// A whole body.
    pub(super) fn body(&mut self, value: &impl Serialize) {
        self.framed(b"", value, b"");
    }

    /// An SSE comment.
    pub(super) fn comment(&mut self, text: &str) {
        self.0.push_back(format!(": {text}\n\n").into());
    }

    /// An SSE comment that goes out before everything that waits.
    pub(super) fn comment_first(&mut self, text: &str) {
        self.0.push_front(format!(": {text}\n\n").into());
    }

    /// Bytes as they are.
    pub(super) fn raw(&mut self, bytes: impl Into<Bytes>) {
        self.0.push_back(bytes.into());
    }

    /// The end mark of OpenAI's streams.
    pub(super) fn done(&mut self) {
        self.raw(Bytes::from_static(b"data: [DONE]\n\n"));
    }

    /// Takes the oldest.
    pub(super) fn pop(&mut self) -> Option<Bytes> {
        self.0.pop_front()
    }
}

/// What is the same in every object of one answer.
#[derive(Debug, Clone)]
pub(super) struct Head {
    /// `chatcmpl-…` or `cmpl-…`.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created_unix_s: u64,
    pub(super) model: String,
}

/// The unchanging bytes around a streamed choice.
pub(super) struct ChunkFrame {
    prefix: Vec<u8>,
    suffix: &'static [u8],
}

impl ChunkFrame {
    /// For objects of one name. With usage wanted, every chunk but the last says that it has none.
    pub(super) fn new(head: &Head, object: &str, usage_wanted: bool) -> Self {
        let mut prefix = b"data: ".to_vec();
        let start = serde_json::json!({"id": head.id, "object": object, "created": head.created_unix_s,
            "model": head.model});
        prefix.extend(start.to_string().trim_end_matches('}').as_bytes());
        prefix.extend(b",\"choices\":[");
        Self { prefix, suffix: if usage_wanted { b"],\"usage\":null}\n\n" } else { b"]}\n\n" } }
    }

    /// A chunk with one choice.
    pub(super) fn choice(&self, choice: &impl Serialize, out: &mut Frames) {
        out.framed(&self.prefix, choice, self.suffix);
    }

    /// The chunk that carries usage, after the last choice.
    pub(super) fn usage(&self, usage: &Usage, out: &mut Frames) {
        let prefix = [self.prefix.as_slice(), b"],\"usage\":"].concat();
        out.framed(&prefix, usage, b"}\n\n");
    }
}

/// OpenAI's word for a plain end.
pub(super) fn reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}
