//! What the gateway may ask a decode worker, and how it is answered.

mod generate;
mod inspect;
mod projections;
mod requests;
mod serving;
mod spans;
#[cfg(test)]
mod tests;

use crate::constraint::Compiler;
use crate::engine::{EngineHandle, Library};
use crate::ingest::{TransferPlan, Transfers};
use crate::store::PrefixStore;
use requests::{Prepared, RequestKey, Requests};
use shared::control::{
    ConnectionId, Constraint, DecodeEvent, DecodeRequest, DecodeStats, Handler, Hello, Responder,
    WorkerError, WorkerErrorCode,
};
use shared::keys::{BlockKey, tokens_digest};
use shared::tokens::TokenIds;
use shared::weights::TensorSource;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// How long a prepared request that nobody generates keeps its blocks.
pub const PREPARED_LIFETIME: Duration = Duration::from_secs(60);
/// The store's own limit on unkept leases, a net under the one above.
const LEASE_LIFETIME: Duration = Duration::from_secs(90);

/// The decode worker's side of the control protocol.
#[derive(Clone)]
pub struct Decoder {
    core: Arc<Core>,
}

/// Everything that a request touches.
pub(crate) struct Core {
    pub(crate) parts: Parts,
    pub(crate) requests: Requests,
    /// Key before the first block.
    root: BlockKey,
}

/// What a [`Decoder`] is made of.
pub struct Parts {
    /// What is said at connect; its rates are replaced by the measured ones.
    pub hello: Hello,
    /// Where the model runs.
    pub engine: EngineHandle,
    /// Where blocks are.
    pub store: PrefixStore,
    /// Where blocks come from.
    pub transfers: Transfers,
    /// Compiles what answers must look like; `None` where the vocabulary is not fit for it.
    pub constraints: Option<Compiler>,
    /// The model's tensors, for projections.
    pub source: Arc<dyn TensorSource>,
    /// Number of layers.
    pub n_layers: usize,
    /// Requests accepted at once.
    pub max_requests: usize,
    /// Where inspections are written; `None` refuses them.
    pub inspect_dir: Option<PathBuf>,
    /// Tokens per block.
    pub block_tokens: usize,
    /// Bytes of cache per token.
    pub bytes_per_token: u64,
}

impl Decoder {
    /// A decoder without requests. `root` is the key before the first block.
    #[must_use]
    pub fn new(parts: Parts, root: BlockKey) -> Self {
        let requests = Requests::new(parts.max_requests);
        Self { core: Arc::new(Core { parts, requests, root }) }
    }

    /// Drops what nobody came back for, every second until `shutdown`.
    pub async fn sweep(self, shutdown: CancellationToken) {
        let mut every = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                _ = every.tick() => {}
            }
            let now = Instant::now();
            let expired = self.core.requests.expire(now);
            let leases = self.core.parts.store.expire(now);
            if expired + leases > 0 {
                tracing::info!(requests = expired, leases, "prepared but never generated");
            }
        }
    }
}

impl Handler for Decoder {
    type Request = DecodeRequest;
    type Event = DecodeEvent;

    fn hello(&self) -> Hello {
        let parts = &self.core.parts;
        Hello { rates: parts.engine.rates().current(), ..parts.hello.clone() }
    }

