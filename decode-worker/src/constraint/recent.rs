//! Constraints compiled lately: a conversation brings the same tools with every turn.

use super::Matcher;
use parking_lot::Mutex;
use shared::control::Constraint;
use std::collections::VecDeque;

/// Constraints that are kept.
const CAPACITY: usize = 32;

/// The most recently used matchers, at the start of an answer.
#[derive(Debug, Default)]
pub(super) struct Recent(Mutex<VecDeque<(Constraint, Matcher)>>);

impl Recent {
    /// A matcher for the constraint, if it was compiled lately. It has caches of its own, so that those kept here do
    /// not grow.
    pub(super) fn take(&self, constraint: &Constraint) -> Option<Matcher> {
        let mut kept = self.0.lock();
        let at = kept.iter().position(|(known, _)| known == constraint)?;
        let entry = kept.remove(at)?;
        let matcher = entry.1.fresh();
        kept.push_front(entry);
        Some(matcher)
    }

    /// Keeps a matcher that has not begun.
    pub(super) fn put(&self, constraint: &Constraint, matcher: &Matcher) {
        let mut kept = self.0.lock();
        kept.retain(|(known, _)| known != constraint);
        kept.truncate(CAPACITY - 1);
        kept.push_front((constraint.clone(), matcher.fresh()));
    }
}
