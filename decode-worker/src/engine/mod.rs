//! The engine thread: it owns the model, and requests share it token by token.
//!
//! - [`Engine`]: what a model must be able to do
//! - [`Job`], [`JobEvent`]: a request as the thread sees it, and what it says about it
//! - [`policy`]: who is served next, as a pure function
//! - [`EngineHandle`]: the way in from other threads
//!
//! All answers under way, of all requests, get their next token in one pass of the model; requests join and leave
//! between two passes. Inside: a request (`active`) has a prompt and one or more answers (`choice`), whose finished
//! blocks go to the store (`exports`); `step` is the pass.

mod active;
mod choice;
mod exports;
mod inspect;
mod job;
mod mlx;
pub mod policy;
mod run;
mod step;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use inspect::{InspectJob, Inspection};
pub use job::{Holds, Job, JobEvent, Library, Served, Stops};

use crate::block::BlockBytes;
use crate::rates::MeasuredRates;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Instant;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// A model that computes caches and logits. All calls come from one thread.
pub trait Engine {
    /// One request's cache.
    type Sequence;

    /// An empty cache with room for `capacity_tokens`.
    fn new_sequence(&self, capacity_tokens: usize) -> Self::Sequence;

    /// A cache that starts with the tokens of `blocks`.
    ///
    /// # Errors
    /// When the bytes do not fit the model or the engine fails.
    fn import(&self, blocks: &[&BlockBytes], capacity_tokens: usize) -> Result<Self::Sequence, EngineError>;

    /// Tokens `start..end` of a cache as bytes.
    ///
    /// # Errors
    /// When the range is not in the cache or the engine fails.
    fn export(&self, sequence: &Self::Sequence, start: usize, end: usize) -> Result<BlockBytes, EngineError>;

    /// Appends `tokens`; with `want_logits`, the logits after the last of them.
    ///
    /// # Errors
    /// When the engine fails; the sequence is then unusable.
    fn forward(
        &self,
        sequence: &mut Self::Sequence,
        tokens: &[u32],
        want_logits: bool,
    ) -> Result<Option<Vec<f32>>, EngineError>;

    /// Appends one token to each of several sequences in one pass; the logits after each, in order.
    ///
    /// # Errors
    /// When the engine fails; all the sequences are then unusable.
    fn decode_batch(&self, rows: &mut [(&mut Self::Sequence, u32)]) -> Result<Vec<Vec<f32>>, EngineError>;

    /// As [`forward`](Self::forward), showing `see` the logits after each token, in order.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_every(
        &self,
        sequence: &mut Self::Sequence,
        tokens: &[u32],
        see: &mut dyn FnMut(&[f32]),
    ) -> Result<(), EngineError>;

    /// A second cache with the same content, which goes its own way from here.
    fn fork(&self, sequence: &Self::Sequence) -> Self::Sequence;

    /// As [`forward`](Self::forward) with logits, and each layer's attention input `[tokens, hidden]`.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_captured(
        &self,
        sequence: &mut Self::Sequence,
        tokens: &[u32],
    ) -> Result<(Vec<f32>, Vec<Vec<f32>>), EngineError>;

    /// Prompt tokens of one pass: enough to be efficient, few enough that a cancel need not wait long.
    fn prefill_chunk_tokens(&self) -> usize;

    /// Tokens in a cache.
    fn len(&self, sequence: &Self::Sequence) -> usize;

    /// Bytes that a cache takes.
    fn sequence_bytes(&self, sequence: &Self::Sequence) -> u64;

    /// Bytes that a new cache with room for `capacity_tokens` takes.
    fn planned_bytes(&self, capacity_tokens: usize) -> u64;

    /// Gives unused memory back to the system.
    ///
    /// # Errors
    /// When the engine fails.
    fn release_unused_memory(&self) -> Result<(), EngineError>;
}

/// The engine failed; the text is its own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct EngineError(pub String);

/// Sends work to the engine thread; clones share it.
#[derive(Debug, Clone)]
pub struct EngineHandle {
    commands: mpsc::Sender<Command>,
    gauges: Arc<Gauges>,
    rates: MeasuredRates,
    gone: CancellationToken,
}

