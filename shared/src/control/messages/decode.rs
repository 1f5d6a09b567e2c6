//! Between the gateway and a decode worker.

use super::answer::{self, Constraint, FinishReason, GenerateSpec, TokenLogprobs};
use super::error::WorkerError;
use super::prefill::TransferOffer;
use crate::control::hello::Rates;
use crate::hexbytes::Hex;
use crate::tokens::TokenIds;
use crate::wire::Abort;
use serde::{Deserialize, Serialize};

/// What a decode worker is asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum DecodeRequest {
    /// Announces a prompt. The worker looks up its prefix store, leases what it finds to the request and
    /// answers [`DecodeEvent::Prepared`].
    Prepare {
        /// Name of the request in all later messages.
        request_id: String,
        /// The whole prompt.
        tokens: TokenIds,
        /// What the answer must look like; compiled now, so that a bad one is refused before any work.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        constraint: Option<Constraint>,
    },
    /// Opens a transfer for a prepared request; answered by [`DecodeEvent::Offer`].
    OpenTransfer {
        /// A prepared request.
        request_id: String,
        /// First position that will be sent; must be a block border at or below the resident prefix.
        token_start: u32,
        /// End (exclusive); at most prompt length − 1.
        token_end: u32,
        /// Longest time the transfer may go without a frame or be unopened.
        idle_timeout_ms: u64,
    },
    /// The prefill side failed or was cancelled: the transfer is over now.
    AbortTransfer {
        /// The request whose transfer it is.
        request_id: String,
        /// What broke.
        abort: Abort,
    },
    /// Answers a prepared request. A gateway whose plan is certain sends it right behind `prepare`, without a constraint,
    /// and does not wait for that answer. Events: [`DecodeEvent::Progress`]*, [`DecodeEvent::Started`],
    /// [`DecodeEvent::PromptLogprobs`]*, [`DecodeEvent::Token`]*, then one [`DecodeEvent::Finished`] per choice or one
    /// [`DecodeEvent::Error`].
    Generate(GenerateSpec),
    /// Ends a request in any state and frees all it held. No answer; unknown requests are ignored.
    Cancel {
        /// The request.
        request_id: String,
    },
    /// Ends one choice of a running request, as when a stop string was found in its text. Answered by that
    /// choice's [`DecodeEvent::Finished`]; unknown ones are ignored.
    StopChoice {
        /// The request.
        request_id: String,
        /// Which of its choices.
        choice: u32,
    },
    /// So many more [`DecodeEvent::Token`] of a request with a window have been read. No answer; unknown requests are
    /// ignored.
    Read {
        /// The request.
        request_id: String,
        /// Events since the last such message.
        events: u32,
    },
    /// Asks for the K/V projection weights of every layer, to make this decoder's cache with.
    /// Events: one binary message per layer (safetensors: `k_proj.weight`, `v_proj.weight`, optional
    /// biases), then [`DecodeEvent::ProjectionsEnd`].
    GetProjections,
    /// Asks for occupancy; answered by [`DecodeEvent::Stats`].
    GetStats,
    /// Runs a prompt and writes its cache to a file, for `pd-bridge verify`. Only when the worker was
    /// started with an inspection folder. Uses the request's transfer if one was opened, else computes
    /// natively without the prefix store. Answered by [`DecodeEvent::Inspected`].
    Inspect {
        /// A prepared request.
        request_id: String,
        /// File name inside the inspection folder (safetensors; arrays `layers.{i}.k`, `layers.{i}.v`
        /// `[n_kv_heads, T-1, head_dim]`, `logits` `[vocab]`, natively also `layers.{i}.attn_input` `[T-1, hidden]`).
        file: String,
    },
}

/// What a decode worker answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum DecodeEvent {
    /// Answer to `prepare`.
    Prepared {
        /// Prompt positions that the prefix store already holds (whole blocks, at most T − 1).
        resident_tokens: u32,
        /// Requests ahead of this one.
        queue: u32,
        /// Current speeds.
        rates: Rates,
    },
    /// Answer to `open_transfer`.
    Offer(TransferOffer),
    /// The prompt is being computed by the decoder.
    Progress {
        /// Prompt positions done.
        done_tokens: u32,
        /// Prompt positions in all.
        total_tokens: u32,
    },
    /// The prompt is in; tokens follow. The receipt is what the verdict is written from.
    Started(Box<DecodeReceipt>),
    /// Log probabilities of prompt tokens, in order, when asked for; the first prompt token has none.
    PromptLogprobs {
        /// One for each of the next prompt tokens, beginning with the second of the prompt.
        logprobs: Vec<TokenLogprobs>,
    },
    /// One or more new tokens of one choice.
    Token {
        /// Which choice.
        #[serde(default, skip_serializing_if = "answer::is_zero")]
        choice: u32,
        /// Ids in order.
        ids: Vec<u32>,
        /// One for each id when asked for, else empty.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        logprobs: Vec<TokenLogprobs>,
    },
    /// A choice is complete; after the last of them nothing follows.
    Finished {
        /// Which choice.
        #[serde(default, skip_serializing_if = "answer::is_zero")]
        choice: u32,
        /// Why it ended.
        reason: FinishReason,
        /// Tokens produced, a final stop token not counted.
        completion_tokens: u32,
        /// Time from first to last token.
        decode_ms: f64,
    },
    /// All projections were sent.
    ProjectionsEnd,
    /// Answer to `get_stats`.
    Stats(DecodeStats),
    /// Answer to `inspect`.
    Inspected(Box<DecodeReceipt>),
    /// The request ended without success; nothing follows.
    Error(WorkerError),
}

/// What the decoder did with a prompt: the only source of the verdict's numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecodeReceipt {
    /// Prompt length T.
    pub prompt_tokens: u32,
    /// Positions served from cache, of any origin.
    pub cached_tokens: u32,
    /// Positions of those that came from this request's transfer.
    pub bridged_tokens: u32,
    /// Positions computed here; at least the last one.
    pub native_tokens: u32,
    /// Blocks of the prefix store that served this request.
    pub blocks: u32,
    /// Payload bytes received in this request's transfer.
    pub payload_bytes: u64,
    /// Digest of the transfer as computed by the receiver, if it committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Hex<32>>,
    /// Why the transfer gave nothing, or less than asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer_failure: Option<Abort>,
    /// Waiting for the engine.
    pub queue_ms: f64,
    /// Waiting for the transfer.
    pub wait_ms: f64,
    /// Turning received blocks into the engine's arrays.
    pub ingest_ms: f64,
    /// Computing the prompt positions that were not cached.
    pub prefill_ms: f64,
}

/// A decode worker's occupancy.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct DecodeStats {
    /// Requests in any state.
    pub requests: u32,
    /// Open transfers.
    pub transfers: u32,
    /// Bytes in the prefix store.
    pub store_bytes: u64,
    /// Byte budget of the prefix store.
    pub store_budget_bytes: u64,
    /// Blocks in the prefix store.
    pub store_blocks: u64,
    /// References that requests hold on blocks.
    pub store_references: u64,
    /// Bytes reserved by transfers that have not committed.
    pub reserved_bytes: u64,
    /// Bytes of running requests' caches inside the engine.
    pub sequence_bytes: u64,
    /// Resident memory of the process.
    pub resident_memory_bytes: u64,
    /// Speeds measured so far.
    #[serde(default)]
    pub rates: Rates,
}
