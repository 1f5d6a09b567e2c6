//! Token counts of an answer.

use schemars::JsonSchema;
use serde::Serialize;

/// OpenAI's usage object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct Usage {
    /// Tokens of all prompts.
    pub(super) prompt_tokens: u64,
    /// Tokens of all choices.
    pub(super) completion_tokens: u64,
    /// Both.
    pub(super) total_tokens: u64,
    /// Of the prompts' tokens.
    pub(super) prompt_tokens_details: PromptTokensDetails,
    /// Of the answers' tokens, where an endpoint tells them apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) completion_tokens_details: Option<CompletionTokensDetails>,
}

/// Where prompt tokens came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct PromptTokensDetails {
    /// Served from cache, of any origin.
    pub(super) cached_tokens: u64,
}

/// What answer tokens were for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct CompletionTokensDetails {
    /// Spent on thoughts before the answer.
    pub(super) reasoning_tokens: u64,
}

impl Usage {
    pub(super) fn new(prompt_tokens: u64, cached_tokens: u64, completion_tokens: u64) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: None,
        }
    }

    /// The same, with the tokens that went into thoughts.
    pub(super) fn with_reasoning(self, reasoning_tokens: u64) -> Self {
        Self { completion_tokens_details: Some(CompletionTokensDetails { reasoning_tokens }), ..self }
    }
}
