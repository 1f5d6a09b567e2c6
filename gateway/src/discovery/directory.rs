//! The machines on the bus, for whoever wants to see them.

use super::roster::{Entry, Heard, Roster};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What is known of the bus. The listener writes, everyone reads.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    pub(super) roster: Mutex<Roster>,
    /// What became of the heartbeats.
    pub(crate) tally: Tally,
}

/// Heartbeats by what became of them.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    taken: AtomicU64,
    stale: AtomicU64,
    rival: AtomicU64,
    too_many: AtomicU64,
    malformed: AtomicU64,
}

impl Directory {
    /// All machines by name, with the time since each was heard.
    pub(crate) fn nodes(&self) -> Vec<(Entry, Duration)> {
        let roster = self.roster.lock();
        roster.nodes(Instant::now()).map(|(entry, age)| (entry.clone(), age)).collect()
    }

    /// Whether the bus is there.
    pub(crate) fn is_bus_up(&self) -> bool {
        self.roster.lock().is_bus_up()
    }
}

impl Tally {
    pub(super) fn heard(&self, heard: Heard) {
        let counter = match heard {
            Heard::Taken => &self.taken,
            Heard::Stale => &self.stale,
            Heard::Rival => &self.rival,
            Heard::TooMany => &self.too_many,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn malformed(&self) {
        self.malformed.fetch_add(1, Ordering::Relaxed);
    }

    /// Name and count of each result.
    pub(crate) fn counts(&self) -> [(&'static str, u64); 5] {
        let count = |c: &AtomicU64| c.load(Ordering::Relaxed);
        [
            ("taken", count(&self.taken)),
            ("stale", count(&self.stale)),
            ("rival", count(&self.rival)),
            ("too_many", count(&self.too_many)),
            ("malformed", count(&self.malformed)),
        ]
    }
}
