//! The objects of a chat answer, whole and in parts.

use crate::http::logprobs::ChatLogprobs;
use crate::http::usage::Usage;
use serde::Serialize;

/// A whole answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatCompletion {
    pub(super) id: String,
    /// `chat.completion`
    pub(super) object: &'static str,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) choices: Vec<ChatChoice>,
    pub(super) usage: Usage,
}

/// One of the answers.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(super) index: usize,
    pub(super) message: ChatMessage,
    pub(super) logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`
    pub(super) finish_reason: &'static str,
}

/// What the model said.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatMessage {
    /// `assistant`
    pub(super) role: &'static str,
    /// Null when there are only tool calls.
    pub(super) content: Option<String>,
    /// Always null: a refusal is plain content here.
    pub(super) refusal: Option<String>,
}

/// A part of a choice.
#[derive(Debug, Serialize)]
pub(crate) struct ChunkChoice<'a> {
    pub(super) index: usize,
    pub(super) delta: Delta<'a>,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
}

/// What is new in a choice.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<&'a str>,
}
