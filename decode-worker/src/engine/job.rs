//! A request as the engine thread sees it.

use crate::block::BlockBytes;
use crate::constraint::Matcher;
use crate::sampler::Sampler;
use crate::store::{Lease, PrefixStore, Reservation};
use shared::control::{DecodeReceipt, FinishReason, TokenLogprobs};
use shared::keys::BlockKey;
use shared::tokens::TokenIds;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Most events that one answer sends in one step: a token and its end.
const EVENTS_PER_CHOICE: usize = 2;
/// Most events that the prompt sends in one step: progress, or its start and log probabilities.
const EVENTS_PER_PROMPT: usize = 2;

/// A prompt to finish and answers to write.
#[derive(Debug)]
pub struct Job {
    /// The whole prompt, T ≥ 1 tokens.
    pub prompt: TokenIds,
    /// What is there already, at most T − 1 tokens.
    pub served: Served,
    /// What is known before the engine starts; the engine adds its times.
    pub receipt: DecodeReceipt,
    /// Most tokens to write, for each answer.
    pub max_new_tokens: u32,
    /// One for each answer, at least one.
    pub samplers: Vec<Sampler>,
    /// What every answer must look like.
    pub constraint: Option<Matcher>,
    /// Tell each token's log probability and those of so many of the likeliest.
    pub logprobs: Option<u32>,
    /// The same for the prompt, from its second token on. Only with nothing served.
    pub prompt_logprobs: Option<u32>,
    /// Tokens that end an answer.
    pub stop_token_ids: Vec<u32>,
    /// Ends single answers.
    pub stops: Stops,
    /// Where finished blocks go.
    pub library: Library,
    /// Where events go, of [`Job::queue_len`]. The job pauses while it is nearly full and ends when it is closed.
    pub events: mpsc::Sender<JobEvent>,
    /// Ends the job after its current step.
    pub cancel: CancellationToken,
    /// When it was handed over.
    pub submitted: Instant,
}

impl Job {
    /// Length of an event queue in which `waiting` events may wait for the reader of `choices` answers.
    #[must_use]
    pub fn queue_len(choices: usize, waiting: usize) -> usize {
        waiting + EVENTS_PER_PROMPT + EVENTS_PER_CHOICE * choices
    }

    /// Whether the queue has room for all that one step can send.
    pub(super) fn has_room(&self) -> bool {
        self.events.capacity() >= EVENTS_PER_PROMPT + EVENTS_PER_CHOICE * self.stops.0.len()
    }

    /// The queue has room, or the reader is gone and the job ends.
    pub(super) fn send(&self, event: JobEvent) {
        let _ = self.events.try_send(event);
    }
}

/// Says of each answer of a request whether it is to end; clones share it.
#[derive(Debug, Clone)]
pub struct Stops(Arc<[AtomicBool]>);

impl Stops {
    /// For so many answers, none of which is to end.
    #[must_use]
    pub fn new(choices: usize) -> Self {
        Self((0..choices).map(|_| AtomicBool::new(false)).collect())
    }

    /// Ends one before its next token; one that does not exist is ignored.
    pub fn stop(&self, choice: u32) {
        if let Some(stop) = self.0.get(choice as usize) {
            stop.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn is_stopped(&self, choice: u32) -> bool {
        self.0.get(choice as usize).is_some_and(|stop| stop.load(Ordering::Relaxed))
    }
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
    /// Log probabilities of the prompt's tokens, from the second on; once, if asked for.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// A new token.
    Token {
        /// Of which answer.
        choice: u32,
        /// The token.
        id: u32,
        /// Its log probability, if asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The last event of an answer; when all have ended, of a job that went well.
    Finished {
        /// Which answer.
        choice: u32,
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