    async fn handle(
        &self,
        connection: ConnectionId,
        request: DecodeRequest,
        responder: Responder<DecodeEvent>,
    ) {
        let core = &self.core;
        let answer = match request {
            DecodeRequest::Prepare { request_id, tokens, constraint: None } => {
                core.prepare((connection, request_id), tokens, false)
            }
            DecodeRequest::Prepare { request_id, tokens, constraint: Some(constraint) } => {
                let key = (connection, request_id);
                match core.prepare(key.clone(), tokens, true) {
                    Ok(prepared) => {
                        let core = core.clone();
                        tokio::spawn(async move {
                            let answer = core.constrain(&key, constraint).await.map(|()| prepared);
                            responder.send(&answer.unwrap_or_else(DecodeEvent::Error)).await;
                        });
                        return;
                    }
                    Err(error) => Err(error),
                }
            }
            DecodeRequest::OpenTransfer { request_id, token_start, token_end, idle_timeout_ms } => {
                let idle = Duration::from_millis(idle_timeout_ms.max(1));
                core.open_transfer((connection, request_id), token_start, token_end, idle).await
            }
            DecodeRequest::AbortTransfer { request_id, abort } => {
                core.requests.abort_transfer(&(connection, request_id), abort);
                return;
            }
            DecodeRequest::Cancel { request_id } => {
                core.requests.cancel(&(connection, request_id));
                return;
            }
            DecodeRequest::StopChoice { request_id, choice } => {
                core.requests.stop_choice(&(connection, request_id), choice);
                return;
            }
            DecodeRequest::Read { request_id, events } => {
                core.requests.read(&(connection, request_id), events);
                return;
            }
            DecodeRequest::Generate(spec) => {
                let key = (connection, spec.request_id.clone());
                let started = generate::check(&spec)
                    .and_then(|()| core.requests.start(&key, spec.choices as usize, spec.window));
                match started {
                    Ok((prepared, running)) => {
                        let responder = spans::traced(responder, spec.choices);
                        tokio::spawn(generate::run(core.clone(), prepared, running, spec, responder));
                        return;
                    }
                    Err(error) => Err(error),
                }
            }
            DecodeRequest::Inspect { request_id, file } => {
                let started = inspect::target(core.parts.inspect_dir.as_deref(), &file)
                    .and_then(|path| Ok((path, core.requests.start(&(connection, request_id), 0, 0)?)));
                match started {
                    Ok((path, (prepared, running))) => {
                        tokio::spawn(inspect::run(core.clone(), prepared, running, path, responder));
                        return;
                    }
                    Err(error) => Err(error),
                }
            }
            DecodeRequest::GetProjections => {
                tokio::spawn(projections::send(core.parts.source.clone(), core.parts.n_layers, responder));
                return;
            }
            DecodeRequest::GetStats => Ok(DecodeEvent::Stats(core.stats())),
            _ => Err(WorkerError::new(WorkerErrorCode::InvalidRequest, "unknown request")),
        };
        responder.send(&answer.unwrap_or_else(DecodeEvent::Error)).await;
    }

    async fn disconnected(&self, connection: ConnectionId) {
        let ended = self.core.requests.cancel_connection(connection);
        if ended > 0 {
            tracing::info!(requests = ended, "control connection closed; its requests are cancelled");
        }
    }
}

impl Core {
    fn prepare(
        &self,
        key: RequestKey,
        tokens: TokenIds,
        compiling: bool,
    ) -> Result<DecodeEvent, WorkerError> {
        let parts = &self.parts;
        check_prompt(&tokens, parts.hello.vocab_size, parts.hello.max_tokens)?;
        let keys = self.root.chain(&tokens, parts.block_tokens);
        // The last prompt token is always computed here, so a block that ends with it is of no use.
        let usable = (tokens.len() - 1) / parts.block_tokens;
        let lease = parts.store.lease_prefix(&keys[..usable], LEASE_LIFETIME);
        let resident_tokens = narrow(lease.n_blocks() * parts.block_tokens);
        let prepared = Prepared { tokens, keys, lease, transfer: None, constraint: None };
        self.requests.insert(key, prepared, Instant::now() + PREPARED_LIFETIME, compiling)?;
        let engine = &parts.engine;
        Ok(DecodeEvent::Prepared { resident_tokens, queue: engine.n_jobs(), rates: engine.rates().current() })
    }

    /// Compiles a request's constraint, away from the threads that serve; a bad one ends the request.
    async fn constrain(&self, key: &RequestKey, constraint: Constraint) -> Result<(), WorkerError> {
        let compiled = match self.parts.constraints.clone() {
            None => Err(invalid("this worker does not know constraints")),
            Some(compiler) => tokio::task::spawn_blocking(move || compiler.compile(&constraint))
                .await
                .map_err(|panic| WorkerError::new(WorkerErrorCode::Engine, panic.to_string()))
                .and_then(|compiled| compiled.map_err(|e| invalid(e.to_string()))),
        };
        let done = compiled.and_then(|matcher| self.requests.constrain(key, matcher));
        if done.is_err() {
            self.requests.cancel(key);
        }
        done
    }

