//! What a request wants its answer to be.

use shared::control::{Constraint, Sampling, TokenLogprobs};

/// How to answer a prompt, the same for every prompt of a request.
#[derive(Debug, Clone)]
pub(crate) struct AnswerSpec {
    /// Independent answers to one prompt.
    pub(crate) choices: u32,
    /// Most tokens to produce; `None` uses what the context leaves.
    pub(crate) max_new_tokens: Option<u32>,
    pub(crate) sampling: Sampling,
    /// Texts that end the answer.
    pub(crate) stops: Vec<String>,
    /// Tokens that end the answer, beside the model's own.
    pub(crate) stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not end the answer.
    pub(crate) ignore_eos: bool,
    /// Special tokens are part of the text.
    pub(crate) keep_special: bool,
    /// Log probabilities of answer tokens, with this many of the likeliest.
    pub(crate) logprobs: Option<u32>,
    /// The same for the prompt's tokens.
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) constraint: Option<Shaped>,
}

/// A constraint with the parameter that it came from, for errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shaped {
    pub(crate) constraint: Constraint,
    pub(crate) param: &'static str,
}

/// A part of an answer: text that is certain, and the tokens that are wholly in it.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Piece {
    /// Whole UTF-8.
    pub(crate) text: String,
    /// Empty unless log probabilities were asked for.
    pub(crate) tokens: Vec<ScoredToken>,
    /// Tokens that the decoder has produced since the piece before.
    pub(crate) used: u32,
}

impl Piece {
    /// Nothing to say.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }
}

/// A token with its log probability.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScoredToken {
    pub(crate) id: u32,
    /// Absent for the first token of a prompt.
    pub(crate) score: Option<TokenLogprobs>,
    /// Characters of the text before the token.
    pub(crate) offset_chars: u32,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// A stop token or a stop text.
    Stop,
    /// The token budget or the context is used up.
    Length,
}
