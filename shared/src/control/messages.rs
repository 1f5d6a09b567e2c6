//! Requests and events, one enum per kind of worker and direction.

use crate::hexbytes::Hex;
use crate::tokens::TokenIds;
use serde::{Deserialize, Serialize};

use super::hello::{CacheIdentity, Rates};
use crate::wire::Abort;

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
        #[serde(default, skip_serializing_if = "is_zero")]
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
        #[serde(default, skip_serializing_if = "is_zero")]
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

/// What a prefill worker is asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum PrefillRequest {
    /// Introduces a decoder. The worker checks that it can make this decoder's cache, fetches
    /// projections where they differ from its own, and answers [`PrefillEvent::Paired`] or an error.
    Pair(PairSpec),
    /// Reads a prompt and sends its cache. Events: [`PrefillEvent::Progress`]*, then
    /// [`PrefillEvent::Done`] or [`PrefillEvent::Error`].
    Prefill(PrefillSpec),
    /// Ends a request. No answer; unknown requests are ignored.
    Cancel {
        /// The request.
        request_id: String,
    },
    /// Asks for occupancy; answered by [`PrefillEvent::Stats`].
    GetStats,
    /// Turns attention inputs in a file into cache arrays in another, for `pd-bridge verify`. Only when
    /// the worker was started with an inspection folder. Answered by [`PrefillEvent::Reconstructed`].
    Reconstruct {
        /// The decoder (already paired) whose cache to make.
        fingerprint: Hex<32>,
        /// Safetensors file in the inspection folder with `layers.{i}.attn_input` `[tokens, hidden]` f32.
        input_file: String,
        /// File to write: `layers.{i}.k`, `layers.{i}.v` `[n_kv_heads, tokens, head_dim]` in the layout's dtype.
        output_file: String,
    },
}

/// What a prefill worker answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum PrefillEvent {
    /// Answer to `pair`.
    Paired {
        /// Layers whose projections differ from the worker's own and are computed extra.
        foreign_layers: u32,
    },
    /// The prompt is being read.
    Progress {
        /// Positions done.
        done_tokens: u32,
        /// Positions in all.
        total_tokens: u32,
    },
    /// The receiver confirmed the commit.
    Done(PrefillReport),
    /// Answer to `get_stats`.
    Stats(PrefillStats),
    /// Answer to `reconstruct`.
    Reconstructed,
    /// The request ended without success.
    Error(WorkerError),
}

/// A decoder introduced to a prefill worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PairSpec {
    /// Whose cache is to be made.
    pub cache: CacheIdentity,
    /// Vocabulary and tokenizer it uses.
    pub tokenizer_digest: Hex<32>,
    /// Control address of the decoder, `host:port`, to fetch projections from.
    pub control_addr: String,
}

/// Where and what to send.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TransferOffer {
    /// Name of the transfer on the bulk port.
    pub transfer_id: Hex<16>,
    /// One-use secret.
    pub ticket: Hex<16>,
    /// Where to connect, `host:port`.
    pub bulk_addr: String,
    /// First position to send.
    pub token_start: u32,
    /// End (exclusive) of the positions to send.
    pub token_end: u32,
}

/// A prompt to read and whose cache to send.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrefillSpec {
    /// Name of the request.
    pub request_id: String,
    /// The whole prompt; positions below `offer.token_start` are context only.
    pub tokens: TokenIds,
    /// The paired decoder.
    pub fingerprint: Hex<32>,
    /// Where and what to send.
    pub offer: TransferOffer,
    /// The worker gives up after this time.
    pub deadline_ms: u64,
}

/// How a prefill went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrefillReport {
    /// Positions computed now.
    pub computed_tokens: u32,
    /// Positions taken from the worker's own prefix cache.
    pub reused_tokens: u32,
    /// Time in the worker's queue.
    pub queue_ms: f64,
    /// Time from start of the first chunk to the end of the last layer.
    pub prefill_ms: f64,
    /// Time from the end of the last layer to the receiver's receipt: what streaming did not hide.
    pub transfer_ms: f64,
    /// Payload bytes sent.
    pub payload_bytes: u64,
    /// End (exclusive) of the positions committed.
    pub token_end: u32,
    /// Transfer digest.
    pub digest: Hex<32>,
    /// Speed seen, for the planner.
    pub rates: Rates,
}

/// A prefill worker's occupancy.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct PrefillStats {
    /// Requests running or queued.
    pub requests: u32,
    /// Prompt tokens of those, all that they asked for.
    #[serde(default)]
    pub queued_tokens: u64,
    /// Bytes in the worker's prefix cache.
    pub prefix_cache_bytes: u64,
    /// Blocks in it that a running request holds.
    pub prefix_cache_pinned_blocks: u64,
    /// Largest number of payload bytes that were ever waiting to be sent.
    pub send_buffer_peak_bytes: u64,
    /// Resident memory of the process.
    pub resident_memory_bytes: u64,
    /// Speeds measured so far.
    #[serde(default)]
    pub rates: Rates,
    /// Payload bytes per second of the latest transfers, while there was something to send; 0 before the first.
    #[serde(default)]
    pub link_bytes_per_s: f64,
}

