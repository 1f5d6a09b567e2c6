//! How full the decoders' prefix stores are, asked when someone wants to know.

use crate::fleet::{DecodeLink, Fleet};
use futures_util::future::join_all;
use shared::control::{DecodeEvent, DecodeRequest, DecodeStats};
use std::time::Duration;

/// A decoder that does not answer within this is left out.
const ANSWER_LIMIT: Duration = Duration::from_millis(200);

/// The filled share of all decoders' stores together, 0 to 1; `None` when no decoder says.
pub(super) async fn share(fleet: &Fleet) -> Option<f64> {
    let decoders = fleet.decoders();
    let stats = join_all(decoders.iter().map(|decoder| stats(decoder))).await;
    filled(&stats.into_iter().flatten().collect::<Vec<_>>())
}

async fn stats(decoder: &DecodeLink) -> Option<DecodeStats> {
    match decoder.client.call(&DecodeRequest::GetStats, ANSWER_LIMIT).await {
        Ok(DecodeEvent::Stats(stats)) => Some(stats),
        _ => None,
    }
}

fn filled(stats: &[DecodeStats]) -> Option<f64> {
    let budget: u64 = stats.iter().map(|s| s.store_budget_bytes).sum();
    let used: u64 = stats.iter().map(|s| s.store_bytes).sum();
    (budget > 0).then(|| (used as f64 / budget as f64).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_count_by_their_size() {
        let stats = |store_bytes, store_budget_bytes| DecodeStats {
            store_bytes,
            store_budget_bytes,
            ..DecodeStats::default()
        };
        assert_eq!(filled(&[]), None);
        assert_eq!(filled(&[stats(0, 0)]), None);
        assert_eq!(filled(&[stats(25, 100), stats(75, 300)]), Some(0.25));
        assert_eq!(filled(&[stats(200, 100)]), Some(1.0));
    }
}
