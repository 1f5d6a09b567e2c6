//! One prompt: restore what is known, compute the rest, emit what is wanted, keep new blocks.

use std::time::Instant;

use shared::control::WorkerError;
use shared::keys::BlockKey;
use tokio_util::sync::CancellationToken;

use super::decoders::Decoder;
use super::run::{Kept, Runner, worker_error};
use super::{Job, JobReport};
use crate::forward::{ForwardError, Sequence, Target};
use crate::ops::{Ops, OpsError};
use crate::reconstruct::FullKv;

/// Tokens per block of this worker's prefix cache.
const PREFIX_BLOCK_TOKENS: usize = 256;
/// Chunks are not made smaller than this when memory is short.
const MIN_CHUNK_TOKENS: usize = 64;
/// A shorter run says little about the speed: what each run costs in any case weighs too much.
const MIN_MEASURED_TOKENS: usize = 64;
/// Tokens read at the start to have a speed to tell.
const WARM_UP_TOKENS: usize = 256;

impl<O: Ops> Runner<O> {
    pub(super) fn read(&mut self, job: &Job) -> Result<JobReport, WorkerError> {
        if job.cancel.is_cancelled() {
            return Err(worker_error(&ForwardError::Cancelled));
        }
        let decoder = self.decoders.find(&job.fingerprint)?;
        let result = self.read_for(job, &decoder).map_err(|e| worker_error(&e));
        if result.is_err() {
            // Work that was asked for may still be running; the next prompt must not meet it.
            let _ = self.forward.ops.synchronize();
        }
        if self.forward.chunk_tokens() < self.planned_chunk_tokens {
            let _ = self.forward.set_chunk_tokens(self.planned_chunk_tokens);
        }
        result
    }

    fn read_for(&mut self, job: &Job, decoder: &Decoder<O>) -> Result<JobReport, ForwardError> {
        let started = Instant::now();
        let end = job.wanted.end;
        let chain =
            BlockKey::root(&decoder.recipe_digest, &[0; 32]).chain(&job.tokens[..end], PREFIX_BLOCK_TOKENS);
        let held = self.prefix.begin(&chain);
        let mut sequence = self.sequence(end, &decoder.reconstruct)?;
        self.restore(&mut sequence, &chain[..held])?;
        let reused = sequence.tokens;
        let target = Target {
            sink: job.sink.clone(),
            tokens: job.wanted.clone(),
            block_tokens: decoder.block_tokens,
            dtypes: decoder.dtypes.clone(),
        };
        if reused > job.wanted.start {
            self.forward.emit_held(&sequence, &decoder.reconstruct, &target, &job.cancel)?;
        }
        (job.progress)(reused);
        let computing = Instant::now();
        let mut short_reason = None;
        while sequence.tokens < end {
            if Instant::now() >= job.deadline {
                short_reason = Some("deadline".to_owned());
                break;
            }
            let from = sequence.tokens;
            let to = self.next_border(from, decoder.block_tokens).min(end);
            let tokens = &job.tokens[from..to];
            self.forward.chunk(&mut sequence, tokens, &decoder.reconstruct, Some(&target), &job.cancel)?;
            self.keep(&sequence, &chain, from);
            (job.progress)(sequence.tokens);
        }
        self.forward.ops.synchronize()?;
        let computed_tokens = sequence.tokens - reused;
        // Held rows that were still being sent would count as time to compute.
        let only_computed = reused <= job.wanted.start;
        if only_computed && computed_tokens >= MIN_MEASURED_TOKENS {
            self.measured(computed_tokens, computing.elapsed().as_secs_f64());
        }
        Ok(JobReport {
            computed_tokens,
            reused_tokens: reused,
            queue: started.duration_since(job.arrived),
            prefill: started.elapsed(),
            finished: Instant::now(),
            end: sequence.tokens,
            short_reason,
        })
    }

    /// Where the chunk that begins at `from` ends: on a border of the decoder's blocks if a chunk holds one.
    fn next_border(&self, from: usize, block_tokens: usize) -> usize {
        let furthest = from + self.forward.chunk_tokens();
        let border = furthest / block_tokens * block_tokens;
        if border > from { border } else { furthest }
    }

