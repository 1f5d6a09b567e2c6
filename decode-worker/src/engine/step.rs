//! The pass in which all answers under way get their next token.

use super::Engine;
use super::active::Active;
use crate::rates::MeasuredRates;
use std::time::Instant;

/// Decodes one token for each of `rows` (a request and which of its answers). If the pass fails, all their requests
/// end: what is in their caches is unknown then.
pub(super) fn decode<E: Engine>(
    engine: &E,
    active: &mut [Active<E>],
    rows: &[(usize, usize)],
    rates: &MeasuredRates,
) {
    let mut taken = Vec::with_capacity(rows.len());
    for &(request, choice) in rows {
        if let Some((sequence, token)) = active.get_mut(request).and_then(|job| job.take_row(choice)) {
            taken.push((request, choice, sequence, token));
        }
    }
    if taken.is_empty() {
        return;
    }
    let start = Instant::now();
    let mut batch: Vec<_> = taken.iter_mut().map(|(_, _, sequence, token)| (sequence, *token)).collect();
    let computed = engine.decode_batch(&mut batch);
    rates.decoded(start.elapsed());
    match computed {
        Ok(logits) => {
            for ((request, choice, sequence, _), logits) in taken.into_iter().zip(logits) {
                active[request].stepped(choice, sequence, logits);
            }
        }
        Err(error) => {
            for (request, ..) in taken {
                active[request].fail(error.clone());
            }
        }
    }
}
