//! The engine thread: owns the backend, runs one prompt at a time in order of arrival.
//!
//! Handles are plain and cheap; they do not know the backend's types.

mod decoders;
mod inspect;
mod prefix;
mod read;
mod registry;
mod run;

use std::collections::HashSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use shared::control::{CacheIdentity, WorkerError, WorkerErrorCode};
use shared::hexbytes::Hex;
use shared::spec::ModelSpec;
use shared::tokens::TokenIds;
use shared::weights::HostTensor;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::forward::Forward;
use crate::ops::{HostLinear, Ops, Sink};
use registry::Registry;

pub use prefix::PrefixCache;
pub use registry::Held;

/// A handle to the engine thread.
#[derive(Clone)]
pub struct Engine {
    commands: mpsc::Sender<Command>,
    state: Arc<State>,
}

/// What the thread tells everyone.
#[derive(Debug, Default)]
#[doc(hidden)]
pub struct State {
    prefix_cache_bytes: AtomicUsize,
    /// Bits of an f64: prompt tokens per second.
    prefill_rate: AtomicU64,
    /// Decoders' projections that are on the device.
    projections: Mutex<HashSet<[u8; 32]>>,
    decoders: Registry,
    stopped: CancellationToken,
}

/// What the engine is made with.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Budget of the prefix cache.
    pub prefix_cache_bytes: usize,
    /// Digest of this model's own projections, per layer.
    pub own_projections: Vec<[u8; 32]>,
    /// Decoders kept paired at once; more push out the longest unused.
    pub max_decoders: usize,
    /// Inverse rotary frequencies by this worker's own reckoning; a decoder's must be close to them.
    pub inv_freq: Vec<f32>,
}

/// A prompt to read.
pub struct Job {
    /// The whole prompt.
    pub tokens: TokenIds,
    /// The paired decoder.
    pub fingerprint: Hex<32>,
    /// Positions whose arrays are wanted. Nothing after them is computed.
    pub wanted: Range<usize>,
    /// Takes them.
    pub sink: Arc<dyn Sink>,
    /// Ends the job at the next layer.
    pub cancel: CancellationToken,
    /// No chunk is begun after this.
    pub deadline: Instant,
    /// Told after each chunk how many positions are done.
    pub progress: Box<dyn Fn(usize) + Send>,
    /// When the request arrived.
    pub arrived: Instant,
}

/// How a job went.
#[derive(Debug, Clone)]
pub struct JobReport {
    /// Positions computed now.
    pub computed_tokens: usize,
    /// Positions taken from the prefix cache.
    pub reused_tokens: usize,
    /// Time in the queue.
    pub queue: Duration,
    /// Time from the first chunk to the end of the last layer.
    pub prefill: Duration,
    /// When the last layer ended.
    pub finished: Instant,
    /// End of the positions emitted, in every layer.
    pub end: usize,
    /// Why it is less than was wanted.
    pub short_reason: Option<String>,
}

/// One layer's projections as a decoder published them.
pub struct Projection {
    /// Digest that it was checked against.
    pub digest: [u8; 32],
    /// Rows `[k | v]`.
    pub linear: HostLinear,
}

impl Projection {
    /// Puts tensors together as one product.
    pub fn new(digest: [u8; 32], weights: Vec<HostTensor>, biases: Vec<HostTensor>) -> Self {
        Self { digest, linear: HostLinear { weights, biases } }
    }
}

/// A forward on any backend.
pub trait AnyForward {
    /// Serves commands until told to stop; says `ready` once speed is known.
    #[doc(hidden)]
    fn serve(
        self: Box<Self>,
        spec: ModelSpec,
        options: EngineOptions,
        state: Arc<State>,
        queue: &mpsc::Receiver<Command>,
        ready: Box<dyn FnOnce() + '_>,
    );
}

impl<O: Ops> AnyForward for Forward<O> {
    fn serve(
        self: Box<Self>,
        spec: ModelSpec,
        options: EngineOptions,
        state: Arc<State>,
        queue: &mpsc::Receiver<Command>,
        ready: Box<dyn FnOnce() + '_>,
    ) {
        let mut runner = run::Runner::new(*self, spec, options, state);
        runner.warm_up();
        ready();
        runner.run(queue);
    }
}

/// A job in the queue: empty once it began or was withdrawn.
type Queued = Arc<Mutex<Option<Job>>>;

/// Takes a job back from the queue on drop, unless it began.
struct Withdraw(Queued);

impl Drop for Withdraw {
    fn drop(&mut self) {
        let job = self.0.lock().take();
        drop(job);
    }
}

type Reply<T> = oneshot::Sender<Result<T, WorkerError>>;