/// An answer to be generated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerateSpec {
    /// A prepared request.
    pub request_id: String,
    /// Most tokens to produce.
    pub max_new_tokens: u32,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Tokens that end the answer and are not part of it.
    pub stop_token_ids: Vec<u32>,
    /// What the client demands of the bridge.
    pub require: Require,
    /// Longest wait for the request's transfer before falling back.
    pub transfer_timeout_ms: u64,
    /// Independent answers to the one prompt; choice `i` draws with seed `sampling.seed + i`.
    #[serde(default = "one")]
    pub choices: u32,
    /// Also tell each answer token's log probability, and those of this many of the likeliest tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u32>,
    /// The same for the prompt's tokens. The decoder then computes the whole prompt itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<u32>,
    /// Most [`DecodeEvent::Token`] on their way that were not read ([`DecodeRequest::Read`]); beyond, the answer stands
    /// still and nobody else's does. 0 for any number.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub window: u32,
}

/// What an answer must look like. The decoder masks every token that would break it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema accepts.
    JsonSchema {
        /// The schema, as JSON text.
        schema: String,
    },
    /// A grammar in llguidance's Lark dialect.
    Lark {
        /// The grammar.
        grammar: String,
    },
    /// A regular expression over the whole answer.
    Regex {
        /// The expression.
        pattern: String,
    },
}

/// Log probability of a token under the model's own distribution (after temperature 1, before any filter or
/// penalty), natural logarithm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the token itself.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(u32, f32)>,
}

/// Sampling parameters; `temperature` 0 is greedy. Applied in this order: constraint mask, `logit_bias`,
/// penalties, temperature, `top_k`, `top_p`, `min_p`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Logits are divided by this; 0 takes the most likely token.
    pub temperature: f32,
    /// Smallest set of tokens whose probabilities reach this; 1 keeps all.
    pub top_p: f32,
    /// Only the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Seed; the same seed and prompt give the same answer.
    pub seed: u64,
    /// Drops tokens less likely than this share of the likeliest; 0 keeps all.
    #[serde(default, skip_serializing_if = "is_zero_f32")]
    pub min_p: f32,
    /// Subtracted from the logit of every token that the answer already has.
    #[serde(default, skip_serializing_if = "is_zero_f32")]
    pub presence_penalty: f32,
    /// Subtracted once for each time that the answer already has the token.
    #[serde(default, skip_serializing_if = "is_zero_f32")]
    pub frequency_penalty: f32,
    /// Logits of tokens in prompt or answer are divided by this when positive, else multiplied; 1 changes nothing.
    #[serde(default = "one_f32", skip_serializing_if = "is_one_f32")]
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logit_bias: Vec<(u32, f32)>,
}

impl Sampling {
    /// Always the likeliest token.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

impl Default for Sampling {
    /// The model's own distribution, seed 0.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            seed: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }
}

fn one() -> u32 {
    1
}

fn one_f32() -> f32 {
    1.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero_f32(value: &f32) -> bool {
    *value == 0.0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_one_f32(value: &f32) -> bool {
    *value == 1.0
}

/// What a client demands of the bridge (`X-PD-Bridge-Require`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Require {
    /// Falling back to the decoder alone is fine.
    #[default]
    Nothing,
    /// Something must come from the bridge, or have been there already.
    Any,
    /// Everything up to the last prompt token must.
    Complete,
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

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token.
    Stop,
    /// The token budget or the context is used up.
    Length,
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

/// An error from a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct WorkerError {
    /// Machine-readable cause.
    pub code: WorkerErrorCode,
    /// For people.
    pub message: String,
}

/// Causes of a worker error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WorkerErrorCode {
    /// The message makes no sense here (unknown request, bad range, token outside the vocabulary).
    InvalidRequest,
    /// Prompt plus answer exceed what the worker can hold.
    TooLong,
    /// More work than the worker accepts.
    Busy,
    /// The client required a bridge and the transfer gave none.
    BridgeRequired,
    /// This decoder's cache cannot be made by this worker.
    Incompatible,
    /// The decoder was introduced but forgotten since, or never was: it must be introduced (again).
    NotPaired,
    /// The transfer failed; the cause is in the message.
    TransferFailed,
    /// The deadline passed.
    Timeout,
    /// The request was cancelled.
    Cancelled,
    /// The engine failed.
    Engine,
}

impl WorkerError {
    /// An error with a message for people.
    pub fn new(code: WorkerErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl WorkerErrorCode {
    /// The snake_case name, as in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::TooLong => "too_long",
            Self::Busy => "busy",
            Self::BridgeRequired => "bridge_required",
            Self::Incompatible => "incompatible",
            Self::NotPaired => "not_paired",
            Self::TransferFailed => "transfer_failed",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::Engine => "engine",
        }
    }
}
