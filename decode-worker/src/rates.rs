//! Measured speeds: what the planner believes about this worker.

use parking_lot::Mutex;
use shared::control::Rates;
use std::sync::Arc;
use std::time::Duration;

/// Weight of the newest prefill chunk. Chunks are few and long, so each counts for much.
const PREFILL_WEIGHT: f64 = 0.3;
/// Weight of the newest decoded token. Tokens are many and short.
const DECODE_WEIGHT: f64 = 0.05;
/// Shorter passes say more about overhead than about speed.
const MIN_PREFILL_TOKENS: usize = 16;

/// Exponentially weighted speeds; clones share them.
#[derive(Debug, Clone, Default)]
pub struct MeasuredRates(Arc<Mutex<Rates>>);

impl MeasuredRates {
    /// Notes a prefill pass.
    pub fn prefilled(&self, tokens: usize, took: Duration) {
        if tokens >= MIN_PREFILL_TOKENS {
            let mut rates = self.0.lock();
            blend(&mut rates.prefill_tokens_per_s, tokens as f64 / seconds(took), PREFILL_WEIGHT);
        }
    }

    /// Notes one decoded token.
    pub fn decoded(&self, took: Duration) {
        blend(&mut self.0.lock().decode_tokens_per_s, 1.0 / seconds(took), DECODE_WEIGHT);
    }

    /// The current values; 0 where nothing was measured.
    #[must_use]
    pub fn current(&self) -> Rates {
        *self.0.lock()
    }
}

fn seconds(took: Duration) -> f64 {
    took.as_secs_f64().max(1e-6)
}

fn blend(value: &mut f64, newest: f64, weight: f64) {
    *value = if *value == 0.0 { newest } else { *value + weight * (newest - *value) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_value_counts_fully_and_later_ones_by_weight() {
        let rates = MeasuredRates::default();
        rates.prefilled(15, Duration::from_secs(1));
        assert_eq!(rates.current().prefill_tokens_per_s, 0.0);
        rates.prefilled(100, Duration::from_secs(1));
        rates.prefilled(200, Duration::from_secs(1));
        assert!((rates.current().prefill_tokens_per_s - 130.0).abs() < 1e-9);
        rates.decoded(Duration::ZERO);
        assert!(rates.current().decode_tokens_per_s.is_finite());
    }
}
