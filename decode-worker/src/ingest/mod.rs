//! Transfers: cache frames from a prefill worker, received, checked and made visible all at once.
//!
//! [`Transfers::open`] issues a one-use ticket for a token range whose bytes are already reserved. Whoever
//! connects to the bulk port with that ticket is checked against this decoder's fingerprint, layout and the
//! request's tokens; then frames are placed, and the commit decides. On any doubt nothing becomes visible.

mod answers;
mod assembly;
mod coverage;
mod fault;
mod listener;
mod receive;
#[cfg(test)]
mod tests;

pub use listener::serve_bulk;

use crate::block::BlockBytes;
use crate::store::{Lease, Reservation};
use parking_lot::Mutex;
use receive::Opened;
use shared::control::TransferOffer;
use shared::hexbytes::Hex;
use shared::keys::BlockKey;
use shared::layout::CacheLayout;
use shared::wire::{Abort, AbortCode};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use subtle::ConstantTimeEq as _;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// What a sender must agree with.
#[derive(Debug, Clone)]
pub struct Expected {
    /// This decoder's fingerprint.
    pub fingerprint: Hex<32>,
    /// This decoder's cache layout.
    pub layout: Arc<CacheLayout>,
    /// Its digest.
    pub layout_digest: Hex<32>,
}

/// All transfers of this worker; clones share them.
#[derive(Debug, Clone)]
pub struct Transfers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    expected: Expected,
    bulk_addr: String,
    open: Mutex<HashMap<Hex<16>, Slot>>,
}

/// A transfer that is not over; `door` is there until its ticket is used.
#[derive(Debug)]
struct Slot {
    ticket: Hex<16>,
    door: Option<oneshot::Sender<Opened>>,
}

/// What one transfer is about.
#[derive(Debug)]
pub struct TransferPlan {
    /// Digest of the whole prompt.
    pub tokens_digest: [u8; 32],
    /// First position; a block border.
    pub token_start: u32,
    /// End (exclusive); above the start.
    pub token_end: u32,
    /// Keys of the full blocks of the range, in order.
    pub keys: Vec<BlockKey>,
    /// Longest time without a frame, or unopened.
    pub idle_timeout: Duration,
    /// Holds the bytes of the whole range.
    pub reservation: Reservation,
}

/// How a transfer ended.
pub type Outcome = Result<Committed, Abort>;

/// A transfer whose every check passed.
#[derive(Debug)]
pub struct Committed {
    /// First position.
    pub token_start: u32,
    /// End (exclusive); less than planned when the sender stopped early.
    pub token_end: u32,
    /// Its blocks in order; the last may be shorter than a block.
    pub blocks: Vec<Arc<BlockBytes>>,
    /// Keeps the full ones in the store.
    pub lease: Lease,
    /// Accounts for the last one if it is short: it belongs to the request alone.
    pub tail: Reservation,
    /// Payload bytes received.
    pub payload_bytes: u64,
    /// Digest computed here.
    pub digest: Hex<32>,
    /// Why the sender stopped early, if it did.
    pub short_reason: Option<String>,
}

/// A running transfer. Dropping it ends the transfer and closes its connection.
#[derive(Debug)]
pub struct Transfer {
    asked: Range<u32>,
    control: TransferControl,
    outcome: oneshot::Receiver<Outcome>,
}

/// Ends a transfer from elsewhere.
#[derive(Debug, Clone, Default)]
pub struct TransferControl {
    stop: CancellationToken,
    reason: Arc<OnceLock<Abort>>,
}

impl Transfers {
    /// No transfers yet; senders are told to connect to `bulk_addr`.
    #[must_use]
    pub fn new(expected: Expected, bulk_addr: String) -> Self {
        Self { shared: Arc::new(Shared { expected, bulk_addr, open: Mutex::default() }) }
    }

    /// Opens a transfer. Must be called within a tokio runtime.
    #[must_use]
    pub fn open(&self, plan: TransferPlan) -> (TransferOffer, Transfer) {
        let (transfer_id, ticket) = (Hex::random(), Hex::random());
        let offer = TransferOffer {
            transfer_id,
            ticket,
            bulk_addr: self.shared.bulk_addr.clone(),
            token_start: plan.token_start,
            token_end: plan.token_end,
        };
        let asked = plan.token_start..plan.token_end;
        let (door, opened) = oneshot::channel();
        let (report, outcome) = oneshot::channel();
        let control = TransferControl::default();
        self.shared.open.lock().insert(transfer_id, Slot { ticket, door: Some(door) });
        let open = OpenTransfer { shared: self.shared.clone(), id: transfer_id };
        tokio::spawn(receive::run(open, plan, opened, control.clone(), report));
        (offer, Transfer { asked, control, outcome })
    }

    /// Number of transfers that are not over.
    #[must_use]
    pub fn n_open(&self) -> usize {
        self.shared.open.lock().len()
    }

    /// Uses a ticket: the way to the transfer's task, once.
    fn claim(&self, id: &Hex<16>, ticket: &Hex<16>) -> Option<oneshot::Sender<Opened>> {
        let mut open = self.shared.open.lock();
        let slot = open.get_mut(id)?;
        if bool::from(slot.ticket.0.ct_eq(&ticket.0)) { slot.door.take() } else { None }
    }
}

/// Keeps a transfer in the list of open ones.
struct OpenTransfer {
    shared: Arc<Shared>,
    id: Hex<16>,
}

impl Drop for OpenTransfer {
    fn drop(&mut self) {
        self.shared.open.lock().remove(&self.id);
    }
}

impl Transfer {
    /// Waits for the end.
    pub async fn outcome(&mut self) -> Outcome {
        match (&mut self.outcome).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Abort::new(AbortCode::Internal, "the transfer's task is gone")),
        }
    }

    /// The planned range of positions.
    #[must_use]
    pub fn asked(&self) -> Range<u32> {
        self.asked.clone()
    }

    /// A handle that can end the transfer from elsewhere.
    #[must_use]
    pub fn control(&self) -> TransferControl {
        self.control.clone()
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.control.abort(Abort::new(AbortCode::Cancelled, "the request is over"));
    }
}

impl TransferControl {
    /// Ends the transfer now, unless it is over; the first reason counts.
    pub fn abort(&self, reason: Abort) {
        let _ = self.reason.set(reason);
        self.stop.cancel();
    }

    async fn stopped(&self) -> Abort {
        self.stop.cancelled().await;
        let reason = self.reason.get().cloned();
        reason.unwrap_or_else(|| Abort::new(AbortCode::Cancelled, "the request is over"))
    }
}
