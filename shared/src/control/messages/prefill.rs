//! Between the gateway and a prefill worker.

use super::error::WorkerError;
use crate::control::hello::{CacheIdentity, Rates};
use crate::hexbytes::Hex;
use crate::tokens::TokenIds;
use serde::{Deserialize, Serialize};

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
