//! The prefill worker's side of one request.

use super::guard::PrefillGuard;
use crate::deadlines;
use crate::fleet::{DecodeLink, Pairing, PrefillLink};
use shared::control::{
    ControlError, DecodeRequest, EventStream, Incoming, PrefillEvent, PrefillReport, PrefillRequest,
    PrefillSpec, TransferOffer, WorkerErrorCode,
};
use shared::hexbytes::Hex;
use shared::keys::BlockKey;
use shared::tokens::TokenIds;
use shared::trace::{self, Span};
use shared::wire::{Abort, AbortCode};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// A running prefill. It ends by itself, by [`Bridge::next`] reporting the end, or by being dropped.
pub(super) struct Bridge {
    link: Arc<PrefillLink>,
    pairing: Arc<Pairing>,
    decoder: Arc<DecodeLink>,
    /// What was asked, as long as it may have to be asked again.
    spec: Option<Box<PrefillSpec>>,
    /// Introducing the decoder again and asking again.
    renewal: Option<Renewal>,
    events: Option<EventStream<PrefillEvent>>,
    guard: Option<PrefillGuard>,
    deadline: Instant,
    /// Keys of the prompt's full blocks.
    keys: Arc<[BlockKey]>,
    span: Span,
    began: SystemTime,
}

type Renewal = AbortOnDropHandle<Result<EventStream<PrefillEvent>, ControlError>>;

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
        decoder: &Arc<DecodeLink>,
        request_id: &str,
        tokens: &TokenIds,
        keys: Arc<[BlockKey]>,
        offer: TransferOffer,
    ) -> Result<Self, Abort> {
        pairing.tried();
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
        let (span, began) = (Span::below("prefill", trace::current().as_ref()), SystemTime::now());
        let request = PrefillRequest::Prefill(spec.clone());
        let events = trace::scope(span.context(), link.client.request(&request)).await;
        let events = events.map_err(|e| {
            pairing.failed(AbortCode::ConnectionLost);
            Abort::new(AbortCode::ConnectionLost, e.to_string())
        })?;
        // The worker keeps the deadline itself; this one is for a worker that hangs.
        let deadline = Instant::now() + limit + deadlines::exchange(length);
        let (decoder, spec) = (decoder.clone(), Some(Box::new(spec)));
        let (events, guard, renewal) = (Some(events), Some(guard), None);
        Ok(Self { link, pairing, decoder, spec, renewal, events, guard, deadline, keys, span, began })
    }

    /// The worker's prefill rate in tokens per second (0: unknown) and the prompt tokens it has been asked for.
    pub(super) fn outlook(&self) -> (f64, u64) {
        (self.link.rates().prefill_tokens_per_s, self.link.load.tokens())
    }

    /// The next news; never resolves once the bridge has ended. May be dropped and called again at any time.
    pub(super) async fn next(&mut self) -> BridgeEvent {
        loop {
            if let Some(renewal) = &mut self.renewal {
                let renewed = tokio::time::timeout_at(self.deadline, renewal).await;
                self.renewal = None;
                match renewed {
                    Ok(Ok(Ok(events))) => self.events = Some(events),
                    Ok(Ok(Err(error))) => {
                        return self.broken(Abort::new(AbortCode::PrefillFailed, error.to_string()));
                    }
                    Ok(Err(error)) => return self.broken(Abort::new(AbortCode::Internal, error.to_string())),
                    Err(_) => return self.news(Err(())),
                }
            }
            let Some(events) = &mut self.events else { return std::future::pending().await };
            let next = tokio::time::timeout_at(self.deadline, events.next()).await;
            match &next {
                Ok(Some(Incoming::Event(PrefillEvent::Error(error))))
                    if error.code == WorkerErrorCode::NotPaired && self.spec.is_some() =>
                {
                    self.renewal = self.spec.take().map(|spec| self.renew(spec));
                }
                _ => return self.news(next.map_err(|_| ())),
            }
        }
    }

    /// The worker has forgotten the decoder, and said so before it touched the transfer: introduces it and asks once
    /// more.
    fn renew(&self, spec: Box<PrefillSpec>) -> Renewal {
        let (link, pairing, decoder) = (self.link.clone(), self.pairing.clone(), self.decoder.clone());
        let again = async move {
            pairing.renew(&decoder, &link).await?;
            link.client.request(&PrefillRequest::Prefill(*spec)).await
        };
        AbortOnDropHandle::new(tokio::spawn(trace::scope(self.span.context(), again)))
    }

    fn broken(&mut self, abort: Abort) -> BridgeEvent {
        self.pairing.failed(abort.code);
        self.span.fail(abort.to_string());
        drop(std::mem::take(&mut self.span));
        self.events = None;
        // Dropping the guard cancels, unless the worker has ended the request itself.
        self.guard = None;
        BridgeEvent::Broken(abort)
    }

    fn news(&mut self, next: Result<Option<Incoming<PrefillEvent>>, ()>) -> BridgeEvent {
        let abort = match next {
            Ok(Some(Incoming::Event(PrefillEvent::Progress { done_tokens, total_tokens }))) => {
                self.spec = None;
                return BridgeEvent::Progress(done_tokens, total_tokens);
            }
            Ok(Some(Incoming::Event(PrefillEvent::Done(report)))) => {
                self.link.learn(report.rates);
                self.pairing.learn(&report);
                self.link.seen.insert(&self.keys);
                self.released();
                drop(std::mem::take(&mut self.span));
                // The worker says how much of the time came after its last layer.
                let reading =
                    Duration::from_secs_f64((report.queue_ms + report.prefill_ms).max(0.0) / 1000.0);
                Span::past("transfer", trace::current().as_ref(), self.began + reading, report.transfer_ms);
                (self.events, self.guard) = (None, None);
                return BridgeEvent::Done(report);
            }
            Ok(Some(Incoming::Event(PrefillEvent::Error(error)))) => {
                self.released();
                Abort::new(abort_code(error.code), error.message)
            }
            Ok(Some(other)) => Abort::new(AbortCode::ProtocolError, format!("unexpected {other:?}")),
            Ok(None) => Abort::new(AbortCode::ConnectionLost, "the prefill worker was lost"),
            Err(()) => Abort::new(AbortCode::Timeout, "the prefill worker took too long"),
        };
        self.broken(abort)
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
        WorkerErrorCode::Incompatible | WorkerErrorCode::NotPaired => AbortCode::FingerprintMismatch,
        // If the receiver had a better reason, it knows it already and keeps it.
        WorkerErrorCode::TransferFailed => AbortCode::ConnectionLost,
        _ => AbortCode::PrefillFailed,
    }
}
