//! From logits to a token.
//!
//! Order as documented at [`Sampling`]: constraint mask, bias, penalties, temperature, top-k, top-p over what is
//! left, min-p, then one draw. A logit that is not a number is never chosen. Nothing here sorts the vocabulary:
//! filters look at block maxima first and touch only what can survive.

mod keep;
mod logprobs;
mod penalties;
mod scan;
#[cfg(test)]
mod tests;

pub use logprobs::log_probabilities;

use crate::constraint::TokenMask;
use keep::{Candidate, Filters, draw};
use penalties::Penalties;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use scan::Scan;
use shared::control::Sampling;

/// Largest size of a logit's bias.
const MAX_BIAS: f32 = 100.0;
/// Keeps zero times the scale a zero for the smallest temperatures.
const MAX_SCALE: f32 = 1e30;

/// Chooses the tokens of one answer. The same seed and logits give the same tokens on every machine.
#[derive(Debug)]
pub struct Sampler {
    filters: Filters,
    greedy: bool,
    logit_bias: Vec<(u32, f32)>,
    penalties: Penalties,
    random: ChaCha8Rng,
    scan: Scan,
    candidates: Vec<Candidate>,
    scratch: Vec<Candidate>,
}

/// Parameters outside their range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// Negative or not a number.
    #[error("temperature must be a number of at least 0")]
    Temperature,
    /// Outside 0 to 1 or not a number.
    #[error("top_p must be between 0 and 1")]
    TopP,
    /// Outside 0 to 1 or not a number.
    #[error("min_p must be between 0 and 1")]
    MinP,
    /// Not a finite number.
    #[error("{0} must be a finite number")]
    Penalty(&'static str),
    /// Zero, negative or not a number.
    #[error("repetition_penalty must be a number above 0")]
    RepetitionPenalty,
    /// Outside −100 to 100 or not a number.
    #[error("the bias of token {0} must be between -100 and 100")]
    LogitBias(u32),
}

impl Sampler {
    /// A sampler at the start of an answer to `prompt`.
    ///
    /// # Errors
    /// [`SamplingError`] for parameters outside their range.
    pub fn new(sampling: Sampling, prompt: &[u32]) -> Result<Self, SamplingError> {
        check(&sampling)?;
        Ok(Self {
            filters: Filters {
                scale: (1.0 / sampling.temperature).min(MAX_SCALE),
                top_k: sampling.top_k as usize,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
            },
            greedy: sampling.temperature == 0.0,
            penalties: Penalties::new(&sampling, prompt),
            logit_bias: sampling.logit_bias,
            random: ChaCha8Rng::seed_from_u64(sampling.seed),
            scan: Scan::default(),
            candidates: Vec::new(),
            scratch: Vec::new(),
        })
    }

    /// The next token, which becomes part of the answer so far; of `allowed` only. `None` when none is allowed whose
    /// logit is a number. The logits are changed.
    pub fn sample(&mut self, logits: &mut [f32], allowed: Option<&TokenMask>) -> Option<u32> {
        self.adjust(logits, allowed);
        let token = self.choose(logits)?;
        self.penalties.record(token);
        Some(token)
    }

    /// Mask, bias and penalties.
    fn adjust(&self, logits: &mut [f32], allowed: Option<&TokenMask>) {
        if let Some(allowed) = allowed {
            allowed.exclude_others(logits);
        }
        for &(token, bias) in &self.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        self.penalties.apply(logits);
    }

    fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        self.scan.read(logits);
        let (best, top) = self.scan.best(logits)?;
        if self.greedy || top.is_infinite() {
            return Some(best);
        }
        let point = self.random.random::<f64>();
        let drawn = if self.filters.keep_all() {
            self.scan.draw(logits, top, self.filters.scale, point)
        } else {
            self.filters.keep(logits, &mut self.scan, top, &mut self.candidates, &mut self.scratch);
            draw(&self.candidates, point)
        };
        Some(drawn.unwrap_or(best))
    }
}

fn check(sampling: &Sampling) -> Result<(), SamplingError> {
    if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
        return Err(SamplingError::Temperature);
    }
    if !(0.0..=1.0).contains(&sampling.top_p) {
        return Err(SamplingError::TopP);
    }
    if !(0.0..=1.0).contains(&sampling.min_p) {
        return Err(SamplingError::MinP);
    }
    if !sampling.presence_penalty.is_finite() {
        return Err(SamplingError::Penalty("presence_penalty"));
    }
    if !sampling.frequency_penalty.is_finite() {
        return Err(SamplingError::Penalty("frequency_penalty"));
    }
    if !(sampling.repetition_penalty > 0.0 && sampling.repetition_penalty.is_finite()) {
        return Err(SamplingError::RepetitionPenalty);
    }
    match sampling.logit_bias.iter().find(|(_, bias)| bias.is_nan() || bias.abs() > MAX_BIAS) {
        Some(&(token, _)) => Err(SamplingError::LogitBias(token)),
        None => Ok(()),
    }
}
