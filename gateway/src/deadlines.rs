//! How long to wait for what: pure functions that grow with the prompt and follow measured rates.

use std::time::Duration;

/// Added to every wait: scheduling, connecting, a restarted page cache.
const GRACE: Duration = Duration::from_secs(20);
/// Estimates may be this many times too optimistic.
const SLACK: f64 = 4.0;
/// Speed assumed while nothing was measured; slower than any machine that is of use.
const UNKNOWN_TOKENS_PER_S: f64 = 25.0;
/// Longest stretch of prompt that a worker may compute without a sign of life.
const CHUNK_TOKENS: u64 = 4096;

/// Wait for an answer that takes no computing (prepare, open a transfer).
pub(crate) fn exchange(prompt_tokens: u32) -> Duration {
    // A million tokens are several megabytes of JSON and hashing.
    GRACE + Duration::from_micros(20 * u64::from(prompt_tokens))
}

/// Wait for `tokens` of prompt to be computed at `tokens_per_s` (0: unknown), with others' `queued` before it.
pub(crate) fn prompt(tokens: u32, queued: u64, tokens_per_s: f64) -> Duration {
    compute(u64::from(tokens) + queued, tokens_per_s)
}

/// Longest silence of a transfer: two chunks' worth of computing plus what is queued before it.
pub(crate) fn transfer_idle(tokens: u32, queued: u64, tokens_per_s: f64) -> Duration {
    compute(u64::from(tokens).min(2 * CHUNK_TOKENS) + queued, tokens_per_s)
}

/// Longest wait between two tokens of an answer.
pub(crate) fn next_token(tokens_per_s: f64) -> Duration {
    compute(64, tokens_per_s)
}

fn compute(tokens: u64, tokens_per_s: f64) -> Duration {
    let rate = if tokens_per_s > 0.0 { tokens_per_s } else { UNKNOWN_TOKENS_PER_S };
    // A week is beyond any use and keeps the sum inside `Duration` and `Instant`.
    GRACE + Duration::try_from_secs_f64(SLACK * tokens as f64 / rate).unwrap_or(WEEK).min(WEEK)
}

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_grow_with_the_prompt_and_follow_the_rate() {
        assert!(prompt(400_000, 0, 100.0) > Duration::from_secs(4000));
        assert!(prompt(400_000, 0, 100.0) > prompt(1000, 0, 100.0));
        assert!(prompt(1000, 0, 1000.0) < prompt(1000, 0, 10.0));
        assert!(prompt(1000, 50_000, 100.0) > prompt(1000, 0, 100.0));
        assert_eq!(prompt(u32::MAX, u64::from(u32::MAX), 1e-9), GRACE + WEEK);
        assert!(transfer_idle(400_000, 0, 100.0) < prompt(400_000, 0, 100.0));
    }
}
