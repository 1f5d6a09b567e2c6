//! Whether a command is fresh: a pure function of what was seen before.

use crate::hexbytes::Hex;
use std::collections::{BTreeSet, HashSet};

/// Remembers the nonces of accepted commands for as long as they could be accepted again, and no more than
/// `capacity` of them.
///
/// Nothing is ever accepted twice, whatever the node's clock does: what is forgotten raises `horizon_ms`, the
/// latest issue time among forgotten commands, and nothing issued up to then is taken any more.
#[derive(Debug, Clone)]
pub struct ReplayWindow {
    tolerance_ms: u64,
    capacity: usize,
    horizon_ms: u64,
    /// By issue time, to forget the oldest first.
    by_time: BTreeSet<(u64, Hex<16>)>,
    seen: HashSet<Hex<16>>,
}

/// Why a command is not fresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotFresh {
    /// Issued too long ago.
    #[error("issued {0} ms ago by this node's clock")]
    Stale(u64),
    /// Issued too far in the future.
    #[error("issued {0} ms in the future of this node's clock")]
    FromTheFuture(u64),
    /// Issued before a time that this node remembers.
    #[error("issued before this agent's memory begins; send it again in {0} ms")]
    BeforeMemory(u64),
    /// Seen before.
    #[error("seen before")]
    Replayed,
    /// No room to remember one more.
    #[error("too many commands within the window")]
    Full,
}

impl ReplayWindow {
    /// A window that takes commands issued at most `tolerance_ms` before or after the node's clock.
    #[must_use]
    pub fn new(tolerance_ms: u64, capacity: usize) -> Self {
        Self { tolerance_ms, capacity, horizon_ms: 0, by_time: BTreeSet::new(), seen: HashSet::new() }
    }

    /// Takes nothing that an earlier life of this node, whose memory is lost, could have taken until `now_ms`.
    pub fn forget_the_past(&mut self, now_ms: u64) {
        self.horizon_ms = self.horizon_ms.max(now_ms.saturating_add(self.tolerance_ms));
    }

    /// Puts a command back that an earlier life of this node took.
    pub fn recall(&mut self, issued_at_ms: u64, nonce: Hex<16>) {
        if self.seen.len() < self.capacity {
            self.remember(issued_at_ms, nonce);
        } else {
            self.horizon_ms = self.horizon_ms.max(issued_at_ms);
        }
    }

    /// Takes a command once.
    ///
    /// # Errors
    /// [`NotFresh`]; nothing changes then.
    pub fn take(&mut self, now_ms: u64, issued_at_ms: u64, nonce: Hex<16>) -> Result<(), NotFresh> {
        if let Some(age_ms) = now_ms.checked_sub(issued_at_ms).filter(|age| *age > self.tolerance_ms) {
            return Err(NotFresh::Stale(age_ms));
        }
        if let Some(ahead_ms) = issued_at_ms.checked_sub(now_ms).filter(|ahead| *ahead > self.tolerance_ms) {
            return Err(NotFresh::FromTheFuture(ahead_ms));
        }
        if self.seen.contains(&nonce) {
            return Err(NotFresh::Replayed);
        }
        self.expire(now_ms);
        if issued_at_ms <= self.horizon_ms {
            return Err(NotFresh::BeforeMemory(self.horizon_ms - issued_at_ms + 1));
        }
        if self.seen.len() >= self.capacity {
            return Err(NotFresh::Full);
        }
        self.remember(issued_at_ms, nonce);
        Ok(())
    }

