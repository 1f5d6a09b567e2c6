//! Log probabilities in the two forms that OpenAI's endpoints have.

use crate::pipeline::ScoredToken;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use shared::tokenizer::Tokenizer;

/// What stands for "impossible": JSON has no infinity.
const LEAST: f32 = -9999.0;

/// Log probabilities of a chat message.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub(super) struct ChatLogprobs {
    /// One for each token of the content.
    pub(super) content: Vec<TokenLogprob>,
    /// Always null: refusals are plain content here.
    pub(super) refusal: Option<Vec<TokenLogprob>>,
}

/// One token of a chat message.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub(super) struct TokenLogprob {
    /// Its text; U+FFFD stands for parts of a character.
    pub(super) token: String,
    /// Natural logarithm.
    pub(super) logprob: f32,
    /// Its bytes, which joined are the text even where a character has several tokens.
    pub(super) bytes: Vec<u8>,
    /// The likeliest tokens, likeliest first.
    pub(super) top_logprobs: Vec<TopLogprob>,
}

/// An alternative of a token.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub(super) struct TopLogprob {
    /// Its text.
    pub(super) token: String,
    /// Natural logarithm.
    pub(super) logprob: f32,
    /// Its bytes.
    pub(super) bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub(super) fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[ScoredToken]) {
        self.content.extend(tokens.iter().map(|t| chat_token(tokenizer, t)));
    }
}

fn chat_token(tokenizer: &Tokenizer, scored: &ScoredToken) -> TokenLogprob {
    let (token, bytes) = spelled(tokenizer, scored.id);
    let score = scored.score.as_ref();
    let top = score.map_or(&[][..], |s| &s.top).iter().map(|(id, logprob)| {
        let (token, bytes) = spelled(tokenizer, *id);
        TopLogprob { token, bytes, logprob: finite(*logprob) }
    });
    TokenLogprob {
        token,
        bytes,
        logprob: score.map_or(LEAST, |s| finite(s.logprob)),
        top_logprobs: top.collect(),
    }
}

/// Log probabilities of a completion, as parallel lists.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub(super) struct CompletionLogprobs {
    /// Where each token begins in the choice's text, in characters.
    pub(super) text_offset: Vec<u32>,
    /// Natural logarithms; null for the first token of an echoed prompt.
    pub(super) token_logprobs: Vec<Option<f32>>,
    /// Texts of the tokens.
    pub(super) tokens: Vec<String>,
    /// For each token, the likeliest tokens and itself; null for the first token of an echoed prompt.
    pub(super) top_logprobs: Vec<Option<Map<String, Value>>>,
}

impl CompletionLogprobs {
    /// Adds tokens whose offsets begin `base_chars` into the text.
    pub(super) fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[ScoredToken], base_chars: u32) {
        for scored in tokens {
            self.text_offset.push(base_chars.saturating_add(scored.offset_chars));
            let token = spelled(tokenizer, scored.id).0;
            self.token_logprobs.push(scored.score.as_ref().map(|s| finite(s.logprob)));
            self.top_logprobs.push(scored.score.as_ref().map(|s| {
                let mut map = Map::new();
                for (id, logprob) in &s.top {
                    // Several tokens may be spelled alike; the likeliest comes first and stays.
                    map.entry(spelled(tokenizer, *id).0).or_insert_with(|| finite(*logprob).into());
                }
                map.entry(token.clone()).or_insert_with(|| finite(s.logprob).into());
                map
            }));
            self.tokens.push(token);
        }
    }
}

fn spelled(tokenizer: &Tokenizer, id: u32) -> (String, Vec<u8>) {
    // Special tokens add nothing to a text, but have a name.
    let named = || tokenizer.id_to_token(id).unwrap_or_default().into_bytes();
    let bytes = tokenizer.token_bytes(id).unwrap_or_else(named);
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { LEAST }
}
