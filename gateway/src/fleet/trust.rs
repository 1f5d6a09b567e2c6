//! Whether a pair of workers is worth a try, after transfers between them that failed.

use shared::wire::AbortCode;
use std::time::Duration;
use tokio::time::Instant;

/// Failures in a row that may be chance: a restart, a cable that was moved.
const TOLERATED: u32 = 3;
/// Rest after one failure more than that; doubled with each further one.
const FIRST_REST: Duration = Duration::from_secs(5);
const LONGEST_REST: Duration = Duration::from_secs(60);

/// What the last transfers of a pair say. A pair that fails again and again rests, so that no prompt waits for a
/// transfer that won't come; after each rest one request tries it again.
#[derive(Debug, Default)]
pub(super) struct Trust {
    failures: u32,
    rests_until: Option<Instant>,
}

impl Trust {
    /// Whether requests that have another way should take it.
    pub(super) fn is_resting(&self, now: Instant) -> bool {
        self.rests_until.is_some_and(|until| now < until)
    }

    /// A request tries the pair; until it is known how that ends, others keep away from one that has rested.
    pub(super) fn tried(&mut self, now: Instant) {
        if self.failures >= TOLERATED {
            self.rests_until = Some(now + rest(self.failures));
        }
    }

    /// A transfer ended well.
    pub(super) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// A transfer failed. Returns the rest that begins with it, if any.
    pub(super) fn failed(&mut self, code: AbortCode, now: Instant) -> Option<Duration> {
        if !blames_the_pair(code) {
            return None;
        }
        self.failures = self.failures.saturating_add(1);
        let rest = (self.failures >= TOLERATED).then(|| rest(self.failures))?;
        self.rests_until = Some(now + rest);
        Some(rest)
    }
}

fn rest(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(TOLERATED).min(8);
    (FIRST_REST * 2u32.pow(doublings)).min(LONGEST_REST)
}

/// Whether the next request would meet the same. Being busy, full or cancelled is of the moment.
fn blames_the_pair(code: AbortCode) -> bool {
    !matches!(code, AbortCode::PrefillBusy | AbortCode::OverBudget | AbortCode::Cancelled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_rests_longer_and_longer_and_one_success_clears_it() {
        let start = Instant::now();
        let mut trust = Trust::default();
        assert_eq!(trust.failed(AbortCode::Checksum, start), None);
        assert_eq!(trust.failed(AbortCode::Timeout, start), None);
        let rests: Vec<_> = (0..6).map(|_| trust.failed(AbortCode::ConnectionLost, start)).collect();
        let seconds = |s| Some(Duration::from_secs(s));
        assert_eq!(rests, [seconds(5), seconds(10), seconds(20), seconds(40), seconds(60), seconds(60)]);
        assert!(trust.is_resting(start + Duration::from_secs(59)));
        assert!(!trust.is_resting(start + Duration::from_secs(60)));
        trust.succeeded();
        assert!(!trust.is_resting(start));
        assert_eq!(trust.failed(AbortCode::Checksum, start), None);
    }

    #[test]
    fn after_a_rest_one_request_tries_it() {
        let start = Instant::now();
        let mut trust = Trust::default();
        for _ in 0..TOLERATED {
            trust.failed(AbortCode::PrefillFailed, start);
        }
        let later = start + FIRST_REST;
        assert!(!trust.is_resting(later));
        trust.tried(later);
        assert!(trust.is_resting(later) && !trust.is_resting(later + FIRST_REST));
    }

    #[test]
    fn what_is_of_the_moment_counts_for_nothing() {
        let mut trust = Trust::default();
        for code in [AbortCode::PrefillBusy, AbortCode::OverBudget, AbortCode::Cancelled].repeat(5) {
            assert_eq!(trust.failed(code, Instant::now()), None);
        }
        trust.tried(Instant::now());
        assert!(!trust.is_resting(Instant::now()));
    }
}
