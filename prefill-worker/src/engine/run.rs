//! The thread's loop.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;

use shared::control::{WorkerError, WorkerErrorCode};
use shared::spec::ModelSpec;

use super::decoders::Decoders;
use super::prefix::PrefixCache;
use super::{Command, EngineOptions, State};
use crate::forward::{Forward, ForwardError};
use crate::ops::{Ops, OpsError};

/// Weight of the newest measurement in the moving average of the speed.
const RATE_WEIGHT: f64 = 0.3;

/// Everything the thread owns.
pub(super) struct Runner<O: Ops> {
    pub(super) forward: Forward<O>,
    pub(super) decoders: Decoders<O>,
    pub(super) prefix: PrefixCache<Kept<O>>,
    pub(super) spec: ModelSpec,
    /// Chunk size that was planned at the start, and that runs again after one that had to be smaller.
    pub(super) planned_chunk_tokens: usize,
    state: Arc<State>,
}

/// A block in the prefix cache.
pub(super) struct Kept<O: Ops> {
    /// The model's own keys and values.
    pub(super) own: O::Saved,
    /// The decoder's, where its projections differ.
    pub(super) extra: Option<O::Saved>,
}

impl<O: Ops> Runner<O> {
    pub(super) fn new(
        forward: Forward<O>,
        spec: ModelSpec,
        options: EngineOptions,
        state: Arc<State>,
    ) -> Self {
        let planned_chunk_tokens = forward.chunk_tokens();
        Self {
            prefix: PrefixCache::new(options.prefix_cache_bytes),
            decoders: Decoders::new(spec.clone(), options, state.decoders.clone()),
            spec,
            planned_chunk_tokens,
            forward,
            state,
        }
    }

    /// Serves commands until told to stop or nobody can send any.
    pub(super) fn run(mut self, queue: &Receiver<Command>) {
        while let Ok(command) = queue.recv() {
            match command {
                Command::Pair(cache, fetched, reply) => {
                    let paired = self.decoders.pair(&mut self.forward, *cache, fetched);
                    *self.state.projections.lock() = self.decoders.projection_digests();
                    let _ = reply.send(paired);
                }
                Command::Read(queued, reply) => {
                    let Some(job) = queued.lock().take() else { continue };
                    let report = self.read(&job);
                    self.state.prefix_cache_bytes.store(self.prefix.bytes(), Ordering::Relaxed);
                    drop(job);
                    let failed = report.as_ref().is_err_and(|e| e.code == WorkerErrorCode::Engine);
                    let _ = reply.send(report);
                    // A device that lost its state fails everything from now on; a new process gets a new one.
                    if failed && let Err(error) = self.forward.ops.synchronize() {
                        tracing::error!(%error, "the device does not recover, the engine ends");
                        return;
                    }
                }
                Command::Reconstruct { fingerprint, input, output, reply } => {
                    let _ = reply.send(self.reconstruct(&fingerprint, &input, &output));
                }
                Command::Stop => return,
            }
        }
    }

    /// Takes a measurement of `tokens` in `seconds` into the average.
    pub(super) fn measured(&self, tokens: usize, seconds: f64) {
        if tokens == 0 || seconds <= 0.0 {
            return;
        }
        let now = tokens as f64 / seconds;
        let before = f64::from_bits(self.state.prefill_rate.load(Ordering::Relaxed));
        let rate = if before > 0.0 { before + RATE_WEIGHT * (now - before) } else { now };
        self.state.prefill_rate.store(rate.to_bits(), Ordering::Relaxed);
    }
}

/// A backend's error as it crosses to the gateway.
pub(super) fn worker_error(error: &ForwardError) -> WorkerError {
    let code = match error {
        ForwardError::Cancelled => WorkerErrorCode::Cancelled,
        ForwardError::Ops(OpsError::OutOfMemory { .. }) => WorkerErrorCode::TooLong,
        ForwardError::Ops(_) => WorkerErrorCode::Engine,
    };
    WorkerError::new(code, error.to_string())
}
