//! The llama forward, written once over [`Ops`].
//!
//! A prefill needs keys and values only: the last layer stops after them, and there is no final norm and no output
//! head. Layers emit their arrays as soon as they exist, so copying and sending overlap the layers that follow.

use std::ops::Range;
use std::sync::Arc;

use shared::layout::Dtype;
use shared::spec::ModelSpec;
use shared::weights::TensorSource;
use tokio_util::sync::CancellationToken;

use crate::model::{LoadError, Weights, heads};
use crate::ops::{At, CacheShape, Chunk, Emit, Heads, Ops, OpsError, Sink, SinkClosed, Workspace};
use crate::reconstruct::{Location, Reconstruct};

/// A model ready to run, with the memory that one chunk needs.
pub struct Forward<O: Ops> {
    /// The backend.
    pub ops: O,
    weights: Weights<O>,
    heads: Heads,
    hidden: usize,
    intermediate: usize,
    work: Workspace<O::Buffer>,
}

/// A prompt being read.
pub struct Sequence<O: Ops> {
    /// The model's own keys and values.
    pub own: O::Cache,
    /// The decoder's, where its projections differ.
    pub extra: Option<O::Cache>,
    /// Tokens that every layer holds.
    pub tokens: usize,
}

/// Where a chunk's arrays go.
pub struct Target {
    /// Takes the pieces.
    pub sink: Arc<dyn Sink>,
    /// Positions wanted; others are computed but not emitted.
    pub tokens: Range<usize>,
    /// Decoder's block size.
    pub block_tokens: usize,
    /// Decoder's element type, per layer.
    pub dtypes: Arc<[Dtype]>,
}

/// Why a chunk was not finished.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// The request was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The backend reported an error.
    #[error(transparent)]
    Ops(OpsError),
}

impl From<OpsError> for ForwardError {
    fn from(error: OpsError) -> Self {
        match error {
            OpsError::SinkClosed(SinkClosed) => Self::Cancelled,
            other => Self::Ops(other),
        }
    }
}

