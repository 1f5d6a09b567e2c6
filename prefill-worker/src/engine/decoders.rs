//! Decoders whose cache this worker can make.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use shared::control::{CacheIdentity, KvRecipe, WorkerError, WorkerErrorCode};
use shared::hexbytes::Hex;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use shared::spec::ModelSpec;

use super::registry::Registry;
use super::{EngineOptions, Projection};
use crate::forward::Forward;
use crate::ops::Ops;
use crate::reconstruct::{FullKv, Projections};

/// Frequencies that differ by more than this (relatively) are of another model.
const FREQUENCY_TOLERANCE: f32 = 1e-4;

/// Paired decoders by fingerprint.
pub(super) struct Decoders<O: Ops> {
    spec: ModelSpec,
    own_projections: Vec<[u8; 32]>,
    inv_freq: Vec<f32>,
    projections: Projections<O>,
    paired: HashMap<Hex<32>, Arc<Decoder<O>>>,
    /// Longest unused first.
    order: Vec<Hex<32>>,
    max_decoders: usize,
    registry: Registry,
}

/// How to make one decoder's cache.
pub(super) struct Decoder<O: Ops> {
    pub(super) reconstruct: FullKv<O>,
    pub(super) block_tokens: usize,
    pub(super) dtypes: Arc<[Dtype]>,
    /// Digest over everything that own and decoder arrays depend on besides tokens and this worker's weights.
    pub(super) recipe_digest: [u8; 32],
    recipe: KvRecipe,
    layout: CacheLayout,
}

impl<O: Ops> Decoders<O> {
    pub(super) fn new(spec: ModelSpec, options: EngineOptions, registry: Registry) -> Self {
        let EngineOptions { own_projections, max_decoders, inv_freq, .. } = options;
        let (projections, paired) = (HashMap::new(), HashMap::new());
        let order = Vec::new();
        Self { spec, own_projections, inv_freq, projections, paired, order, max_decoders, registry }
    }

    pub(super) fn find(&mut self, fingerprint: &Hex<32>) -> Result<Arc<Decoder<O>>, WorkerError> {
        let unknown =
            || WorkerError::new(WorkerErrorCode::NotPaired, format!("decoder {fingerprint} is not paired"));
        let found = self.paired.get(fingerprint).cloned().ok_or_else(unknown)?;
        self.touch(*fingerprint);
        Ok(found)
    }

    pub(super) fn projection_digests(&self) -> HashSet<[u8; 32]> {
        self.projections.keys().copied().collect()
    }

    /// Prepares for a decoder. `fetched` holds those of its projections that are neither our own nor here already.
    pub(super) fn pair(
        &mut self,
        forward: &mut Forward<O>,
        cache: CacheIdentity,
        fetched: Vec<Projection>,
    ) -> Result<u32, WorkerError> {
        let dtypes = check(&self.spec, &self.inv_freq, &cache)?;
        if let Some(known) = self.paired.get(&cache.fingerprint)
            && (&known.recipe, &known.layout) == (&cache.recipe, &cache.layout)
        {
            let foreign = known.reconstruct.foreign_layers();
            self.touch(cache.fingerprint);
            return Ok(foreign as u32);
        }
        let engine = |e: crate::ops::OpsError| WorkerError::new(WorkerErrorCode::Engine, e.to_string());
        for Projection { digest, linear } in fetched {
            let weight = forward.ops.upload_linear(linear).map_err(engine)?;
            self.projections.insert(digest, Arc::new(weight));
        }
        let digests = cache.recipe.projection_digests.iter().zip(&self.own_projections);
        let sources =
            digests.enumerate().map(|(layer, (theirs, ours))| match self.projections.get(&theirs.0) {
                _ if theirs.0 == *ours => Ok(None),
                Some(weight) => Ok(Some(weight.clone())),
                None => Err(incompatible(format!("the decoder's projections of layer {layer} are missing"))),
            });
        let sources = sources.collect::<Result<Vec<_>, _>>()?;
        let heads = forward.heads();
        let KvRecipe { rope, summation_runs, .. } = &cache.recipe;
        forward.ops.follow_sin_cos(rope.sin_cos);
        let reconstruct = FullKv::new(&mut forward.ops, heads, &rope.inv_freq, sources).map_err(engine)?;
        let reconstruct = reconstruct.summed_in(summation_runs);
        let foreign = reconstruct.foreign_layers();
        let decoder = Decoder {
            reconstruct,
            block_tokens: cache.layout.block_tokens as usize,
            dtypes,
            recipe_digest: recipe_digest(&cache.recipe),
            recipe: cache.recipe,
            layout: cache.layout,
        };
        self.paired.insert(cache.fingerprint, Arc::new(decoder));
        self.registry.add(cache.fingerprint);
        self.touch(cache.fingerprint);
        self.forget_unused();
        Ok(foreign as u32)
    }

