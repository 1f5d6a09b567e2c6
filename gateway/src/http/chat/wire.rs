//! The objects of a chat answer, whole and in parts.

use crate::http::logprobs::ChatLogprobs;
use crate::http::usage::Usage;
use schemars::JsonSchema;
use serde::Serialize;

/// A whole answer.
#[derive(Debug, Serialize, JsonSchema)]
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
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ChatChoice {
    pub(super) index: usize,
    pub(super) message: ChatMessage,
    pub(super) logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`
    pub(super) finish_reason: &'static str,
}

/// What the model said.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct ChatMessage {
    /// `assistant`
    pub(super) role: &'static str,
    /// Null when there are only tool calls.
    pub(super) content: Option<String>,
    /// Always null: a refusal is plain content here.
    pub(super) refusal: Option<String>,
    /// Thoughts of models that write them down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    /// The same under the other name that clients know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCall>,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct ToolCall {
    pub(super) id: String,
    /// `function`
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) function: FunctionCall,
}

/// The function of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct FunctionCall {
    pub(super) name: String,
    /// JSON text.
    pub(super) arguments: String,
}

/// A part of an answer, as a stream sends it.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "written in pieces, described as one")]
pub(crate) struct ChatChunk<'a> {
    id: String,
    /// `chat.completion.chunk`
    object: String,
    /// Seconds since 1970.
    created: u64,
    model: String,
    choices: Vec<ChunkChoice<'a>>,
    /// Only with `stream_options.include_usage`: null but in the last part.
    #[schemars(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

/// A part of a choice.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct ChunkChoice<'a> {
    pub(super) index: usize,
    pub(super) delta: Delta<'a>,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
}

/// What is new in a choice.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_calls: Option<[ToolCallDelta<'a>; 1]>,
}

/// What is new in a call.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ToolCallDelta<'a> {
    pub(super) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
    pub(super) function: FunctionDelta<'a>,
}

/// What is new in the function of a call.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<&'a str>,
    pub(super) arguments: &'a str,
}
