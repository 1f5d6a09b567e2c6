//! From logits to a token.
//!
//! Order of the filters is the usual one: temperature, then top-k, then top-p over what is left, then one
//! draw. A logit that is not a number is never chosen.

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use shared::control::Sampling;

/// Chooses the tokens of one answer. The same seed and logits give the same tokens on every machine.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: ChaCha8Rng,
}

/// Parameters outside their range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SamplingError {
    /// Negative or not a number.
    #[error("temperature must be a number of at least 0")]
    Temperature,
    /// Outside 0 to 1 or not a number.
    #[error("top_p must be between 0 and 1")]
    TopP,
}

impl Sampler {
    /// A sampler at the start of an answer.
    ///
    /// # Errors
    /// [`SamplingError`] for parameters outside their range.
    pub fn new(sampling: Sampling) -> Result<Self, SamplingError> {
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            return Err(SamplingError::Temperature);
        }
        if !(0.0..=1.0).contains(&sampling.top_p) {
            return Err(SamplingError::TopP);
        }
        Ok(Self { random: ChaCha8Rng::seed_from_u64(sampling.seed), sampling })
    }

    /// The next token, or `None` when no logit is a number.
    pub fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        let (best, top) = argmax(logits)?;
        if self.sampling.temperature == 0.0 || top.is_infinite() {
            return Some(best);
        }
        let scale = 1.0 / f64::from(self.sampling.temperature);
        // Weights relative to the largest: exp never overflows, and the best token's weight is 1.
        let weight = |logit: f32| ((f64::from(logit) - f64::from(top)) * scale).exp();
        let number = |&(_, &logit): &(usize, &f32)| !logit.is_nan();
        let mut kept: Vec<(u32, f64)> =
            logits.iter().enumerate().filter(number).map(|(i, &logit)| (i as u32, weight(logit))).collect();
        let k = self.sampling.top_k as usize;
        if k > 0 && k < kept.len() {
            kept.select_nth_unstable_by(k - 1, heavier);
            kept.truncate(k);
        }
        if self.sampling.top_p < 1.0 {
            kept.sort_unstable_by(heavier);
            keep_nucleus(&mut kept, f64::from(self.sampling.top_p));
        } else if k > 0 {
            // Selection leaves an unspecified order; the draw must not depend on it.
            kept.sort_unstable_by_key(|&(token, _)| token);
        }
        Some(draw(&kept, self.random.random::<f64>()).unwrap_or(best))
    }
}

/// Index and value of the largest number; of equal ones the first.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best: Option<(u32, f32)> = None;
    for (i, &logit) in logits.iter().enumerate() {
        if !logit.is_nan() && best.is_none_or(|(_, top)| logit > top) {
            best = Some((i as u32, logit));
        }
    }
    best
}

