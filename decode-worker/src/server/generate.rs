//! The answers to one prompt, from the wait for its transfer to their last token.

use super::Core;
use super::invalid;
use super::requests::{Prepared, Running};
use super::serving::{check_required, gather};
use crate::engine::{Job, JobEvent, Served};
use crate::ingest::{Outcome, Transfer};
use crate::sampler::Sampler;
use shared::control::{
    DecodeEvent, DecodeReceipt, GenerateSpec, Responder, Sampling, WorkerError, WorkerErrorCode,
};
use shared::wire::{Abort, AbortCode};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Events that may wait for a slow connection before the answers pause.
const EVENT_QUEUE: usize = 64;
/// Most answers to one prompt.
const MAX_CHOICES: u32 = 128;
/// Most likeliest tokens told per position.
const MAX_TOP_LOGPROBS: u32 = 100;
/// Log probabilities of a prompt in one message.
const PROMPT_LOGPROBS_PER_EVENT: usize = 128;

/// What can be refused without looking at the prompt.
pub(super) fn check(spec: &GenerateSpec) -> Result<(), WorkerError> {
    if !(1..=MAX_CHOICES).contains(&spec.choices) {
        return Err(invalid(format!("choices must be between 1 and {MAX_CHOICES}, not {}", spec.choices)));
    }
    match spec.logprobs.max(spec.prompt_logprobs) {
        Some(top) if top > MAX_TOP_LOGPROBS => Err(invalid(format!(
            "log probabilities of at most {MAX_TOP_LOGPROBS} tokens are told, not of {top}"
        ))),
        _ => Ok(()),
    }
}

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
    let Prepared { tokens, lease, transfer, constraint, .. } = prepared;
    let samplers = samplers(&spec.sampling, spec.choices, &tokens)?;
    let waiting = Instant::now();
    let received = wait(transfer, Duration::from_millis(spec.transfer_timeout_ms)).await;
    let (mut served, mut receipt) = gather(tokens.len(), core.parts.block_tokens, lease, received);
    receipt.wait_ms = waiting.elapsed().as_secs_f64() * 1e3;
    check_required(spec.require, &receipt)?;
    if spec.prompt_logprobs.is_some() {
        // Every position's logits are wanted, so every position is computed.
        served = Served::default();
        computed_here(&mut receipt);
    }

    let total = tokens.len() as u32;
    let choices = samplers.len();
    let (events, queue) = mpsc::channel(Job::queue_len(choices, EVENT_QUEUE));
    core.parts.engine.generate(Job {
        served,
        receipt,
        max_new_tokens: spec.max_new_tokens.min(core.parts.hello.max_tokens.saturating_sub(total)),
        samplers,
        constraint,
        logprobs: spec.logprobs,
        prompt_logprobs: spec.prompt_logprobs,
        stop_token_ids: spec.stop_token_ids,
        stops: running.stops.clone(),
        library: core.library(),
        events,
        cancel: running.cancel.clone(),
        submitted: Instant::now(),
        prompt: tokens,
    });
    relay(queue, total, choices, running, responder).await
}

/// Choice `i` draws with the seed plus `i`.
fn samplers(sampling: &Sampling, choices: u32, prompt: &[u32]) -> Result<Vec<Sampler>, WorkerError> {
    (0..u64::from(choices))
        .map(|i| {
            let own = Sampling { seed: sampling.seed.wrapping_add(i), ..sampling.clone() };
            Sampler::new(own, prompt).map_err(|e| invalid(e.to_string()))
        })
        .collect()
}

/// A receipt that says that nothing was served.
pub(super) fn computed_here(receipt: &mut DecodeReceipt) {
    receipt.native_tokens = receipt.prompt_tokens;
    (receipt.cached_tokens, receipt.bridged_tokens, receipt.blocks) = (0, 0, 0);
}

/// Passes the engine's events on until the last answer has ended.
async fn relay(
    mut queue: mpsc::Receiver<JobEvent>,
    total_tokens: u32,
    choices: usize,
    running: Running,
    responder: &Responder<DecodeEvent>,
) -> Result<(), WorkerError> {
    let window = running.window.clone();
    let (mut running, mut open) = (Some(running), choices);
    let mut next = queue.recv().await;
    while let Some(event) = next.take() {
        let event = match event {
            JobEvent::Progress(done_tokens) => DecodeEvent::Progress { done_tokens, total_tokens },
            JobEvent::Started(receipt) => DecodeEvent::Started(receipt),
            JobEvent::PromptLogprobs(all) => {
                for logprobs in all.chunks(PROMPT_LOGPROBS_PER_EVENT) {
                    let event = DecodeEvent::PromptLogprobs { logprobs: logprobs.to_vec() };
                    if !responder.send(&event).await {
                        return Ok(());
                    }
                }
                next = queue.recv().await;
                continue;
            }
            JobEvent::Token { choice, id, logprobs } => {
                // While this waits the queue fills, and the engine leaves the answer as it is.
                window.take().await;
                let (mut ids, mut logprobs) = (vec![id], Vec::from_iter(logprobs));
                // Tokens of an answer that piled up behind a slow connection or a slow reader go together.
                next = loop {
                    match queue.try_recv() {
                        Ok(JobEvent::Token { choice: same, id, logprobs: more }) if same == choice => {
                            ids.push(id);
                            logprobs.extend(more);
                        }
                        other => break other.ok(),
                    }
                };
                DecodeEvent::Token { choice, ids, logprobs }
            }
            JobEvent::Finished { choice, reason, completion_tokens, decode_ms } => {
                open = open.saturating_sub(1);
                DecodeEvent::Finished { choice, reason, completion_tokens, decode_ms }
            }
            JobEvent::Failed(error) => {
                return Err(WorkerError::new(WorkerErrorCode::Engine, error.to_string()));
            }
        };
        if open == 0 {
            // Its place is free before the other side knows, who may come back at once.
            drop(running.take());
        }
        if !responder.send(&event).await || open == 0 {
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
