//! What an answer shall be: its length, how its tokens are chosen, what it must look like.

use serde::{Deserialize, Serialize};

/// An answer to be generated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateSpec {
    /// A prepared request.
    pub request_id: String,
    /// Most tokens to produce.
    pub max_new_tokens: u32,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Tokens that end the answer and are not part of it.
    pub stop_token_ids: Vec<u32>,
    /// What the client demands of the bridge.
    pub require: Require,
    /// Longest wait for the request's transfer before falling back.
    pub transfer_timeout_ms: u64,
    /// Independent answers to the one prompt; choice `i` draws with seed `sampling.seed + i`.
    #[serde(default = "one")]
    pub choices: u32,
    /// Also tell each answer token's log probability, and those of this many of the likeliest tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u32>,
    /// The same for the prompt's tokens. The decoder then computes the whole prompt itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<u32>,
    /// Most [`super::DecodeEvent::Token`] on their way that were not read ([`super::DecodeRequest::Read`]); beyond, the answer stands
    /// still and nobody else's does. 0 for any number.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub window: u32,
}

/// What an answer must look like. The decoder masks every token that would break it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema accepts.
    JsonSchema {
        /// The schema, as JSON text.
        schema: String,
    },
    /// A grammar in llguidance's Lark dialect.
    Lark {
        /// The grammar.
        grammar: String,
    },
    /// A regular expression over the whole answer.
    Regex {
        /// The expression.
        pattern: String,
    },
}

/// Log probability of a token under the model's own distribution (after temperature 1, before any filter or
/// penalty), natural logarithm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the token itself.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(u32, f32)>,
}

/// Sampling parameters; `temperature` 0 is greedy. Applied in this order: constraint mask, `logit_bias`,
/// penalties, temperature, `top_k`, `top_p`, `min_p`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Logits are divided by this; 0 takes the most likely token.
    pub temperature: f32,
    /// Smallest set of tokens whose probabilities reach this; 1 keeps all.
    pub top_p: f32,
    /// Only the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Seed; the same seed and prompt give the same answer.
    pub seed: u64,
    /// Drops tokens less likely than this share of the likeliest; 0 keeps all.
    #[serde(default, skip_serializing_if = "is_zero_f32")]
    pub min_p: f32,
    /// Subtracted from the logit of every token that the answer already has.
    #[serde(default, skip_serializing_if = "is_zero_f32")]
    pub presence_penalty: f32,
    /// Subtracted once for each time that the answer already has the token.
    #[serde(default, skip_serializing_if = "is_zero_f32")]
    pub frequency_penalty: f32,
    /// Logits of tokens in prompt or answer are divided by this when positive, else multiplied; 1 changes nothing.
    #[serde(default = "one_f32", skip_serializing_if = "is_one_f32")]
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logit_bias: Vec<(u32, f32)>,
}

impl Sampling {
    /// Always the likeliest token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

impl Default for Sampling {
    /// The model's own distribution, seed 0.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            seed: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

fn one() -> u32 {
    1
}

fn one_f32() -> f32 {
    1.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
pub(super) fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero_f32(value: &f32) -> bool {
    *value == 0.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_one_f32(value: &f32) -> bool {
    *value == 1.0
}

/// What a client demands of the bridge (`X-PD-Bridge-Require`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Require {
    /// Falling back to the decoder alone is fine.
    #[default]
    Nothing,
    /// Something must come from the bridge, or have been there already.
    Any,
    /// Everything up to the last prompt token must.
    Complete,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token.
    Stop,
    /// The token budget or the context is used up.
    Length,
}