/// Heavier first; of equal ones the lower token, so that the order is total.
fn heavier(a: &(u32, f64), b: &(u32, f64)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Cuts a list, heaviest first, after the first tokens whose share of the total reaches `top_p`.
fn keep_nucleus(kept: &mut Vec<(u32, f64)>, top_p: f64) {
    let wanted = top_p * kept.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut sum = 0.0;
    let reached = kept.iter().position(|(_, weight)| {
        sum += weight;
        sum >= wanted
    });
    kept.truncate(reached.map_or(kept.len(), |at| at + 1));
}

/// The token at `point` (0 to 1) of the cumulated weights.
fn draw(kept: &[(u32, f64)], point: f64) -> Option<u32> {
    let mut left = point * kept.iter().map(|(_, weight)| weight).sum::<f64>();
    for &(token, weight) in kept {
        left -= weight;
        if left < 0.0 {
            return Some(token);
        }
    }
    // Rounding may leave a remainder past the end.
    kept.iter().rev().find(|(_, weight)| *weight > 0.0).map(|&(token, _)| token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain() -> Sampling {
        Sampling { seed: 7, ..Sampling::default() }
    }

    fn shares(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        const DRAWS: usize = 40_000;
        let mut sampler = Sampler::new(sampling).unwrap();
        let mut counts = vec![0; logits.len()];
        for _ in 0..DRAWS {
            counts[sampler.sample(logits).unwrap() as usize] += 1;
        }
        counts.into_iter().map(|n| f64::from(n) / DRAWS as f64).collect()
    }

    fn assert_shares(got: &[f64], expected: &[f64]) {
        for (g, e) in got.iter().zip(expected) {
            assert!((g - e).abs() < 0.012, "{got:?} instead of {expected:?}");
            assert!(*e > 0.0 || *g == 0.0, "a filtered token was drawn: {got:?}");
        }
    }

    /// Logits whose softmax is 0.5, 0.25, 0.15, 0.1.
    fn logits() -> [f32; 4] {
        [0.5f32, 0.25, 0.15, 0.1].map(f32::ln)
    }

    #[test]
    fn draws_follow_the_distribution() {
        assert_shares(&shares(plain(), &logits()), &[0.5, 0.25, 0.15, 0.1]);
        let hot = Sampling { temperature: 2.0, ..plain() };
        let roots = [0.5f64, 0.25, 0.15, 0.1].map(f64::sqrt);
        let sum: f64 = roots.iter().sum();
        assert_shares(&shares(hot, &logits()), &roots.map(|r| r / sum));
    }

    #[test]
    fn filters_keep_the_right_tokens() {
        let top_k = Sampling { top_k: 2, ..plain() };
        assert_shares(&shares(top_k, &logits()), &[2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
        let top_p = Sampling { top_p: 0.76, ..plain() };
        assert_shares(&shares(top_p, &logits()), &[0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0.0]);
        let both = Sampling { top_p: 0.6, top_k: 3, ..plain() };
        assert_shares(&shares(both, &logits()), &[2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
        let tiny = Sampling { top_p: 0.0, ..plain() };
        assert_shares(&shares(tiny, &logits()), &[1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        let mut greedy = Sampler::new(Sampling { temperature: 0.0, ..plain() }).unwrap();
        assert_eq!(greedy.sample(&[1.0, 3.0, 3.0, f32::NAN]), Some(1));
        assert_eq!(greedy.sample(&[f32::NAN, f32::NEG_INFINITY]), Some(1));
        assert_eq!(greedy.sample(&[f32::NAN]), None);
    }

    #[test]
    fn a_seed_fixes_the_answer() {
        let run = |seed| {
            let mut sampler = Sampler::new(Sampling { seed, ..plain() }).unwrap();
            (0..64).map(|_| sampler.sample(&logits()).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        // The generator is part of the promise: this answer must not change between releases.
        assert_eq!(run(0)[..12], FIXED);
    }

    const FIXED: [u32; 12] = [1, 0, 1, 0, 2, 1, 2, 3, 2, 0, 2, 2];

    #[test]
    fn absurd_parameters_are_refused() {
        for temperature in [-1.0, f32::NAN, f32::INFINITY] {
            let error = Sampler::new(Sampling { temperature, ..plain() }).unwrap_err();
            assert_eq!(error, SamplingError::Temperature);
        }
        for top_p in [-0.5, 1.5, f32::NAN] {
            assert_eq!(Sampler::new(Sampling { top_p, ..plain() }).unwrap_err(), SamplingError::TopP);
        }
    }

    proptest! {
        #[test]
        fn never_panics_and_never_draws_a_non_number(
            logits in prop::collection::vec(
                prop_oneof![any::<f32>(), Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)], 0..40),
            temperature in prop_oneof![Just(0.0f32), 1e-6f32..100.0],
            top_p in 0.001f32..=1.0,
            top_k in 0u32..50,
            seed: u64,
        ) {
            let mut sampler = Sampler::new(Sampling { temperature, top_p, top_k, seed, ..plain() }).unwrap();
            match sampler.sample(&logits) {
                Some(token) => prop_assert!(!logits[token as usize].is_nan()),
                None => prop_assert!(logits.iter().all(|x| x.is_nan())),
            }
        }
    }
}
