//! The seam between the model forward and the hardware.
//!
//! [`crate::forward`] is written once over [`Ops`]. A backend supplies opaque handles for what it keeps in its own
//! memory (weights, activations, the running K/V cache, saved prefix blocks) and a handful of coarse operations.
//!
//! Rules every backend follows:
//!
//! * All calls come from one thread and take effect **in the order of the calls**. A backend may be asynchronous (a
//!   CUDA stream): a call may return before its work has run. Only [`Ops::synchronize`] waits, and errors of earlier
//!   work may surface in any later call.
//! * Nothing is allocated per chunk. Activations come from a [`Workspace`] planned once from the chunk size, the K/V
//!   cache is made once per request.
//! * Row-major everywhere. An activation is `[rows, columns]`, one row per token of the chunk; only the first
//!   `chunk.tokens` rows are meaningful. An operation that overwrites a buffer may use fewer columns than were planned
//!   (the last layer projects keys and values only): its rows then lie that much closer together.
//! * Running out of device memory is [`OpsError::OutOfMemory`] and leaves the backend usable.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use shared::angles::SinCos;
use shared::layout::Dtype;
use shared::weights::HostTensor;

/// Where a chunk lies in its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Position of the chunk's first token; the cache holds exactly this many tokens before it.
    pub offset_tokens: usize,
    /// Tokens in this chunk (`1..=workspace.max_tokens`).
    pub tokens: usize,
}

impl Chunk {
    /// Position after the chunk's last token.
    pub fn end(&self) -> usize {
        self.offset_tokens + self.tokens
    }
}

/// A layer's part of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// The chunk.
    pub chunk: Chunk,
    /// The layer, from 0.
    pub layer: usize,
}

/// Head counts of one fused projection output.
///
/// A row is `[q heads | k heads | v heads]`, each head `head_dim` wide. `n_heads` is 0 where only keys and values
/// are wanted (the last layer, and the decoder's own projections).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads in the row (0: the row is `[k heads | v heads]`).
    pub n_heads: usize,
    /// Key heads, and as many value heads.
    pub n_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl Heads {
    /// Columns of a fused projection row.
    pub fn columns(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }
}

/// Size of a K/V cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers.
    pub n_layers: usize,
    /// Key heads per layer, and as many value heads.
    pub n_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens it can hold.
    pub capacity_tokens: usize,
}

/// One linear layer as the host hands it over.
///
/// The rows of `weights` are concatenated in order (for example q, k, v), so that one product computes them all.
pub struct HostLinear {
    /// Each `[out_i, in]`; all share `in`.
    pub weights: Vec<HostTensor>,
    /// Each `[out_i]`, one per weight, or empty for no bias.
    pub biases: Vec<HostTensor>,
}

/// What to hand to the host: one layer's keys and values of a token range, in the decoder's element type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emit {
    /// The decoder's layer, as it will be named in [`Piece::layer`].
    pub layer: usize,
    /// The layer of the cache given that holds its arrays.
    pub slot: usize,
    /// Token positions; all of them are in the cache when the call is made.
    pub tokens: Range<usize>,
    /// Decoder's block size. The range is cut at multiples of it, see [`pieces`].
    pub block_tokens: usize,
    /// Element type wanted, rounded to nearest even.
    pub dtype: Dtype,
}

/// One finished piece of the decoder's cache: never straddles a block border.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Layer.
    pub layer: usize,
    /// Token positions.
    pub tokens: Range<usize>,
    /// Keys, contiguous `[n_kv_heads, tokens, head_dim]`. `Bytes::from_owner` lets a backend get its pinned buffer
    /// back when the network is done with it.
    pub keys: Bytes,
    /// Values, same shape.
    pub values: Bytes,
}

/// Receives finished pieces, on any thread, in the order in which they were emitted.
pub trait Sink: Send + Sync {
    /// Takes one piece. Blocks while the network is behind: this is the back-pressure. An error means that nobody
    /// wants the rest; the backend drops what is still in flight and answers [`OpsError::SinkClosed`].
    fn deliver(&self, piece: Piece) -> Result<(), SinkClosed>;
}

/// The receiver of pieces has gone away or the request was cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the receiver of cache pieces is gone")]
pub struct SinkClosed;