    /// An empty sequence. When memory is short, the prefix cache goes first, then chunks get smaller.
    fn sequence(&mut self, capacity: usize, reconstruct: &FullKv<O>) -> Result<Sequence<O>, ForwardError> {
        loop {
            match self.forward.begin(capacity, reconstruct) {
                Ok(sequence) => return Ok(sequence),
                Err(OpsError::OutOfMemory { .. }) if self.prefix.bytes() > 0 => self.prefix.clear(),
                Err(OpsError::OutOfMemory { .. }) if self.forward.chunk_tokens() > MIN_CHUNK_TOKENS => {
                    let half = self.forward.chunk_tokens() / 2;
                    tracing::warn!(chunk_tokens = half, "out of memory; trying smaller chunks");
                    self.forward.set_chunk_tokens(half)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn restore(&mut self, sequence: &mut Sequence<O>, chain: &[BlockKey]) -> Result<(), OpsError> {
        for key in chain {
            let Some(block) = self.prefix.block(key) else { return Ok(()) };
            let at = sequence.tokens;
            self.forward.ops.restore(&block.own, &mut sequence.own, at)?;
            if let (Some(saved), Some(extra)) = (&block.extra, &mut sequence.extra) {
                self.forward.ops.restore(saved, extra, at)?;
            }
            sequence.tokens += PREFIX_BLOCK_TOKENS;
        }
        Ok(())
    }

    /// Saves the blocks that the chunk from `from` on completed. Failing to is no reason to fail the request.
    fn keep(&mut self, sequence: &Sequence<O>, chain: &[BlockKey], from: usize) {
        for (block, key) in chain.iter().enumerate().skip(from / PREFIX_BLOCK_TOKENS) {
            let tokens = block * PREFIX_BLOCK_TOKENS..(block + 1) * PREFIX_BLOCK_TOKENS;
            if tokens.end > sequence.tokens {
                return;
            }
            let ops = &mut self.forward.ops;
            let own = ops.save(&sequence.own, tokens.clone());
            let extra = sequence.extra.as_ref().map(|extra| ops.save(extra, tokens)).transpose();
            let (own, extra) = match (own, extra) {
                (Ok(own), Ok(extra)) => (own, extra),
                (Err(error), _) | (_, Err(error)) => {
                    tracing::debug!(%error, "a block was not kept");
                    return;
                }
            };
            let bytes = ops.saved_bytes(&own) + extra.as_ref().map_or(0, |saved| ops.saved_bytes(saved));
            if !self.prefix.insert(*key, bytes, Kept { own, extra }) {
                return;
            }
        }
    }

    /// Reads a few tokens, so that the first request meets warm caches and the planner a measured speed.
    pub(super) fn warm_up(&mut self) {
        let heads = self.forward.heads();
        let inv_freq = crate::model::inverse_frequencies(&self.spec.rope, self.spec.head_dim);
        let own = vec![None; self.spec.n_layers];
        let Ok(reconstruct) = FullKv::new(&mut self.forward.ops, heads, &inv_freq, own) else { return };
        let n = WARM_UP_TOKENS.min(self.forward.chunk_tokens());
        let tokens: Vec<u32> = (0..n).map(|i| (i % self.spec.vocab_size) as u32).collect();
        for measure in [false, true] {
            let started = Instant::now();
            let Ok(mut sequence) = self.forward.begin(n, &reconstruct) else { return };
            let cancel = CancellationToken::new();
            let done = self.forward.chunk(&mut sequence, &tokens, &reconstruct, None, &cancel);
            let done = done.and_then(|()| Ok(self.forward.ops.synchronize()?));
            match done {
                Ok(()) if measure => self.measured(n, started.elapsed().as_secs_f64()),
                Ok(()) => {}
                Err(error) => {
                    tracing::warn!(%error, "warm-up failed");
                    return;
                }
            }
        }
    }
}
