//! Penalties on tokens that were there before.

use shared::control::Sampling;
use std::collections::HashMap;

/// What the prompt and the answer so far do to the next logits.
///
/// The repetition penalty counts prompt and answer (as in Hugging Face transformers and vLLM), presence and frequency
/// count the answer alone (as in OpenAI's definition and vLLM).
#[derive(Debug)]
pub(super) struct Penalties {
    presence: f32,
    frequency: f32,
    repetition: f32,
    /// Tokens of the prompt, each once; empty when nothing depends on them.
    prompt: Vec<u32>,
    /// How often the answer has each token; stays empty when nothing depends on it.
    answer: HashMap<u32, u32>,
}

impl Penalties {
    pub(super) fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let mut seen = if sampling.repetition_penalty == 1.0 { Vec::new() } else { prompt.to_vec() };
        seen.sort_unstable();
        seen.dedup();
        Self {
            presence: sampling.presence_penalty,
            frequency: sampling.frequency_penalty,
            repetition: sampling.repetition_penalty,
            prompt: seen,
            answer: HashMap::new(),
        }
    }

    /// Adds a token to the answer.
    pub(super) fn record(&mut self, token: u32) {
        if self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0 {
            *self.answer.entry(token).or_default() += 1;
        }
    }

    pub(super) fn apply(&self, logits: &mut [f32]) {
        if self.repetition != 1.0 {
            let of_answer = self.answer.keys().filter(|token| self.prompt.binary_search(token).is_err());
            for &token in self.prompt.iter().chain(of_answer) {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = if *logit > 0.0 { *logit / self.repetition } else { *logit * self.repetition };
                }
            }
        }
        if self.presence != 0.0 || self.frequency != 0.0 {
            for (&token, &times) in &self.answer {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit -= self.presence + self.frequency * times as f32;
                }
            }
        }
    }
}
