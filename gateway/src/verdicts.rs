//! Verdicts that can be read back for a while.

use parking_lot::Mutex;
use shared::verdict::Verdict;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Most verdicts kept; the oldest give way. About 4 MB.
const CAPACITY: usize = 8192;

/// The last verdicts, by request id.
#[derive(Default)]
pub(crate) struct VerdictStore(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    by_id: HashMap<String, Arc<Verdict>>,
    order: VecDeque<String>,
}

impl VerdictStore {
    /// Keeps a verdict; a later one of the same request replaces it.
    pub(crate) fn put(&self, verdict: Arc<Verdict>) {
        let mut kept = self.0.lock();
        let id = verdict.request_id.clone();
        if kept.by_id.insert(id.clone(), verdict).is_none() {
            kept.order.push_back(id);
        }
        if kept.order.len() > CAPACITY
            && let Some(oldest) = kept.order.pop_front()
        {
            kept.by_id.remove(&oldest);
        }
    }

    /// The verdict of a request, if it is still known.
    pub(crate) fn find(&self, request_id: &str) -> Option<Arc<Verdict>> {
        self.0.lock().by_id.get(request_id).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::verdict::{Parties, VerdictKind};

    #[test]
    fn the_store_is_bounded_and_the_last_verdict_counts() {
        let store = VerdictStore::default();
        let verdict = |i: usize, kind| {
            let parties = Parties { request_id: i.to_string(), ..Parties::default() };
            Arc::new(Verdict::without_receipt(kind, None, parties, 1))
        };
        for i in 0..CAPACITY + 10 {
            store.put(verdict(i, VerdictKind::Pending));
            store.put(verdict(i, VerdictKind::Native));
        }
        assert!(store.find("9").is_none());
        assert_eq!(store.find("10").unwrap().verdict, VerdictKind::Native);
        assert_eq!(store.0.lock().by_id.len(), CAPACITY);
    }
}
