//! From a layer's attention input to the decoder's cache arrays.

use std::collections::HashMap;
use std::sync::Arc;

use crate::ops::{At, CacheShape, Heads, Ops, OpsError, Workspace};

/// Makes the decoder's arrays of a layer, one implementation per kind of cache.
pub trait Reconstruct<O: Ops> {
    /// Shape of the second cache that a sequence needs beside the model's own, if any.
    fn extra_cache(&self, capacity_tokens: usize) -> Option<CacheShape>;

    /// Rotary embedding of the decoder; the model's own keys are rotated by it too.
    fn rope(&self) -> &O::Rope;

    /// The decoder's order of summation, as in its recipe; empty when unknown.
    fn summation_runs(&self) -> &[usize];

    /// Makes the chunk's arrays of `at.layer`, right after [`Ops::layer_keys_values`].
    ///
    /// # Errors
    /// What the backend reports.
    fn layer(
        &self,
        ops: &mut O,
        at: At,
        work: &mut Workspace<O::Buffer>,
        extra: Option<&mut O::Cache>,
    ) -> Result<(), OpsError>;

    /// Where the finished arrays of a layer lie.
    fn location(&self, layer: usize) -> Location;
}

/// Which cache of a sequence holds the decoder's arrays of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// The model's own: the decoder's projection is the same.
    Own,
    /// The extra one, at this layer index.
    Extra(usize),
}

/// Keys and values of every position, by the decoder's own projections.
pub struct FullKv<O: Ops> {
    heads: Heads,
    rope: O::Rope,
    summation_runs: Vec<usize>,
    layers: Vec<Source<O>>,
}

enum Source<O: Ops> {
    Own,
    Projected { slot: usize, weight: Arc<O::Weight> },
}

/// The decoder's projections, on the device, by digest.
pub type Projections<O> = HashMap<[u8; 32], Arc<<O as Ops>::Weight>>;

impl<O: Ops> FullKv<O> {
    /// For a decoder whose projections are `projections[i]`, or equal to the model's own where that is `None`.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn new(
        ops: &mut O,
        heads: Heads,
        inv_freq: &[f32],
        projections: Vec<Option<Arc<O::Weight>>>,
    ) -> Result<Self, OpsError> {
        let rope = ops.upload_rope(inv_freq)?;
        let mut slots = 0..;
        let mut source = |projection: Option<Arc<O::Weight>>| match projection {
            None => Source::Own,
            Some(weight) => Source::Projected { slot: slots.next().unwrap_or_default(), weight },
        };
        let layers = projections.into_iter().map(&mut source).collect();
        let heads = Heads { n_heads: 0, ..heads };
        Ok(Self { heads, rope, summation_runs: Vec::new(), layers })
    }

    /// Follows the decoder's order of summation ([`shared::control::KvRecipe::summation_runs`]).
    #[must_use]
    pub fn summed_in(mut self, runs: &[u32]) -> Self {
        self.summation_runs = runs.iter().map(|&n| n as usize).collect();
        self
    }

    /// Layers whose projection is not the model's own.
    #[must_use]
    pub fn foreign_layers(&self) -> usize {
        self.layers.iter().filter(|s| matches!(s, Source::Projected { .. })).count()
    }
}

impl<O: Ops> Reconstruct<O> for FullKv<O> {
    fn extra_cache(&self, capacity_tokens: usize) -> Option<CacheShape> {
        let n_layers = self.foreign_layers();
        let Heads { n_kv_heads, head_dim, .. } = self.heads;
        (n_layers > 0).then_some(CacheShape { n_layers, n_kv_heads, head_dim, capacity_tokens })
    }

    fn rope(&self) -> &O::Rope {
        &self.rope
    }

    fn summation_runs(&self) -> &[usize] {
        &self.summation_runs
    }

    fn layer(
        &self,
        ops: &mut O,
        at: At,
        work: &mut Workspace<O::Buffer>,
        extra: Option<&mut O::Cache>,
    ) -> Result<(), OpsError> {
        let Source::Projected { slot, weight } = &self.layers[at.layer] else { return Ok(()) };
        let Some(extra) = extra else {
            return Err(OpsError::Shape("the sequence has no cache for the decoder's arrays".into()));
        };
        let at = At { layer: *slot, ..at };
        ops.decoder_keys_values(at, weight, self.heads, &self.rope, work, extra)
    }

    fn location(&self, layer: usize) -> Location {
        match self.layers[layer] {
            Source::Own => Location::Own,
            Source::Projected { slot, .. } => Location::Extra(slot),
        }
    }
}
