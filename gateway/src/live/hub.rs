//! The table of requests: those running, and the last ones that ended.

use super::record::{Ending, Record, Stage};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::value::RawValue;
use shared::control::PrefillReport;
use shared::verdict::Verdict;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Ended requests that a new viewer is shown.
const RECENT: usize = 200;
/// Ended requests beyond those that are dropped together.
const TRIM_BATCH: usize = 50;
/// Most requests in one update; the newest come first, so that a viewer of a busy gateway sees what is new.
const MAX_IN_UPDATE: usize = 300;

/// All requests that can be watched. Writing to it costs a short lock per change of a request, and two atomic
/// additions per token.
#[derive(Debug)]
pub(crate) struct Live {
    enabled: bool,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Grows with every change; a request carries its value of its own last change.
    clock: AtomicU64,
    requests: Mutex<VecDeque<Arc<Entry>>>,
    in_flight: AtomicU32,
    begun: AtomicU64,
    completion_tokens: AtomicU64,
}

#[derive(Debug)]
struct Entry {
    changed: AtomicU64,
    completion_tokens: AtomicU64,
    record: Mutex<Record>,
}

/// Sums since the gateway started.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Totals {
    /// Requests running now.
    pub(crate) in_flight: u32,
    /// Requests begun.
    pub(crate) requests: u64,
    /// Answer tokens.
    pub(crate) completion_tokens: u64,
}

/// What has changed since a moment on the table's clock.
#[derive(Debug)]
pub(super) struct Changes {
    /// The moment up to which this tells everything.
    pub(super) clock: u64,
    /// Changed requests as JSON, newest first.
    pub(super) requests: Vec<Box<RawValue>>,
}

impl Live {
    /// An empty table; one that is not enabled keeps nothing.
    pub(crate) fn new(enabled: bool) -> Self {
        Self { enabled, shared: Arc::default() }
    }

    /// Whether anything is kept.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Adds a request; it is shown as left when the handle is dropped without another ending.
    pub(crate) fn begin(&self, id: &str, prompt_tokens: u32, arrived: Instant) -> Watched {
        if !self.enabled {
            return Watched(None);
        }
        let began_ms = unix_ms() - arrived.elapsed().as_secs_f64() * 1000.0;
        let record = Record::new(id.to_owned(), prompt_tokens, arrived, began_ms);
        let shared = &self.shared;
        shared.in_flight.fetch_add(1, Ordering::Relaxed);
        shared.begun.fetch_add(1, Ordering::Relaxed);
        let entry = Arc::new(Entry {
            changed: AtomicU64::new(shared.tick()),
            completion_tokens: AtomicU64::new(0),
            record: Mutex::new(record),
        });
        let mut requests = shared.requests.lock();
        requests.push_back(entry.clone());
        drop(requests);
        Watched(Some(Handle { entry, shared: shared.clone() }))
    }

    /// Sums.
    pub(crate) fn totals(&self) -> Totals {
        let s = &self.shared;
        Totals {
            in_flight: s.in_flight.load(Ordering::Relaxed),
            requests: s.begun.load(Ordering::Relaxed),
            completion_tokens: s.completion_tokens.load(Ordering::Relaxed),
        }
    }

    /// Everything that changed after `since`; 0 gives the whole table.
    pub(super) fn changes(&self, since: u64) -> Changes {
        // Read before the entries: a change in between is told twice rather than never.
        let clock = self.shared.clock.load(Ordering::Acquire);
        let changed: Vec<Arc<Entry>> = {
            let requests = self.shared.requests.lock();
            let newest = requests.iter().rev();
            newest
                .filter(|e| e.changed.load(Ordering::Acquire) > since)
                .take(MAX_IN_UPDATE)
                .cloned()
                .collect()
        };
        Changes { clock, requests: changed.iter().filter_map(|entry| entry.to_json()).collect() }
    }
}

impl Shared {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Forgets the oldest ended requests beyond what new viewers are shown.
    fn trim(&self) {
        let in_flight = self.in_flight.load(Ordering::Relaxed) as usize;
        let mut requests = self.requests.lock();
        let mut surplus = requests.len().saturating_sub(RECENT + in_flight);
        // In batches, because each pass looks at every entry.
        if surplus >= TRIM_BATCH {
            requests.retain(|entry| {
                let drop_it = surplus > 0 && entry.record.lock().ending.is_some();
                surplus -= usize::from(drop_it);
                !drop_it
            });
        }
    }
}

impl Entry {
    fn to_json(&self) -> Option<Box<RawValue>> {
        #[derive(Serialize)]
        struct Seen<'a> {
            #[serde(flatten)]
            record: &'a Record,
            completion_tokens: u64,
            age_ms: f64,
        }
        let record = self.record.lock();
        let completion_tokens = self.completion_tokens.load(Ordering::Relaxed);
        serde_json::value::to_raw_value(&Seen { record: &record, completion_tokens, age_ms: record.age_ms() })
            .ok()
    }
}

/// One request's handle; all verbs do nothing when the table is not enabled.
#[derive(Debug)]
pub(crate) struct Watched(Option<Handle>);