impl<O: Ops> Forward<O> {
    /// Uploads a model and plans memory for chunks of `chunk_tokens`.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(
        mut ops: O,
        spec: &ModelSpec,
        source: &dyn TensorSource,
        chunk_tokens: usize,
    ) -> Result<Self, LoadError> {
        let weights = Weights::load(&mut ops, spec, source)?;
        Ok(Self::with_weights(ops, spec, weights, chunk_tokens)?)
    }

    /// Takes weights that are on the backend already.
    ///
    /// # Errors
    /// [`OpsError::OutOfMemory`].
    pub fn with_weights(
        mut ops: O,
        spec: &ModelSpec,
        weights: Weights<O>,
        chunk_tokens: usize,
    ) -> Result<Self, OpsError> {
        let (heads, hidden, intermediate) = (heads(spec), spec.hidden, spec.intermediate);
        let work = plan(&mut ops, heads, hidden, intermediate, chunk_tokens)?;
        Ok(Self { ops, weights, heads, hidden, intermediate, work })
    }

    /// Largest chunk.
    pub fn chunk_tokens(&self) -> usize {
        self.work.max_tokens
    }

    /// Layers of the model.
    pub fn n_layers(&self) -> usize {
        self.weights.layers.len()
    }

    /// Head counts of the model.
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// Plans memory for another chunk size.
    ///
    /// # Errors
    /// [`OpsError::OutOfMemory`]; the old plan stays.
    pub fn set_chunk_tokens(&mut self, chunk_tokens: usize) -> Result<(), OpsError> {
        self.work = plan(&mut self.ops, self.heads, self.hidden, self.intermediate, chunk_tokens)?;
        Ok(())
    }

    /// An empty sequence with room for `capacity_tokens`.
    ///
    /// # Errors
    /// [`OpsError::OutOfMemory`].
    pub fn begin(
        &mut self,
        capacity_tokens: usize,
        reconstruct: &impl Reconstruct<O>,
    ) -> Result<Sequence<O>, OpsError> {
        let Heads { n_kv_heads, head_dim, .. } = self.heads;
        let shape = CacheShape { n_layers: self.n_layers(), n_kv_heads, head_dim, capacity_tokens };
        let own = self.ops.cache(shape)?;
        let extra =
            reconstruct.extra_cache(capacity_tokens).map(|shape| self.ops.cache(shape)).transpose()?;
        Ok(Sequence { own, extra, tokens: 0 })
    }

    /// Reads the next `tokens` (at most [`Forward::chunk_tokens`]) of a sequence and emits what `target` wants of them.
    /// Cancelling takes effect at the next layer.
    ///
    /// # Errors
    /// [`ForwardError`]; the sequence is unchanged in what it holds before this chunk and may be tried again.
    pub fn chunk(
        &mut self,
        sequence: &mut Sequence<O>,
        tokens: &[u32],
        reconstruct: &impl Reconstruct<O>,
        target: Option<&Target>,
        cancel: &CancellationToken,
    ) -> Result<(), ForwardError> {
        let chunk = Chunk { offset_tokens: sequence.tokens, tokens: tokens.len() };
        let Self { ops, weights, work, heads, .. } = self;
        ops.follow_summation(reconstruct.summation_runs());
        ops.begin_chunk(chunk)?;
        ops.embed(&weights.embedding, tokens, &mut work.hidden)?;
        for (layer, layer_weights) in weights.layers.iter().enumerate() {
            if cancel.is_cancelled() {
                return Err(ForwardError::Cancelled);
            }
            let at = At { chunk, layer };
            let rope = reconstruct.rope();
            ops.layer_keys_values(at, weights.params, layer_weights, rope, work, &mut sequence.own)?;
            reconstruct.layer(ops, at, work, sequence.extra.as_mut())?;
            if let Some(target) = target {
                emit(ops, sequence, reconstruct, target, layer, chunk.offset_tokens..chunk.end())?;
            }
            if let Some(rest) = &layer_weights.rest {
                ops.layer_rest(at, weights.params, *heads, rest, work, &sequence.own)?;
            }
        }
        ops.end_chunk(chunk)?;
        sequence.tokens = chunk.end();
        Ok(())
    }

    /// Emits tokens that the sequence holds already (restored from a prefix cache), every layer.
    ///
    /// # Errors
    /// [`ForwardError`].
    pub fn emit_held(
        &mut self,
        sequence: &Sequence<O>,
        reconstruct: &impl Reconstruct<O>,
        target: &Target,
        cancel: &CancellationToken,
    ) -> Result<(), ForwardError> {
        for layer in 0..self.n_layers() {
            if cancel.is_cancelled() {
                return Err(ForwardError::Cancelled);
            }
            emit(&mut self.ops, sequence, reconstruct, target, layer, 0..sequence.tokens)?;
        }
        Ok(())
    }

    /// Makes one layer's arrays from given attention inputs, `[tokens, hidden]` row-major f32, and emits them: the
    /// reconstruction alone, without the forward before it.
    ///
    /// # Errors
    /// [`ForwardError`].
    pub fn reconstruct_layer(
        &mut self,
        sequence: &mut Sequence<O>,
        layer: usize,
        attention_input: &[f32],
        reconstruct: &impl Reconstruct<O>,
        target: &Target,
    ) -> Result<(), ForwardError> {
        let max = self.chunk_tokens();
        let Self { ops, weights, work, hidden, .. } = self;
        let weights = &weights.layers[layer];
        ops.follow_summation(reconstruct.summation_runs());
        let mut offset_tokens = 0;
        for input in attention_input.chunks(max * *hidden) {
            let chunk = Chunk { offset_tokens, tokens: input.len() / *hidden };
            let at = At { chunk, layer };
            ops.begin_chunk(chunk)?;
            ops.write(chunk, input, &mut work.normed)?;
            ops.linear_keys_values(chunk, &weights.qkv, &work.normed, &mut work.qkv)?;
            ops.rope_append(at, weights.heads, reconstruct.rope(), &mut work.qkv, &mut sequence.own)?;
            reconstruct.layer(ops, at, work, sequence.extra.as_mut())?;
            ops.end_chunk(chunk)?;
            offset_tokens = chunk.end();
        }
        Ok(emit(ops, sequence, reconstruct, target, layer, 0..offset_tokens)?)
    }
}

fn emit<O: Ops>(
    ops: &mut O,
    sequence: &Sequence<O>,
    reconstruct: &impl Reconstruct<O>,
    target: &Target,
    layer: usize,
    held: Range<usize>,
) -> Result<(), OpsError> {
    let tokens = held.start.max(target.tokens.start)..held.end.min(target.tokens.end);
    if tokens.is_empty() {
        return Ok(());
    }
    let what =
        Emit { layer, slot: layer, tokens, block_tokens: target.block_tokens, dtype: target.dtypes[layer] };
    match (reconstruct.location(layer), &sequence.extra) {
        (Location::Extra(slot), Some(extra)) => ops.emit(Emit { slot, ..what }, extra, &target.sink),
        _ => ops.emit(what, &sequence.own, &target.sink),
    }
}

fn plan<O: Ops>(
    ops: &mut O,
    heads: Heads,
    hidden: usize,
    intermediate: usize,
    max_tokens: usize,
) -> Result<Workspace<O::Buffer>, OpsError> {
    let query_width = heads.n_heads * heads.head_dim;
    let mut buffer = |columns| ops.buffer(max_tokens, columns);
    Ok(Workspace {
        max_tokens,
        hidden: buffer(hidden)?,
        normed: buffer(hidden)?,
        qkv: buffer(heads.columns())?,
        attended: buffer(query_width)?,
        gate_up: buffer(2 * intermediate)?,
        activated: buffer(intermediate)?,
        decoder_kv: buffer(2 * heads.n_kv_heads * heads.head_dim)?,
    })
}
