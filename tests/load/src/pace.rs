//! When the tokens of one answer are due.

use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// What a request asks of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Script {
    /// Tokens of the answer.
    pub tokens: u32,
    /// Time between two tokens, and before the first; 0 for all at once.
    pub pace_us: u64,
}

impl Script {
    /// Longest pace; a seed that was not meant as one is no reason to wait for ever.
    pub const MAX_PACE_US: u64 = 60_000_000;

    /// The script of a request's `max_tokens` and `seed`.
    #[must_use]
    pub fn new(max_tokens: u32, seed: u64) -> Self {
        Self { tokens: max_tokens.max(1), pace_us: seed.min(Self::MAX_PACE_US) }
    }
}

/// The clock of one answer. Times are absolute, so that a late token does not delay the ones after it.
#[derive(Debug)]
pub struct Pace {
    script: Script,
    start: Instant,
    sent: u32,
}

impl Pace {
    /// Starts now.
    #[must_use]
    pub fn start(script: Script) -> Self {
        Self { script, start: Instant::now(), sent: 0 }
    }

    /// Waits until the next token is due; `false` when there is none.
    pub async fn next(&mut self) -> bool {
        if self.sent == self.script.tokens {
            return false;
        }
        self.sent += 1;
        if self.script.pace_us > 0 {
            let due = Duration::from_micros(self.script.pace_us) * self.sent;
            sleep_until(self.start + due).await;
        }
        true
    }
}
