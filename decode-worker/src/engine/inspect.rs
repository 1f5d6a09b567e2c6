//! Running a prompt to look at its cache, for `pd-bridge verify`.

use super::job::Served;
use super::{Engine, EngineError};
use crate::block::BlockBytes;
use shared::control::DecodeReceipt;
use shared::tokens::TokenIds;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// A prompt whose cache is wanted. Runs to its end in one go.
#[derive(Debug)]
pub struct InspectJob {
    /// The whole prompt, T ≥ 2 tokens.
    pub prompt: TokenIds,
    /// What is there already; with nothing, all is computed and attention inputs are captured.
    pub served: Served,
    /// What is known before the engine starts.
    pub receipt: DecodeReceipt,
    /// Where the result goes.
    pub reply: oneshot::Sender<Result<Inspection, EngineError>>,
    /// Ends it between passes.
    pub cancel: CancellationToken,
    /// When it was handed over.
    pub submitted: Instant,
}

/// A prompt's cache and what came of it.
#[derive(Debug)]
pub struct Inspection {
    /// Positions `0..T-1`.
    pub cache: BlockBytes,
    /// After the last prompt token, `[vocab]`.
    pub logits: Vec<f32>,
    /// Per layer `[T-1, hidden]`; empty when anything was served.
    pub attention_inputs: Vec<Vec<f32>>,
    /// The numbers.
    pub receipt: DecodeReceipt,
}

pub(super) fn inspect<E: Engine>(engine: &E, job: InspectJob) {
    let InspectJob { prompt, served, receipt, reply, cancel, submitted } = job;
    let result = compute(engine, &prompt, served, receipt, &cancel, submitted);
    let _ = reply.send(result);
}

fn compute<E: Engine>(
    engine: &E,
    prompt: &[u32],
    served: Served,
    mut receipt: DecodeReceipt,
    cancel: &CancellationToken,
    submitted: Instant,
) -> Result<Inspection, EngineError> {
    let Some((&last, rest)) = prompt.split_last().filter(|(_, rest)| !rest.is_empty()) else {
        return Err(EngineError("a prompt of one token has no cache".to_owned()));
    };
    receipt.queue_ms = ms(submitted.elapsed());
    let capture = served.blocks.is_empty();
    let mut start = Instant::now();
    let mut sequence = if capture {
        engine.new_sequence(prompt.len())
    } else {
        let blocks: Vec<_> = served.blocks.iter().map(|block| &**block).collect();
        engine.import(&blocks, prompt.len())?
    };
    drop(served);
    receipt.ingest_ms = ms(start.elapsed());
    start = Instant::now();
    let mut attention_inputs: Vec<Vec<f32>> = Vec::new();
    for chunk in rest[engine.len(&sequence)..].chunks(engine.prefill_chunk_tokens()) {
        if cancel.is_cancelled() {
            return Err(EngineError("cancelled".to_owned()));
        }
        if capture {
            let (_, inputs) = engine.forward_captured(&mut sequence, chunk)?;
            attention_inputs.resize_with(inputs.len(), Vec::new);
            attention_inputs.iter_mut().zip(inputs).for_each(|(all, new)| all.extend(new));
        } else {
            engine.forward(&mut sequence, chunk, false)?;
        }
        engine.release_unused_memory()?;
    }
    let cache = engine.export(&sequence, 0, rest.len())?;
    let logits = engine.forward(&mut sequence, &[last], true)?.unwrap_or_default();
    receipt.prefill_ms = ms(start.elapsed());
    drop(sequence);
    engine.release_unused_memory()?;
    Ok(Inspection { cache, logits, attention_inputs, receipt })
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
