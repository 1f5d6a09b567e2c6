//! One prefill request: the engine reads, the network sends, whichever fails first ends both.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shared::control::{
    PrefillEvent, PrefillReport, PrefillSpec, Rates, Responder, WorkerError, WorkerErrorCode,
};
use shared::hexbytes::Hex;
use shared::keys::tokens_digest;
use shared::layout::CacheLayout;
use shared::wire::{Abort, AbortCode, Open};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Booked;
use super::outbox::{Gauge, Outbox, Waiting};
use super::transfer::Transfer;
use crate::engine::{Engine, Job, JobReport};

/// Part of the deadline that is kept for sending, committing and the receipt.
const COMMIT_SHARE: f64 = 0.1;

/// What a request needs of the server.
pub(super) struct Request {
    pub(super) spec: PrefillSpec,
    pub(super) layout: Arc<CacheLayout>,
    pub(super) engine: Engine,
    pub(super) gauge: Arc<Gauge>,
    pub(super) cancel: CancellationToken,
    pub(super) arrived: Instant,
}

/// Why a request ended without a receipt.
enum Failure {
    /// The receiver or the connection to it.
    Transfer(Abort),
    /// The engine, which may be because the request was cancelled.
    Engine(WorkerError),
    /// The gateway cancelled, or is gone.
    Cancelled,
    /// Time is up.
    Deadline,
}

impl Request {
    /// Runs to the end and says how it went, off the books by then.
    pub(super) async fn run(self, booked: Booked, responder: &Responder<PrefillEvent>) {
        let event = match self.attempt(responder).await {
            Ok(report) => PrefillEvent::Done(report),
            Err(failure) => PrefillEvent::Error(failure.into_worker_error()),
        };
        // The engine must not go on for a request that has ended.
        self.cancel.cancel();
        drop(booked);
        responder.send(&event).await;
    }

    async fn attempt(&self, responder: &Responder<PrefillEvent>) -> Result<PrefillReport, Failure> {
        let deadline = self.arrived + Duration::from_millis(self.spec.deadline_ms);
        let offer = &self.spec.offer;
        let open = Open {
            ticket: offer.ticket,
            fingerprint: self.spec.fingerprint,
            layout_digest: Hex(self.layout.digest()),
            tokens_digest: Hex(tokens_digest(&self.spec.tokens)),
            token_start: offer.token_start,
            token_end: offer.token_end,
        };
        let mut transfer = tokio::select! {
            opened = Transfer::open(&offer.bulk_addr, offer.transfer_id, &open) => opened.map_err(Failure::Transfer)?,
            failure = self.interrupted(deadline) => return Err(failure),
        };
        let result = tokio::select! {
            result = self.stream(&mut transfer, responder) => result,
            failure = self.interrupted(deadline) => Err(failure),
        };
        if let Err(failure) = &result {
            self.cancel.cancel();
            transfer.abort(&failure.as_abort()).await;
        }
        result
    }

    /// Resolves when the request must end early, with the reason.
    async fn interrupted(&self, deadline: Instant) -> Failure {
        tokio::select! {
            () = self.cancel.cancelled() => Failure::Cancelled,
            () = tokio::time::sleep_until(deadline.into()) => Failure::Deadline,
        }
    }

    async fn stream(
        &self,
        transfer: &mut Transfer,
        responder: &Responder<PrefillEvent>,
    ) -> Result<PrefillReport, Failure> {
        let (outbox, mut pieces) = Outbox::new(&self.layout, self.gauge.clone());
        let reading = self.engine.read(self.job(outbox, responder.clone()));
        tokio::pin!(reading);
        let job = loop {
            tokio::select! {
                biased;
                Some(waiting) = pieces.recv() => send(transfer, waiting).await?,
                read = &mut reading => break read.map_err(Failure::Engine)?,
                abort = transfer.ended() => return Err(Failure::Transfer(abort)),
            }
        };
        // The engine answers after its last piece was delivered, so whatever is left is here.
        self.send_rest(transfer, &mut pieces).await?;
        self.commit(transfer, job).await
    }

    async fn send_rest(
        &self,
        transfer: &mut Transfer,
        pieces: &mut mpsc::Receiver<Waiting>,
    ) -> Result<(), Failure> {
        while let Ok(waiting) = pieces.try_recv() {
            send(transfer, waiting).await?;
        }
        Ok(())
    }

    async fn commit(&self, transfer: &mut Transfer, job: JobReport) -> Result<PrefillReport, Failure> {
        let start = self.spec.offer.token_start;
        let end = u32::try_from(job.end).unwrap_or(u32::MAX);
        if end <= start {
            return Err(Failure::Deadline);
        }
        let receipt = transfer.commit(start, end, job.short_reason).await.map_err(Failure::Transfer)?;
        self.gauge.sent(receipt.payload_bytes, transfer.busy());
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(PrefillReport {
            computed_tokens: count(job.computed_tokens),
            reused_tokens: count(job.reused_tokens),
            queue_ms: ms(job.queue),
            prefill_ms: ms(job.prefill),
            transfer_ms: ms(job.finished.elapsed()),
            payload_bytes: receipt.payload_bytes,
            token_end: receipt.token_end,
            digest: receipt.digest,
            rates: Rates { prefill_tokens_per_s: self.engine.prefill_tokens_per_s(), ..Rates::default() },
        })
    }

    fn job(&self, outbox: Outbox, responder: Responder<PrefillEvent>) -> Job {
        let total_tokens = self.spec.offer.token_end;
        let budget = Duration::from_millis(self.spec.deadline_ms).mul_f64(1.0 - COMMIT_SHARE);
        Job {
            tokens: self.spec.tokens.clone(),
            fingerprint: self.spec.fingerprint,
            wanted: self.spec.offer.token_start as usize..total_tokens as usize,
            sink: Arc::new(outbox),
            cancel: self.cancel.clone(),
            deadline: self.arrived + budget,
            progress: Box::new(move |done| {
                let done_tokens = u32::try_from(done).unwrap_or(u32::MAX);
                // Progress is only told; a gateway that is behind misses some of it.
                let _ = responder.try_send(&PrefillEvent::Progress { done_tokens, total_tokens });
            }),
            arrived: self.arrived,
        }
    }
}

async fn send(transfer: &mut Transfer, waiting: Waiting) -> Result<(), Failure> {
    transfer.send(&waiting.piece).await.map_err(Failure::Transfer)
}

impl Failure {
    /// As the decoder hears it.
    fn as_abort(&self) -> Abort {
        match self {
            Self::Transfer(abort) => abort.clone(),
            Self::Engine(error) if error.code == WorkerErrorCode::Cancelled => Self::Cancelled.as_abort(),
            Self::Engine(error) => Abort::new(AbortCode::PrefillFailed, error.message.clone()),
            Self::Cancelled => Abort::new(AbortCode::Cancelled, "the request was cancelled"),
            Self::Deadline => Abort::new(AbortCode::Timeout, "the prefill deadline passed"),
        }
    }

    /// As the gateway hears it.
    fn into_worker_error(self) -> WorkerError {
        let code = match self {
            Self::Engine(error) => return error,
            Self::Transfer(_) => WorkerErrorCode::TransferFailed,
            Self::Cancelled => WorkerErrorCode::Cancelled,
            Self::Deadline => WorkerErrorCode::Timeout,
        };
        WorkerError::new(code, self.as_abort().to_string())
    }
}
