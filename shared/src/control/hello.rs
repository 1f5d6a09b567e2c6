//! What a worker says of itself when a control connection opens.

use crate::angles::SinCos;
use crate::hexbytes::Hex;
use crate::layout::CacheLayout;
use serde::{Deserialize, Serialize};

/// Version of the control messages; a mismatch refuses the connection.
pub const PROTOCOL_VERSION: u32 = 3;

/// The two kinds of worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads prompts and computes caches.
    Prefill,
    /// Owns the cache and writes answers.
    Decode,
}

/// A worker's description of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the worker.
    pub protocol: u32,
    /// What it is.
    pub role: Role,
    /// Name for people and for the verdict, unique in the fleet.
    pub node: String,
    /// Software version.
    pub version: String,
    /// Engine and device, e.g. `mlx cpu` or `cuda NVIDIA H200`, and why it was chosen.
    pub engine: String,
    /// Model name as clients see it.
    pub model: String,
    /// BLAKE3 of the tokenizer; gateway and workers must agree.
    pub tokenizer_digest: Hex<32>,
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// Longest prompt plus answer.
    pub max_tokens: u32,
    /// Most tokens (summed over requests) this worker accepts at once; 0 means no own limit.
    pub capacity_tokens: u64,
    /// Measured speeds, for the planner.
    pub rates: Rates,
    /// Decode workers: who they are to a cache. Absent on prefill workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheIdentity>,
}

/// What a decode worker publishes so that others can make its cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheIdentity {
    /// Digest over config, tokenizer, template, weight index and K/V projections.
    pub fingerprint: Hex<32>,
    /// Shape of the cache.
    pub layout: CacheLayout,
    /// How attention inputs become cache rows.
    pub recipe: KvRecipe,
    /// Where frames are received, `host:port`.
    pub bulk_addr: String,
}

/// The decoder's own arithmetic from a layer's attention input to its cache rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KvRecipe {
    /// Rotary embedding of the keys.
    pub rope: RopeRecipe,
    /// Per layer: digest of the effective f32 K and V projections ([`crate::weights::kv_projection_digest`]).
    pub projection_digests: Vec<Hex<32>>,
    /// How the decoder's matrix product adds up the terms of one output element: lengths of runs over the inner
    /// dimension, each summed by fused multiply-adds in order from zero, the runs then added up in order. Empty
    /// when that is not known; a worker that can't follow it is off by rounding only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub summation_runs: Vec<u32>,
}

/// Rotary embedding, half-split order: `out1 = x1·cos − x2·sin`, `out2 = x2·cos + x1·sin` with
/// `theta = position · inv_freq[i]` in f32.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeRecipe {
    /// The f32 inverse frequencies that the decoder's device uses, `head_dim / 2` values.
    pub inv_freq: Vec<f32>,
    /// How the decoder's device computes `cos θ` and `sin θ`.
    #[serde(default)]
    pub sin_cos: SinCos,
}

/// Measured speeds; 0 where nothing was measured yet.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Rates {
    /// Prompt tokens per second.
    pub prefill_tokens_per_s: f64,
    /// Answer tokens per second of one request.
    pub decode_tokens_per_s: f64,
}