    /// What must survive this process: issue times and nonces.
    pub fn remembered(&self) -> impl Iterator<Item = (u64, Hex<16>)> + '_ {
        self.by_time.iter().copied()
    }

    /// Nothing issued up to this time is taken.
    #[must_use]
    pub fn horizon_ms(&self) -> u64 {
        self.horizon_ms
    }

    /// Nothing issued up to `horizon_ms` is taken any more.
    pub fn raise_horizon(&mut self, horizon_ms: u64) {
        self.horizon_ms = self.horizon_ms.max(horizon_ms);
    }

    fn remember(&mut self, issued_at_ms: u64, nonce: Hex<16>) {
        if self.seen.insert(nonce) {
            self.by_time.insert((issued_at_ms, nonce));
        }
    }

    fn expire(&mut self, now_ms: u64) {
        let oldest_ms = now_ms.saturating_sub(self.tolerance_ms);
        while let Some(&(issued_at_ms, nonce)) = self.by_time.first() {
            if issued_at_ms >= oldest_ms {
                break;
            }
            self.by_time.pop_first();
            self.seen.remove(&nonce);
            self.horizon_ms = self.horizon_ms.max(issued_at_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nonce(n: u8) -> Hex<16> {
        Hex([n; 16])
    }

    #[test]
    fn the_window_has_two_edges() {
        let mut window = ReplayWindow::new(100, 10);
        assert_eq!(window.take(1000, 899, nonce(1)), Err(NotFresh::Stale(101)));
        assert_eq!(window.take(1000, 1101, nonce(1)), Err(NotFresh::FromTheFuture(101)));
        assert_eq!(window.take(1000, 900, nonce(1)), Ok(()));
        assert_eq!(window.take(1000, 1100, nonce(2)), Ok(()));
        assert_eq!(window.take(1000, 900, nonce(1)), Err(NotFresh::Replayed));
    }

    #[test]
    fn a_clock_that_is_set_back_opens_nothing() {
        let mut window = ReplayWindow::new(100, 10);
        window.take(1000, 1000, nonce(1)).unwrap();
        window.take(2000, 2000, nonce(2)).unwrap();
        assert_eq!(window.remembered().count(), 1, "the first is forgotten");
        assert!(matches!(window.take(1000, 1000, nonce(1)), Err(NotFresh::BeforeMemory(_))));
    }

    #[test]
    fn memory_is_bounded_and_never_makes_room_for_a_replay() {
        let mut window = ReplayWindow::new(100, 2);
        window.take(1000, 1000, nonce(1)).unwrap();
        window.take(1000, 1000, nonce(2)).unwrap();
        assert_eq!(window.take(1000, 1000, nonce(3)), Err(NotFresh::Full));
        assert_eq!(window.take(1101, 1101, nonce(3)), Ok(()), "room again when the old ones can't come back");
    }

    #[test]
    fn a_lost_memory_takes_nothing_that_it_may_have_taken() {
        let mut window = ReplayWindow::new(100, 10);
        window.forget_the_past(1000);
        assert!(matches!(window.take(1010, 1100, nonce(1)), Err(NotFresh::BeforeMemory(1))));
        assert_eq!(window.take(1101, 1101, nonce(2)), Ok(()));
    }

    proptest! {
        /// Whatever the clock does, with restarts that keep or lose the memory, nothing is taken twice.
        #[test]
        fn nothing_is_taken_twice(steps in proptest::collection::vec((0u64..400, 0u64..400, 0u8..12, 0u8..20), 1..200)) {
            let mut window = ReplayWindow::new(50, 4);
            let mut taken = HashSet::new();
            let mut latest_ms = 0;
            for (now_ms, issued_at_ms, n, restart) in steps {
                latest_ms = now_ms.max(latest_ms);
                match restart {
                    0 => {
                        let mut next = ReplayWindow::new(50, 4);
                        next.raise_horizon(window.horizon_ms());
                        window.remembered().for_each(|(t, n)| next.recall(t, n));
                        window = next;
                    }
                    // A lost memory trusts that the clock was not set back while the agent was down.
                    1 => {
                        window = ReplayWindow::new(50, 4);
                        window.forget_the_past(latest_ms);
                    }
                    _ => {}
                }
                // A nonce belongs to one command, so it comes with one issue time.
                let issued_at_ms = (issued_at_ms / 12) * 12 + u64::from(n);
                let nonce = Hex([n; 16]);
                let key = (issued_at_ms, n);
                if window.take(now_ms, issued_at_ms, nonce).is_ok() {
                    prop_assert!(taken.insert(key), "{key:?} twice");
                }
            }
        }
    }
}
