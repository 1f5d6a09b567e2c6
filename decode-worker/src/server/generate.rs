//! One answer, from the wait for its transfer to its last token.

use super::Core;
use super::requests::{Prepared, Running};
use super::serving::{check_required, gather};
use crate::engine::{Job, JobEvent};
use crate::ingest::{Outcome, Transfer};
use crate::sampler::Sampler;
use shared::control::{DecodeEvent, GenerateSpec, Responder, WorkerError, WorkerErrorCode};
use shared::wire::{Abort, AbortCode};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Events that may wait for a slow connection before the answer pauses.
const EVENT_QUEUE: usize = 64;

/// Runs to the end, or until the request is cancelled, and says how it went.
pub(super) async fn run(
    core: Arc<Core>,
    prepared: Prepared,
    running: Running,
    spec: GenerateSpec,
    responder: Responder<DecodeEvent>,
) {
    let cancel = running.cancel.clone();
    let answered = tokio::select! {
        biased;
        () = cancel.cancelled() => Err(cancelled()),
        done = answer(&core, prepared, running, spec, &responder) => done,
    };
    if let Err(error) = answered {
        responder.send(&DecodeEvent::Error(error)).await;
    }
}

async fn answer(
    core: &Core,
    prepared: Prepared,
    running: Running,
    spec: GenerateSpec,
    responder: &Responder<DecodeEvent>,
) -> Result<(), WorkerError> {
    let invalid =
        |e: &dyn std::fmt::Display| WorkerError::new(WorkerErrorCode::InvalidRequest, e.to_string());
    let Prepared { tokens, lease, transfer, .. } = prepared;
    let sampler = Sampler::new(spec.sampling, &tokens).map_err(|e| invalid(&e))?;
    let waiting = Instant::now();
    let received = wait(transfer, Duration::from_millis(spec.transfer_timeout_ms)).await;
    let (served, mut receipt) = gather(tokens.len(), core.parts.block_tokens, lease, received);
    receipt.wait_ms = waiting.elapsed().as_secs_f64() * 1e3;
    check_required(spec.require, &receipt)?;

    let total = tokens.len() as u32;
    let (events, mut queue) = mpsc::channel(EVENT_QUEUE);
    core.parts.engine.generate(Job {
        served,
        receipt,
        max_new_tokens: spec.max_new_tokens.min(core.parts.hello.max_tokens.saturating_sub(total)),
        sampler,
        stop_token_ids: spec.stop_token_ids,
        library: core.library(),
        events,
        cancel: running.cancel.clone(),
        submitted: Instant::now(),
        prompt: tokens,
    });
    let mut running = Some(running);
    let mut next = queue.recv().await;
    while let Some(event) = next.take() {
        let (event, last) = match event {
            JobEvent::Progress(done_tokens) => {
                (DecodeEvent::Progress { done_tokens, total_tokens: total }, false)
            }
            JobEvent::Started(receipt) => (DecodeEvent::Started(receipt), false),
            JobEvent::Token(id) => {
                let mut ids = vec![id];
                // Tokens that piled up behind a slow connection go together.
                next = loop {
                    match queue.try_recv() {
                        Ok(JobEvent::Token(id)) => ids.push(id),
                        other => break other.ok(),
                    }
                };
                (DecodeEvent::Token { choice: 0, ids, logprobs: Vec::new() }, false)
            }
            JobEvent::Finished { reason, completion_tokens, decode_ms } => {
                (DecodeEvent::Finished { choice: 0, reason, completion_tokens, decode_ms }, true)
            }
            JobEvent::Failed(error) => {
                return Err(WorkerError::new(WorkerErrorCode::Engine, error.to_string()));
            }
        };
        if last {
            // Its place is free before the other side knows, who may come back at once.
            drop(running.take());
        }
        if !responder.send(&event).await || last {
            return Ok(());
        }
        if next.is_none() {
            next = queue.recv().await;
        }
    }
    Err(WorkerError::new(WorkerErrorCode::Engine, "the engine is gone"))
}

/// Waits for a transfer, no longer than `limit`. Returns the range asked for and how it ended.
pub(super) async fn wait(transfer: Option<Transfer>, limit: Duration) -> Option<(Range<u32>, Outcome)> {
    let mut transfer = transfer?;
    let asked = transfer.asked();
    let outcome = match tokio::time::timeout(limit, transfer.outcome()).await {
        Ok(outcome) => outcome,
        Err(_) => {
            let abort = Abort::new(AbortCode::Timeout, format!("no commit within {} ms", limit.as_millis()));
            transfer.control().abort(abort.clone());
            Err(abort)
        }
    };
    Some((asked, outcome))
}

pub(super) fn cancelled() -> WorkerError {
    WorkerError::new(WorkerErrorCode::Cancelled, "the request was cancelled")
}