#[derive(Debug)]
struct Handle {
    entry: Arc<Entry>,
    shared: Arc<Shared>,
}

impl Watched {
    /// The request is with these workers.
    pub(crate) fn workers(&self, prefill: Option<&str>, decode: Option<&str>) {
        self.change(|r| {
            r.prefill = prefill.map(str::to_owned);
            r.decode = decode.map(str::to_owned);
        });
    }

    /// A stage begins.
    pub(crate) fn enter(&self, stage: Stage) {
        self.change(|r| r.enter(stage));
    }

    /// `done` prompt positions of `total` are read.
    pub(crate) fn progress(&self, stage: Stage, done: u32, total: u32) {
        self.change(|r| {
            let all_read = stage == Stage::Prefill && done >= total;
            r.enter(if all_read { Stage::Transfer } else { stage });
            r.done_tokens = done;
        });
    }

    /// The prefill worker has reported.
    pub(crate) fn transferred(&self, report: &PrefillReport) {
        self.change(|r| r.measured_transfer(report.transfer_ms));
    }

    /// The verdict is final, the answer begins.
    pub(crate) fn started(&self, verdict: &Verdict) {
        self.change(|r| {
            r.done_tokens = r.prompt_tokens;
            r.verdict = Some(verdict.clone());
            r.enter(Stage::Decode);
        });
    }

    /// More tokens of the answer.
    pub(crate) fn tokens(&self, n: u32) {
        if let Some(Handle { entry, shared }) = &self.0 {
            entry.completion_tokens.fetch_add(u64::from(n), Ordering::Relaxed);
            shared.completion_tokens.fetch_add(u64::from(n), Ordering::Relaxed);
            entry.changed.store(shared.tick(), Ordering::Release);
        }
    }

    /// The answer is whole.
    pub(crate) fn answered(&self) {
        self.change(|r| r.end(Ending::Answered));
    }

    /// The request failed, with this verdict.
    pub(crate) fn failed(&self, verdict: &Verdict) {
        self.change(|r| {
            r.verdict = Some(verdict.clone());
            r.end(Ending::Failed);
        });
    }

    fn change(&self, change: impl FnOnce(&mut Record)) {
        if let Some(Handle { entry, shared }) = &self.0 {
            change(&mut entry.record.lock());
            entry.changed.store(shared.tick(), Ordering::Release);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.entry.record.lock().end(Ending::Left);
        self.entry.changed.store(self.shared.tick(), Ordering::Release);
        self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.shared.trim();
    }
}

/// Milliseconds since 1970.
pub(super) fn unix_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64() * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn seen(live: &Live, since: u64) -> (u64, Vec<Value>) {
        let changes = live.changes(since);
        let values = changes.requests.iter().map(|raw| serde_json::from_str(raw.get()).unwrap());
        (changes.clock, values.collect())
    }

    #[test]
    fn a_viewer_is_told_only_what_changed() {
        let live = Live::new(true);
        let (a, b) = (live.begin("a", 5, Instant::now()), live.begin("b", 6, Instant::now()));
        let (clock, all) = seen(&live, 0);
        assert_eq!(all.iter().map(|r| r["id"].as_str().unwrap()).collect::<Vec<_>>(), ["b", "a"]);
        assert!(seen(&live, clock).1.is_empty());
        a.progress(Stage::Prefill, 2, 5);
        b.tokens(3);
        let (_, changed) = seen(&live, clock);
        assert_eq!(changed.len(), 2);
        assert_eq!((&changed[1]["done_tokens"], &changed[0]["completion_tokens"]), (&2.into(), &3.into()));
        assert_eq!(live.totals().completion_tokens, 3);
    }

    #[test]
    fn the_end_is_seen_and_the_past_is_bounded() {
        let live = Live::new(true);
        let kept = live.begin("kept", 1, Instant::now());
        for i in 0..RECENT + 3 * TRIM_BATCH {
            live.begin(&i.to_string(), 1, Instant::now()).answered();
        }
        assert!(live.shared.requests.lock().len() <= RECENT + TRIM_BATCH + 1);
        assert_eq!(live.totals().in_flight, 1);
        assert!(seen(&live, 0).1.iter().any(|r| r["id"] == "kept" && r["ending"].is_null()));
        drop(kept);
        let (_, all) = seen(&live, 0);
        assert!(all.iter().all(|r| r["id"] != "kept" || r["ending"] == "left"));
        assert_eq!(live.totals().in_flight, 0);
    }

    #[test]
    fn all_positions_read_means_transfer() {
        let live = Live::new(true);
        let a = live.begin("a", 5, Instant::now());
        a.enter(Stage::Prefill);
        a.progress(Stage::Prefill, 4, 4);
        assert_eq!(seen(&live, 0).1[0]["stages"][2]["stage"], "transfer");
    }

    #[test]
    fn a_disabled_table_keeps_nothing() {
        let live = Live::new(false);
        let a = live.begin("a", 5, Instant::now());
        a.tokens(1);
        assert!(seen(&live, 0).1.is_empty());
        assert_eq!(live.totals().requests, 0);
    }
}