/// Cuts a token range at multiples of `block_tokens`.
pub fn pieces(tokens: Range<usize>, block_tokens: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = tokens.start;
    std::iter::from_fn(move || {
        if start >= tokens.end {
            return None;
        }
        let end = ((start / block_tokens + 1) * block_tokens).min(tokens.end);
        let piece = start..end;
        start = end;
        Some(piece)
    })
}

/// Activations of one chunk.
pub struct Workspace<B> {
    /// Rows of every buffer: the largest chunk.
    pub max_tokens: usize,
    /// Residual stream, `[max_tokens, hidden]`.
    pub hidden: B,
    /// Normed input of attention or of the MLP, `[max_tokens, hidden]`.
    pub normed: B,
    /// Fused projection, `[max_tokens, (n_heads + 2 n_kv_heads) * head_dim]`.
    pub qkv: B,
    /// Attention output, `[max_tokens, n_heads * head_dim]`.
    pub attended: B,
    /// Fused gate and up projection, `[max_tokens, 2 * intermediate]`.
    pub gate_up: B,
    /// MLP activation, `[max_tokens, intermediate]`.
    pub activated: B,
    /// The decoder's own K/V projection, `[max_tokens, 2 * n_kv_heads * head_dim]`.
    pub decoder_kv: B,
}

/// Weights of one layer, uploaded.
pub struct LayerWeights<W> {
    /// `[hidden]`.
    pub attention_norm: W,
    /// Rows `[q | k | v]`; in the last layer `[k | v]` only.
    pub qkv: W,
    /// What a row of `qkv` holds.
    pub heads: Heads,
    /// What follows the keys and values; absent in the last layer, whose output a prefill never needs.
    pub rest: Option<RestWeights<W>>,
}

/// Weights of a layer after its keys and values.
pub struct RestWeights<W> {
    /// `[hidden, n_heads * head_dim]`.
    pub output: W,
    /// `[hidden]`.
    pub mlp_norm: W,
    /// Rows `[gate | up]`, `[2 * intermediate, hidden]`.
    pub gate_up: W,
    /// `[hidden, intermediate]`.
    pub down: W,
}

/// Numbers of the model that layers need.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerParams {
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f32,
    /// Keys a query sees, itself included; `None` for all before it.
    pub window_tokens: Option<usize>,
}

