//! The prefill worker's side of one request.

use super::guard::PrefillGuard;
use crate::deadlines;
use crate::fleet::{DecodeLink, Pairing, PrefillLink};
use shared::control::{
    DecodeRequest, EventStream, Incoming, PrefillEvent, PrefillReport, PrefillRequest, PrefillSpec,
    TransferOffer, WorkerErrorCode,
};
use shared::hexbytes::Hex;
use shared::keys::BlockKey;
use shared::tokens::TokenIds;
use shared::wire::{Abort, AbortCode};
use std::sync::Arc;
use tokio::time::Instant;

/// A running prefill. It ends by itself, by [`Bridge::next`] reporting the end, or by being dropped.
pub(super) struct Bridge {
    link: Arc<PrefillLink>,
    pairing: Arc<Pairing>,
    events: Option<EventStream<PrefillEvent>>,
    guard: Option<PrefillGuard>,
    deadline: Instant,
    /// Keys of the prompt's full blocks.
    keys: Vec<BlockKey>,
}

/// News from the prefill worker.
pub(super) enum BridgeEvent {
    /// Positions done and in all.
    Progress(u32, u32),
    /// The decoder has confirmed everything.
    Done(PrefillReport),
    /// Nothing more will come; the decoder must be told.
    Broken(Abort),
}

impl Bridge {
    /// Asks the worker to read the prompt and to send what the offer names.
    pub(super) async fn start(
        (link, pairing): (Arc<PrefillLink>, Arc<Pairing>),
        decoder: &DecodeLink,
        request_id: &str,
        tokens: &TokenIds,
        keys: Vec<BlockKey>,
        offer: TransferOffer,
    ) -> Result<Self, Abort> {
        let queued = link.load.tokens();
        let length = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let limit = deadlines::prompt(length, queued, link.rates().prefill_tokens_per_s);
        let spec = PrefillSpec {
            request_id: request_id.to_owned(),
            tokens: tokens.clone(),
            fingerprint: decoder.hello.cache.as_ref().map_or(Hex([0; 32]), |c| c.fingerprint),
            offer,
            deadline_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        };
        let guard = PrefillGuard::new(&link, request_id, length);
        let events = link.client.request(&PrefillRequest::Prefill(spec)).await;
        let events = events.map_err(|e| Abort::new(AbortCode::ConnectionLost, e.to_string()))?;
        // The worker keeps the deadline itself; this one is for a worker that hangs.
        let deadline = Instant::now() + limit + deadlines::exchange(length);
        Ok(Self { link, pairing, events: Some(events), guard: Some(guard), deadline, keys })
    }

    /// The worker's prefill rate in tokens per second (0: unknown) and the prompt tokens it has been asked for.
    pub(super) fn outlook(&self) -> (f64, u64) {
        (self.link.rates().prefill_tokens_per_s, self.link.load.tokens())
    }

    /// The next news; never resolves once the bridge has ended.
    pub(super) async fn next(&mut self) -> BridgeEvent {
        let Some(events) = &mut self.events else { return std::future::pending().await };
        let next = tokio::time::timeout_at(self.deadline, events.next()).await;
        let event = match next {
            Ok(Some(Incoming::Event(PrefillEvent::Progress { done_tokens, total_tokens }))) => {
                return BridgeEvent::Progress(done_tokens, total_tokens);
            }
            Ok(Some(Incoming::Event(PrefillEvent::Done(report)))) => {
                self.link.learn(report.rates);
                self.pairing.learn(&report);
                self.link.seen.insert(&self.keys);
                self.released();
                BridgeEvent::Done(report)
            }
            Ok(Some(Incoming::Event(PrefillEvent::Error(error)))) => {
                self.released();
                BridgeEvent::Broken(Abort::new(abort_code(error.code), error.message))
            }
            Ok(Some(other)) => {
                BridgeEvent::Broken(Abort::new(AbortCode::ProtocolError, format!("unexpected {other:?}")))
            }
            Ok(None) => {
                BridgeEvent::Broken(Abort::new(AbortCode::ConnectionLost, "the prefill worker was lost"))
            }
            Err(_) => BridgeEvent::Broken(Abort::new(AbortCode::Timeout, "the prefill worker took too long")),
        };
        self.events = None;
        // Dropping the guard cancels, unless the worker has ended the request itself.
        self.guard = None;
        event
    }

    fn released(&mut self) {
        if let Some(guard) = &mut self.guard {
            guard.ended();
        }
    }
}

/// Tells the decoder that nothing more will come.
pub(super) fn abort_transfer(decoder: &DecodeLink, request_id: &str, abort: Abort) {
    decoder.client.notify(&DecodeRequest::AbortTransfer { request_id: request_id.to_owned(), abort });
}

fn abort_code(code: WorkerErrorCode) -> AbortCode {
    match code {
        WorkerErrorCode::Busy => AbortCode::PrefillBusy,
        WorkerErrorCode::Timeout => AbortCode::Timeout,
        WorkerErrorCode::Cancelled => AbortCode::Cancelled,
        WorkerErrorCode::Incompatible => AbortCode::FingerprintMismatch,
        // If the receiver had a better reason, it knows it already and keeps it.
        WorkerErrorCode::TransferFailed => AbortCode::ConnectionLost,
        _ => AbortCode::PrefillFailed,
    }
}
