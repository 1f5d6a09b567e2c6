//! A request as the engine thread sees it.

use crate::block::BlockBytes;
use crate::sampler::Sampler;
use crate::store::{Lease, PrefixStore, Reservation};
use shared::control::{DecodeReceipt, FinishReason};
use shared::keys::BlockKey;
use shared::tokens::TokenIds;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// A prompt to finish and an answer to write.
#[derive(Debug)]
pub struct Job {
    /// The whole prompt, T ≥ 1 tokens.
    pub prompt: TokenIds,
    /// What is there already, at most T − 1 tokens.
    pub served: Served,
    /// What is known before the engine starts; the engine adds its times.
    pub receipt: DecodeReceipt,
    /// Most tokens to write.
    pub max_new_tokens: u32,
    /// Chooses them.
    pub sampler: Sampler,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Where finished blocks go.
    pub library: Library,
    /// Where events go. The job pauses while this is nearly full and ends when it is closed.
    pub events: mpsc::Sender<JobEvent>,
    /// Ends the job after its current step.
    pub cancel: CancellationToken,
    /// When it was handed over.
    pub submitted: Instant,
}

/// Cache that need not be computed.
#[derive(Debug, Default)]
pub struct Served {
    /// Consecutive blocks from position 0 on; only the last may be short.
    pub blocks: Vec<Arc<BlockBytes>>,
    /// What keeps them accounted for until they are in the engine.
    pub holds: Holds,
}

/// Leases and reservations, given back on drop.
#[derive(Debug, Default)]
pub struct Holds {
    /// References on blocks.
    pub leases: Vec<Lease>,
    /// Bytes outside the store.
    pub reservations: Vec<Reservation>,
}

/// The prefix store as a job uses it.
#[derive(Debug, Clone)]
pub struct Library {
    /// The store.
    pub store: PrefixStore,
    /// Key before the first block.
    pub root: BlockKey,
    /// Tokens per block.
    pub block_tokens: usize,
}

/// What becomes of a job.
#[derive(Debug)]
pub enum JobEvent {
    /// Prompt positions done so far.
    Progress(u32),
    /// The prompt is in.
    Started(Box<DecodeReceipt>),
    /// A new token.
    Token(u32),
    /// The last event of a job that went well.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Tokens produced.
        completion_tokens: u32,
        /// From first to last token.
        decode_ms: f64,
    },
    /// The last event of a job that did not.
    Failed(super::EngineError),
}