/// Operations of a backend.
pub trait Ops: Send + 'static {
    /// An uploaded weight: linear layer (with bias), norm vector, or embedding table.
    type Weight: Send;
    /// An activation buffer.
    type Buffer: Send;
    /// Rotary frequencies, uploaded.
    type Rope: Send;
    /// Keys (rotated) and values of one running sequence, every layer.
    type Cache: Send;
    /// A saved copy of some tokens of a cache, every layer; what the prefix cache keeps.
    type Saved: Send;

    /// Backend and device, for logs and `hello`: `cpu (2 threads, avx512)`, `cuda (NVIDIA H200, sm_90a)`.
    fn describe(&self) -> String;

    /// Chunk size this backend likes best for a prompt that long.
    fn preferred_chunk_tokens(&self) -> usize;

    /// Uploads a linear layer, concatenating its parts by rows.
    fn upload_linear(&mut self, linear: HostLinear) -> Result<Self::Weight, OpsError>;

    /// Uploads a norm weight, `[columns]`.
    fn upload_norm(&mut self, weight: HostTensor) -> Result<Self::Weight, OpsError>;

    /// Uploads the embedding table, `[vocab, hidden]`.
    fn upload_embedding(&mut self, table: HostTensor) -> Result<Self::Weight, OpsError>;

    /// Uploads rotary frequencies, `[head_dim / 2]`, scaling already applied.
    fn upload_rope(&mut self, inv_freq: &[f32]) -> Result<Self::Rope, OpsError>;

    /// Makes an activation buffer `[rows, columns]`.
    fn buffer(&mut self, rows: usize, columns: usize) -> Result<Self::Buffer, OpsError>;

    /// Makes an empty cache.
    fn cache(&mut self, shape: CacheShape) -> Result<Self::Cache, OpsError>;

    /// Copies tokens of every layer out of a cache.
    fn save(&mut self, cache: &Self::Cache, tokens: Range<usize>) -> Result<Self::Saved, OpsError>;

    /// Copies saved tokens of every layer into a cache, starting at position `at`.
    fn restore(&mut self, saved: &Self::Saved, cache: &mut Self::Cache, at: usize) -> Result<(), OpsError>;

    /// Memory that a saved copy takes, in bytes.
    fn saved_bytes(&self, saved: &Self::Saved) -> usize;

    /// Called before a chunk's first operation; a place to upload parameters or begin a graph.
    fn begin_chunk(&mut self, _chunk: Chunk) -> Result<(), OpsError> {
        Ok(())
    }

    /// Called after a chunk's last operation was asked for; must not wait for the device.
    fn end_chunk(&mut self, _chunk: Chunk) -> Result<(), OpsError> {
        Ok(())
    }

    /// `out[t, :] = table[tokens[t], :]`. Ids were checked against the vocabulary.
    fn embed(&mut self, table: &Self::Weight, tokens: &[u32], out: &mut Self::Buffer)
    -> Result<(), OpsError>;

    /// `out[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight`, statistics in f32.
    fn rms_norm(
        &mut self,
        chunk: Chunk,
        x: &Self::Buffer,
        weight: &Self::Weight,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), OpsError>;

    /// `out = x Wᵀ + b`, or `out += x Wᵀ + b` when `accumulate` (the residual connection). f32 accumulation.
    fn linear(
        &mut self,
        chunk: Chunk,
        weight: &Self::Weight,
        x: &Self::Buffer,
        accumulate: bool,
        out: &mut Self::Buffer,
    ) -> Result<(), OpsError>;

    /// Takes note of the decoder's order of summation for the products that make keys and values
    /// ([`shared::control::KvRecipe::summation_runs`]; empty when unknown). A backend that can't follow it ignores it.
    fn follow_summation(&mut self, _runs: &[usize]) {}

    /// Takes note of how the decoder's device computes cosines and sines, for every later [`Ops::upload_rope`]. A
    /// backend that can't follow it ignores it.
    fn follow_sin_cos(&mut self, _sin_cos: SinCos) {}

    /// As [`Ops::linear`] without accumulating, for a product that makes keys and values: in the decoder's order of
    /// summation, where this backend can follow it.
    fn linear_keys_values(
        &mut self,
        chunk: Chunk,
        weight: &Self::Weight,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), OpsError> {
        self.linear(chunk, weight, x, false, out)
    }

    /// Rotates the queries of `qkv` in place and its keys into the cache, and copies its values into the cache, at
    /// positions `at.chunk.offset_tokens..at.chunk.end()` of `at.layer`.
    ///
    /// Half-split order, f32: `theta = position * inv_freq[i]`, `out[i] = x[i] cos - x[i + d/2] sin`,
    /// `out[i + d/2] = x[i] sin + x[i + d/2] cos`, products rounded before the sum (no fused multiply-add), as MLX does.
    fn rope_append(
        &mut self,
        at: At,
        heads: Heads,
        rope: &Self::Rope,
        qkv: &mut Self::Buffer,
        cache: &mut Self::Cache,
    ) -> Result<(), OpsError>;

    /// Causal attention of the chunk's queries over the cache's first `at.chunk.end()` tokens of
    /// `at.layer`.
    ///
    /// `out[t, h, :] = softmax(q[t, h] · K[h / group]ᵀ / sqrt(head_dim)) V[h / group]`; the query at position `p` sees
    /// keys `p - window + 1 ..= p`. Reads the rotated queries of `qkv`.
    fn attention(
        &mut self,
        at: At,
        heads: Heads,
        window_tokens: Option<usize>,
        qkv: &Self::Buffer,
        cache: &Self::Cache,
        out: &mut Self::Buffer,
    ) -> Result<(), OpsError>;

    /// `out[t, i] = silu(gate_up[t, i]) * gate_up[t, intermediate + i]`.
    fn swiglu(
        &mut self,
        chunk: Chunk,
        gate_up: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), OpsError>;

    /// Casts one layer's keys and values to the decoder's element type and layout and hands them to the host, one
    /// [`Piece`] per block touched.
    ///
    /// Ordered after everything asked for before. An asynchronous backend copies on a side stream and delivers from
    /// another thread; this call waits only when all of its host buffers are still held by the network.
    fn emit(&mut self, what: Emit, cache: &Self::Cache, sink: &Arc<dyn Sink>) -> Result<(), OpsError>;

    /// Reads an activation back as f32, `[chunk.tokens, columns]` row-major. For checks only; waits.
    fn read(&mut self, chunk: Chunk, x: &Self::Buffer) -> Result<Vec<f32>, OpsError>;

    /// Writes host values, `[chunk.tokens, columns]` row-major, into an activation. For checks only.
    fn write(&mut self, chunk: Chunk, values: &[f32], out: &mut Self::Buffer) -> Result<(), OpsError>;

    /// Waits until all work is done and every emitted piece was delivered; reports what failed on the way.
    fn synchronize(&mut self) -> Result<(), OpsError>;

    /// First half of a layer: norm, fused projection, rotation, append to the cache. After it, `at.layer` of the cache
    /// holds the chunk and may be emitted. Leaves the normed input in `work.normed` for the decoder's projections.
    fn layer_keys_values(
        &mut self,
        at: At,
        params: LayerParams,
        weights: &LayerWeights<Self::Weight>,
        rope: &Self::Rope,
        work: &mut Workspace<Self::Buffer>,
        cache: &mut Self::Cache,
    ) -> Result<(), OpsError> {
        self.rms_norm(
            at.chunk,
            &work.hidden,
            &weights.attention_norm,
            params.rms_norm_eps,
            &mut work.normed,
        )?;
        self.linear_keys_values(at.chunk, &weights.qkv, &work.normed, &mut work.qkv)?;
        self.rope_append(at, weights.heads, rope, &mut work.qkv, cache)
    }

    /// Second half of a layer: attention, output projection, MLP; updates `work.hidden`. Never called for the last
    /// layer.
    fn layer_rest(
        &mut self,
        at: At,
        params: LayerParams,
        heads: Heads,
        weights: &RestWeights<Self::Weight>,
        work: &mut Workspace<Self::Buffer>,
        cache: &Self::Cache,
    ) -> Result<(), OpsError> {
        self.attention(at, heads, params.window_tokens, &work.qkv, cache, &mut work.attended)?;
        self.linear(at.chunk, &weights.output, &work.attended, true, &mut work.hidden)?;
        self.rms_norm(at.chunk, &work.hidden, &weights.mlp_norm, params.rms_norm_eps, &mut work.normed)?;
        self.linear(at.chunk, &weights.gate_up, &work.normed, false, &mut work.gate_up)?;
        self.swiglu(at.chunk, &work.gate_up, &mut work.activated)?;
        self.linear(at.chunk, &weights.down, &work.activated, true, &mut work.hidden)
    }

    /// Keys and values through the decoder's own projection of the same normed input (`work.normed`, as
    /// [`Ops::layer_keys_values`] left it) into `cache`, a second cache that holds the decoder's arrays.
    fn decoder_keys_values(
        &mut self,
        at: At,
        projection: &Self::Weight,
        heads: Heads,
        rope: &Self::Rope,
        work: &mut Workspace<Self::Buffer>,
        cache: &mut Self::Cache,
    ) -> Result<(), OpsError> {
        self.linear_keys_values(at.chunk, projection, &work.normed, &mut work.decoder_kv)?;
        self.rope_append(at, heads, rope, &mut work.decoder_kv, cache)
    }
}

/// Why an operation could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpsError {
    /// The device has no memory left for this; the backend stays usable.
    #[error("out of device memory: {what} needs {bytes} bytes")]
    OutOfMemory {
        /// What was being made.
        what: String,
        /// Size asked for.
        bytes: usize,
    },
    /// The device or its driver reported an error.
    #[error("device error: {0}")]
    Device(String),
    /// This backend cannot do it.
    #[error("not supported by this backend: {0}")]
    Unsupported(String),
    /// Shapes do not fit together.
    #[error("shape mismatch: {0}")]
    Shape(String),
    /// The receiver of emitted pieces went away.
    #[error(transparent)]
    SinkClosed(#[from] SinkClosed),
}

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn pieces_are_cut_at_block_borders() {
        let cut = |range| pieces(range, 256).collect::<Vec<_>>();
        assert_eq!(cut(0..256), vec![0..256]);
        assert_eq!(cut(100..600), vec![100..256, 256..512, 512..600]);
        assert_eq!(cut(511..513), vec![511..512, 512..513]);
        assert!(cut(5..5).is_empty());
    }
}