/// What the thread is asked.
#[doc(hidden)]
pub enum Command {
    /// Introduce a decoder.
    Pair(Box<CacheIdentity>, Vec<Projection>, Reply<u32>),
    /// Read a prompt.
    Read(Queued, Reply<JobReport>),
    /// Make arrays from given attention inputs.
    Reconstruct {
        /// Decoder.
        fingerprint: Hex<32>,
        /// File to read.
        input: PathBuf,
        /// File to write.
        output: PathBuf,
        /// Answer.
        reply: Reply<()>,
    },
    /// End.
    Stop,
}

impl Engine {
    /// Starts the thread. `load` runs on it, because what a backend makes belongs to one thread; it answers a forward
    /// and a description of the backend, which is passed on.
    ///
    /// # Errors
    /// What `load` returns, or that no thread could be started.
    pub async fn start<E>(
        spec: ModelSpec,
        options: EngineOptions,
        load: impl FnOnce(&ModelSpec) -> Result<(Box<dyn AnyForward>, String), E> + Send + 'static,
    ) -> Result<(Self, String), E>
    where
        E: From<std::io::Error> + Send + 'static,
    {
        let (commands, queue) = mpsc::channel();
        let (loaded, ready) = oneshot::channel();
        let state = Arc::new(State::default());
        let shared = state.clone();
        std::thread::Builder::new().name("prefill-engine".into()).spawn(move || {
            let _ended = shared.stopped.clone().drop_guard();
            match load(&spec) {
                Ok((forward, about)) => forward.serve(
                    spec,
                    options,
                    shared,
                    &queue,
                    Box::new(|| {
                        let _ = loaded.send(Ok(about));
                    }),
                ),
                Err(error) => {
                    let _ = loaded.send(Err(error));
                }
            }
        })?;
        match ready.await {
            Ok(result) => result.map(|about| (Self { commands, state }, about)),
            Err(_) => Err(std::io::Error::other("the engine thread died while loading").into()),
        }
    }

    /// Introduces a decoder; answers in how many layers its projections are not our own.
    ///
    /// # Errors
    /// `Incompatible` or `Engine`.
    pub async fn pair(&self, cache: CacheIdentity, fetched: Vec<Projection>) -> Result<u32, WorkerError> {
        self.ask(|reply| Command::Pair(Box::new(cache), fetched, reply)).await
    }

    /// Reads a prompt; answers when every piece was delivered to the job's sink.
    ///
    /// # Errors
    /// `Cancelled`, `Timeout`, `TooLong`, `Incompatible`, `Engine`.
    pub async fn read(&self, job: Job) -> Result<JobReport, WorkerError> {
        let queued = Arc::new(Mutex::new(Some(job)));
        // Whoever stops waiting leaves nothing of the prompt in the queue.
        let _withdraw = Withdraw(queued.clone());
        self.ask(|reply| Command::Read(queued, reply)).await
    }

    /// Makes cache arrays from a file of attention inputs.
    ///
    /// # Errors
    /// `InvalidRequest` for a file that does not fit, `Engine`.
    pub async fn reconstruct(
        &self,
        fingerprint: Hex<32>,
        input: PathBuf,
        output: PathBuf,
    ) -> Result<(), WorkerError> {
        self.ask(|reply| Command::Reconstruct { fingerprint, input, output, reply }).await
    }

    /// Whether a decoder's projection is on the device.
    pub fn holds_projection(&self, digest: &[u8; 32]) -> bool {
        self.state.projections.lock().contains(digest)
    }

    /// Whether a decoder is paired.
    pub fn is_paired(&self, fingerprint: &Hex<32>) -> bool {
        self.state.decoders.contains(fingerprint)
    }

    /// Keeps a decoder paired for a request; `None` if it is not.
    pub fn hold(&self, fingerprint: &Hex<32>) -> Option<Held> {
        self.state.decoders.hold(fingerprint)
    }

    /// Bytes in the prefix cache.
    pub fn prefix_cache_bytes(&self) -> usize {
        self.state.prefix_cache_bytes.load(Ordering::Relaxed)
    }

    /// Prompt tokens per second, as measured.
    pub fn prefill_tokens_per_s(&self) -> f64 {
        f64::from_bits(self.state.prefill_rate.load(Ordering::Relaxed))
    }

    /// Asks the thread to end after what it is doing.
    pub fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }

    /// Resolves when the thread is gone.
    pub async fn gone(&self) {
        self.state.stopped.cancelled().await;
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, WorkerError> {
        let gone = || WorkerError::new(WorkerErrorCode::Engine, "the engine thread ended");
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}