#[derive(Debug)]
enum Command {
    Generate(Box<Job>),
    Inspect(Box<InspectJob>),
    Stop,
}

/// What the thread holds right now.
#[derive(Debug, Default)]
struct Gauges {
    jobs: AtomicU32,
    sequence_bytes: AtomicU64,
}

impl EngineHandle {
    /// Starts the thread, loads the model on it, measures its speed, and returns what `load` says about it.
    /// Requests begin while all caches stay within `sequence_bytes`; the others wait their turn.
    ///
    /// # Errors
    /// The error of `load`, or that of the first forward passes.
    pub async fn start<E, T>(
        sequence_bytes: u64,
        load: impl FnOnce() -> Result<(E, T), EngineError> + Send + 'static,
    ) -> Result<(Self, T), EngineError>
    where
        E: Engine + 'static,
        T: Send + 'static,
    {
        let (commands, queue) = mpsc::channel();
        let (loaded, ready) = oneshot::channel();
        let (gauges, rates, gone) =
            (Arc::new(Gauges::default()), MeasuredRates::default(), CancellationToken::new());
        let handle = Self { commands, gauges: gauges.clone(), rates: rates.clone(), gone: gone.clone() };
        let body = move || {
            // Also when a panic unwinds through here, those who wait must learn that the thread is gone.
            let _gone = gone.drop_guard();
            let started = load().and_then(|(engine, about)| {
                warm_up(&engine, &rates)?;
                Ok((engine, about))
            });
            match started {
                Ok((engine, about)) => {
                    let _ = loaded.send(Ok(about));
                    run::run(&engine, &queue, &gauges, &rates, sequence_bytes);
                }
                Err(error) => {
                    let _ = loaded.send(Err(error));
                }
            }
        };
        let spawned = std::thread::Builder::new().name("engine".to_owned()).spawn(body);
        spawned.map_err(|e| EngineError(format!("engine thread: {e}")))?;
        let about =
            ready.await.map_err(|_| EngineError("the engine thread ended while loading".to_owned()))??;
        Ok((handle, about))
    }

    /// Hands a job to the thread. If the thread is gone, the job's event channel closes.
    pub fn generate(&self, job: Job) {
        let _ = self.commands.send(Command::Generate(Box::new(job)));
    }

    /// Hands an inspection to the thread. If the thread is gone, its reply channel closes.
    pub fn inspect(&self, job: InspectJob) {
        let _ = self.commands.send(Command::Inspect(Box::new(job)));
    }

    /// Ends the thread after its current step.
    pub fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }

    /// Resolves when the thread has ended, for whatever reason.
    pub async fn gone(&self) {
        self.gone.cancelled().await;
    }

    /// Jobs that the thread has.
    #[must_use]
    pub fn n_jobs(&self) -> u32 {
        self.gauges.jobs.load(Ordering::Relaxed)
    }

    /// Bytes of all running caches.
    #[must_use]
    pub fn sequence_bytes(&self) -> u64 {
        self.gauges.sequence_bytes.load(Ordering::Relaxed)
    }

    /// Measured speeds.
    #[must_use]
    pub fn rates(&self) -> &MeasuredRates {
        &self.rates
    }
}

/// A short prompt and a few tokens, so that the first plan rests on something.
fn warm_up<E: Engine>(engine: &E, rates: &MeasuredRates) -> Result<(), EngineError> {
    const PROMPT: [u32; 64] = [1; 64];
    // The first pass pays for one-time set-up, so only the second counts.
    for counts in [false, true] {
        let mut sequence = engine.new_sequence(PROMPT.len() + 8);
        let start = Instant::now();
        engine.forward(&mut sequence, &PROMPT, false)?;
        if counts {
            rates.prefilled(PROMPT.len(), start.elapsed());
        }
        for _ in 0..3 {
            let start = Instant::now();
            engine.decode_batch(&mut [(&mut sequence, 1)])?;
            if counts {
                rates.decoded(start.elapsed());
            }
        }
    }
    engine.release_unused_memory()
}