    fn touch(&mut self, fingerprint: Hex<32>) {
        self.order.retain(|f| *f != fingerprint);
        self.order.push(fingerprint);
    }

    /// Makes room: of more decoders than are kept, those go that no request needs, the longest unused first. Where
    /// all are needed there are more for a while; requests are limited, so these are too.
    fn forget_unused(&mut self) {
        let newest = self.order.last().copied();
        let mut excess = self.order.len().saturating_sub(self.max_decoders);
        self.order.retain(|fingerprint| {
            let goes = excess > 0 && Some(*fingerprint) != newest && self.registry.remove_idle(fingerprint);
            if goes {
                excess -= 1;
                self.paired.remove(fingerprint);
                tracing::warn!(
                    decoder = %fingerprint,
                    max_decoders = self.max_decoders,
                    "more decoders than this worker keeps paired: the longest unused is forgotten, and paired again \
                     when it is needed; raise max_decoders if that happens often"
                );
            }
            !goes
        });
        let used: HashSet<[u8; 32]> =
            self.paired.values().flat_map(|d| d.recipe.projection_digests.iter().map(|h| h.0)).collect();
        self.projections.retain(|digest, _| used.contains(digest));
    }
}

/// Whether this model's arrays can have that layout by that recipe; answers the element type of every layer.
fn check(spec: &ModelSpec, own_inv_freq: &[f32], cache: &CacheIdentity) -> Result<Arc<[Dtype]>, WorkerError> {
    cache.layout.validate().map_err(|e| incompatible(e.to_string()))?;
    let layers = cache.layout.layers.len();
    let digests = cache.recipe.projection_digests.len();
    if layers != spec.n_layers || digests != spec.n_layers {
        return Err(incompatible(format!(
            "the decoder has {layers} cache layers and {digests} projections, this model has {} layers",
            spec.n_layers
        )));
    }
    let inv_freq = &cache.recipe.rope.inv_freq;
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= FREQUENCY_TOLERANCE * b.abs();
    if inv_freq.len() != own_inv_freq.len() || !inv_freq.iter().zip(own_inv_freq).all(close) {
        return Err(incompatible("the decoder rotates keys by other frequencies".into()));
    }
    let dtype = |layer: &LayerCache| match *layer {
        LayerCache::Full { n_kv_heads, head_dim, dtype }
            if (n_kv_heads as usize, head_dim as usize) == (spec.n_kv_heads, spec.head_dim) =>
        {
            Ok(dtype)
        }
        ref other => Err(incompatible(format!("a cache layer of {other:?} cannot be made from this model"))),
    };
    cache.layout.layers.iter().map(dtype).collect()
}

fn recipe_digest(recipe: &KvRecipe) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"pd-bridge/recipe/v1");
    for frequency in &recipe.rope.inv_freq {
        hasher.update(&frequency.to_le_bytes());
    }
    hasher.update(format!("{:?}", recipe.rope.sin_cos).as_bytes());
    for digest in &recipe.projection_digests {
        hasher.update(&digest.0);
    }
    for run in &recipe.summation_runs {
        hasher.update(&run.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

fn incompatible(message: String) -> WorkerError {
    WorkerError::new(WorkerErrorCode::Incompatible, message)
}
