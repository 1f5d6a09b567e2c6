//! Which tokens may be drawn.
//!
//! Each filter keeps the likeliest tokens down to some rank, so together they keep the shortest of their lists.

use super::scan::{Scan, weight};
use std::cmp::Ordering;

/// A token that may be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub(super) token: u32,
    logit: f32,
    /// Relative to the likeliest token's.
    pub(super) weight: f32,
}

/// Temperature and filters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Filters {
    /// One over the temperature.
    pub(super) scale: f32,
    /// 0 keeps all.
    pub(super) top_k: usize,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
}

impl Filters {
    pub(super) fn keep_all(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }

    /// Fills `kept` with what may be drawn, in the order of the tokens. `scan` has read the logits, `top` is the
    /// largest of them and finite.
    pub(super) fn keep(
        &self,
        logits: &[f32],
        scan: &mut Scan,
        top: f32,
        kept: &mut Vec<Candidate>,
        scratch: &mut Vec<Candidate>,
    ) {
        let mut bound = self.bound_of_min_p(top);
        let mut total = None;
        if self.top_k > 0 {
            // The share of min_p is a cut of its own, after top_p has seen what it cuts off.
            let of_top_k = scan.bound_of_top(self.top_k).unwrap_or(f32::NEG_INFINITY);
            bound = if self.top_p < 1.0 { of_top_k } else { bound.max(of_top_k) };
        } else if self.top_p < 1.0 {
            let weight = scan.total_weight(logits, top, self.scale);
            bound = bound.max(self.bound_of_nucleus(top, weight, logits.len()));
            total = Some(weight);
        }
        kept.clear();
        scan.for_each_from(logits, bound, |token, logit| {
            kept.push(Candidate { token, logit, weight: weight(logit, top, self.scale) });
        });
        if self.top_k > 0 && self.top_k < kept.len() {
            scratch.clone_from(kept);
            let (_, &mut last, _) = scratch.select_nth_unstable_by(self.top_k - 1, likelier);
            kept.retain(|candidate| likelier(candidate, &last).is_le());
        }
        if self.top_p < 1.0 {
            let total = total.unwrap_or_else(|| sum(kept));
            scratch.clone_from(kept);
            if let Some(last) = last_of_nucleus(scratch, f64::from(self.top_p) * total) {
                kept.retain(|candidate| likelier(candidate, &last).is_le());
            }
        }
        if self.min_p > 0.0 {
            kept.retain(|candidate| candidate.weight >= self.min_p);
        }
    }

    /// A logit that none reaches which `min_p` would keep.
    fn bound_of_min_p(&self, top: f32) -> f32 {
        if self.min_p <= 0.0 {
            return f32::NEG_INFINITY;
        }
        // A little below, because the weights are rounded.
        below(top, (f64::from(self.min_p).ln() - 1e-3) / f64::from(self.scale))
    }

    /// A logit below which all tokens together weigh less than `top_p` leaves out.
    fn bound_of_nucleus(&self, top: f32, total: f64, n: usize) -> f32 {
        let left_out = (1.0 - f64::from(self.top_p)) * total / n as f64;
        below(top, (left_out.ln() - 1e-3) / f64::from(self.scale))
    }
}

/// The token at `point` (0 to 1) of the cumulated weights.
pub(super) fn draw(kept: &[Candidate], point: f64) -> Option<u32> {
    let mut left = point * sum(kept);
    for candidate in kept {
        left -= f64::from(candidate.weight);
        if left < 0.0 {
            return Some(candidate.token);
        }
    }
    // Rounding may leave a remainder past the end.
    kept.iter().rev().find(|candidate| candidate.weight > 0.0).map(|candidate| candidate.token)
}

/// Likelier first; of equal ones the lower token, so that the order is total.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

fn sum(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}

/// The least likely of the fewest tokens, likeliest first, whose weights reach `wanted`; `None` when all together do
/// not. Halves the range in question each time, so the work is linear.
fn last_of_nucleus(candidates: &mut [Candidate], wanted: f64) -> Option<Candidate> {
    if candidates.is_empty() || sum(candidates) < wanted {
        return None;
    }
    let (mut range, mut wanted) = (candidates, wanted);
    while range.len() > 1 {
        let middle = range.len() / 2;
        range.select_nth_unstable_by(middle, likelier);
        let (upper, lower) = range.split_at_mut(middle);
        let upper_sum = sum(upper);
        if upper_sum >= wanted {
            range = upper;
        } else {
            wanted -= upper_sum;
            range = lower;
        }
    }
    range.first().copied()
}

fn below(top: f32, by: f64) -> f32 {
    (f64::from(top) + by) as f32
}
