//! What of a prompt is served from where: pure functions, and the facts of a receipt.

use crate::engine::{Holds, Served};
use crate::ingest::{Committed, Outcome};
use crate::store::{Lease, Origin};
use shared::control::{DecodeReceipt, Require, WorkerError, WorkerErrorCode};
use shared::wire::{Abort, AbortCode};
use std::ops::Range;

/// Which blocks serve a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sources {
    /// Resident blocks used, from the first on.
    pub(super) resident_blocks: usize,
    /// Whether the transfer's blocks follow them.
    pub(super) transfer: bool,
    /// Positions served.
    pub(super) cached_tokens: usize,
    /// Positions of those that the transfer brought.
    pub(super) bridged_tokens: usize,
}

/// Takes whatever reaches further: resident blocks alone, or those before the transfer and the transfer.
pub(super) fn choose(
    block_tokens: usize,
    resident_blocks: usize,
    committed: Option<Range<usize>>,
) -> Sources {
    let resident = resident_blocks * block_tokens;
    match committed {
        Some(range) if range.end > resident && range.start <= resident => Sources {
            resident_blocks: range.start / block_tokens,
            transfer: true,
            cached_tokens: range.end,
            bridged_tokens: range.len(),
        },
        _ => Sources { resident_blocks, transfer: false, cached_tokens: resident, bridged_tokens: 0 },
    }
}

/// Whether a request may go on with what was served.
pub(super) fn check_required(require: Require, receipt: &DecodeReceipt) -> Result<(), WorkerError> {
    let met = match require {
        Require::Nothing => true,
        Require::Any => receipt.cached_tokens > 0,
        Require::Complete => receipt.cached_tokens + 1 == receipt.prompt_tokens,
    };
    if met {
        return Ok(());
    }
    let why = receipt.transfer_failure.as_ref().map_or_else(
        || format!("{} of {} prompt tokens are there", receipt.cached_tokens, receipt.prompt_tokens),
        ToString::to_string,
    );
    Err(WorkerError::new(WorkerErrorCode::BridgeRequired, why))
}

/// Gathers the blocks that serve a prompt of `prompt_tokens`, with a receipt of the facts so far.
pub(super) fn gather(
    prompt_tokens: usize,
    block_tokens: usize,
    lease: Lease,
    transfer: Option<(Range<u32>, Outcome)>,
) -> (Served, DecodeReceipt) {
    // A lease that expired holds nothing; keeping it decides that before its blocks are counted.
    let resident = if lease.keep() { lease.blocks().unwrap_or_default() } else { Vec::new() };
    let (asked, committed, mut failure) = match transfer {
        None => (0..0, None, None),
        Some((asked, Ok(committed))) => (asked, Some(committed), None),
        Some((asked, Err(abort))) => (asked, None, Some(abort)),
    };
    if let Some(committed) = &committed
        && committed.token_end < asked.end
    {
        let text = committed.short_reason.clone().unwrap_or_else(|| "the sender stopped early".to_owned());
        failure = Some(Abort::new(AbortCode::Incomplete, text));
    }
    let range = committed.as_ref().map(|c| c.token_start as usize..c.token_end as usize);
    let sources = choose(block_tokens, resident.len(), range);
    let native = resident.iter().take(sources.resident_blocks).filter(|(_, o)| *o == Origin::Native).count();
    let mut receipt = receipt(prompt_tokens, sources, failure);
    let mut served = Served {
        blocks: resident.into_iter().take(sources.resident_blocks).map(|(block, _)| block).collect(),
        holds: Holds { leases: vec![lease], reservations: Vec::new() },
    };
    if let Some(committed) = committed {
        receipt.payload_bytes = committed.payload_bytes;
        receipt.digest = Some(committed.digest);
        let Committed { blocks, lease, tail, .. } = committed;
        if sources.transfer {
            served.blocks.extend(blocks);
            served.holds.leases.push(lease);
            served.holds.reservations.push(tail);
        }
    }
    receipt.blocks = (sources.cached_tokens / block_tokens) as u32;
    tracing::debug!(
        cached = sources.cached_tokens,
        bridged_now = sources.bridged_tokens,
        resident_native_blocks = native,
        resident_bridged_blocks = sources.resident_blocks - native,
        "prompt served"
    );
    (served, receipt)
}

fn receipt(prompt_tokens: usize, sources: Sources, transfer_failure: Option<Abort>) -> DecodeReceipt {
    DecodeReceipt {
        prompt_tokens: prompt_tokens as u32,
        cached_tokens: sources.cached_tokens as u32,
        bridged_tokens: sources.bridged_tokens as u32,
        native_tokens: (prompt_tokens - sources.cached_tokens) as u32,
        blocks: 0,
        payload_bytes: 0,
        digest: None,
        transfer_failure,
        queue_ms: 0.0,
        wait_ms: 0.0,
        ingest_ms: 0.0,
        prefill_ms: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_longer_source_serves() {
        let none = Sources { resident_blocks: 3, transfer: false, cached_tokens: 12, bridged_tokens: 0 };
        assert_eq!(choose(4, 3, None), none);
        let joined = Sources { resident_blocks: 3, transfer: true, cached_tokens: 18, bridged_tokens: 6 };
        assert_eq!(choose(4, 3, Some(12..18)), joined);
        let overlapping =
            Sources { resident_blocks: 1, transfer: true, cached_tokens: 18, bridged_tokens: 14 };
        assert_eq!(choose(4, 3, Some(4..18)), overlapping);
        assert_eq!(choose(4, 3, Some(4..11)), none);
        // Its prefix is gone: what arrived can't be used.
        assert!(!choose(4, 2, Some(12..18)).transfer);
    }

    #[test]
    fn requirements_follow_the_receipt() {
        let facts = |cached| {
            let sources =
                Sources { resident_blocks: 0, transfer: true, cached_tokens: cached, bridged_tokens: cached };
            receipt(10, sources, Some(Abort::new(AbortCode::Checksum, "x")))
        };
        assert!(check_required(Require::Nothing, &facts(0)).is_ok());
        assert!(check_required(Require::Any, &facts(1)).is_ok());
        assert!(check_required(Require::Complete, &facts(9)).is_ok());
        assert!(check_required(Require::Complete, &facts(8)).is_err());
        let error = check_required(Require::Any, &facts(0)).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (WorkerErrorCode::BridgeRequired, "checksum: x"));
    }

    proptest! {
        #[test]
        fn numbers_fit_together(resident in 0usize..8, start in 0usize..8, len in 1usize..30) {
            let (start, end) = (start * 4, start * 4 + len);
            let s = choose(4, resident, Some(start..end));
            prop_assert!(s.cached_tokens >= resident * 4);
            prop_assert!(s.bridged_tokens <= s.cached_tokens);
            prop_assert!(s.resident_blocks <= resident);
            prop_assert_eq!(s.cached_tokens, s.resident_blocks * 4 + s.bridged_tokens);
        }
    }
}