    async fn open_transfer(
        &self,
        key: (ConnectionId, String),
        token_start: u32,
        token_end: u32,
        idle_timeout: Duration,
    ) -> Result<DecodeEvent, WorkerError> {
        // A transfer that is tried again takes the place of the one before, whose bytes must be free first.
        if let Some(mut earlier) = self.requests.take_transfer(&key)? {
            earlier.control().abort(shared::wire::Abort::new(
                shared::wire::AbortCode::Cancelled,
                "another transfer takes its place",
            ));
            let _ = tokio::time::timeout(Duration::from_secs(1), earlier.outcome()).await;
        }
        let block_tokens = self.parts.block_tokens;
        let (tokens, keys) = self.requests.view(&key, |prepared| {
            check_range(prepared, block_tokens, token_start, token_end)?;
            let full = token_start as usize / block_tokens..token_end as usize / block_tokens;
            Ok((prepared.tokens.clone(), prepared.keys[full].to_vec()))
        })?;
        let bytes = u64::from(token_end - token_start) * self.parts.bytes_per_token;
        let reservation = self.parts.store.reserve(bytes).map_err(|over| {
            let fits_ever = over.wanted_bytes <= over.budget_bytes;
            let code = if fits_ever { WorkerErrorCode::Busy } else { WorkerErrorCode::TooLong };
            WorkerError::new(code, format!("the transfer does not fit the prefix store: {over}"))
        })?;
        let (offer, transfer) = self.parts.transfers.open(TransferPlan {
            tokens_digest: tokens_digest(&tokens),
            token_start,
            token_end,
            keys,
            idle_timeout,
            reservation,
        });
        self.requests.attach(&key, transfer)?;
        Ok(DecodeEvent::Offer(offer))
    }

    fn library(&self) -> Library {
        let Parts { store, block_tokens, .. } = &self.parts;
        Library { store: store.clone(), root: self.root, block_tokens: *block_tokens }
    }

    fn stats(&self) -> DecodeStats {
        let store = self.parts.store.stats();
        DecodeStats {
            requests: narrow(self.requests.len()),
            transfers: narrow(self.parts.transfers.n_open()),
            store_bytes: store.stored_bytes,
            store_budget_bytes: store.budget_bytes,
            store_blocks: store.blocks,
            store_references: store.references,
            reserved_bytes: store.reserved_bytes,
            sequence_bytes: self.parts.engine.sequence_bytes(),
            resident_memory_bytes: shared::settings::resident_memory_bytes(),
            rates: self.parts.engine.rates().current(),
        }
    }
}

fn check_prompt(tokens: &[u32], vocab_size: u32, max_tokens: u32) -> Result<(), WorkerError> {
    if tokens.is_empty() {
        return Err(invalid("the prompt is empty"));
    }
    if let Some(token) = tokens.iter().find(|&&token| token >= vocab_size) {
        return Err(invalid(format!("token {token} is outside the vocabulary of {vocab_size}")));
    }
    if tokens.len() >= max_tokens as usize {
        let text = format!("a prompt of {} tokens leaves no room in {max_tokens}", tokens.len());
        return Err(WorkerError::new(WorkerErrorCode::TooLong, text));
    }
    Ok(())
}

fn check_range(prepared: &Prepared, block_tokens: usize, start: u32, end: u32) -> Result<(), WorkerError> {
    let resident = prepared.lease.n_blocks() * block_tokens;
    if !(start as usize).is_multiple_of(block_tokens) || start as usize > resident {
        return Err(invalid(format!(
            "a transfer starts at a block border of at most {resident}, not at {start}"
        )));
    }
    if end <= start || end as usize >= prepared.tokens.len() {
        let last = prepared.tokens.len() - 1;
        return Err(invalid(format!("a transfer of {start}..{end} is empty or ends above {last}")));
    }
    Ok(())
}

fn invalid(message: impl Into<String>) -> WorkerError {
    WorkerError::new(WorkerErrorCode::InvalidRequest, message)
}

fn narrow(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
