//! The MLX engine: one model's weights, running requests' caches, and the forward pass over them.
//!
//! MLX arrays may move between threads but must not be shared by them, so one engine thread owns everything here.
//! Operations are recorded lazily; each public method evaluates what it returns.
//!
//! The arithmetic is mlx-lm's (same operations, same order), so greedy output equals mlx-lm's over equal weights.

mod batch;
mod blocks;
mod error;
mod host;
mod llama;
mod rope;
mod sequence;
mod summation;
mod weights;

#[cfg(test)]
mod golden;
#[cfg(test)]
mod smollm2;

use mlx_rs::ops::indexing::TryIndexOp as _;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Device, memory};
use shared::angles::SinCos;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use shared::spec::ModelSpec;
use shared::weights::{TensorFormat, TensorSource};

pub use blocks::{BlockBytes, LayerBytes};
pub use error::MlxError;
pub use sequence::Sequence;

use blocks::CacheShape;
use host::{array_to_f32, dim};
use llama::Llama;
use rope::Rope;
use weights::Loader;

/// Tokens whose logits exist at the same time.
const LOGIT_ROWS: usize = 16;

/// How weights are held and what precision is computed in.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Precision of activations. `None`: f32 on a CPU, the weights' own precision on a GPU.
    pub compute: Option<Dtype>,
    /// What becomes of group-quantized weights.
    pub quantized: Quantized,
    /// Precision of cached keys and values. `None`: that of the activations.
    pub cache: Option<Dtype>,
}

/// Whether group-quantized weights stay quantized in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quantized {
    /// Kept packed on a GPU, expanded on a CPU, where MLX multiplies packed weights many times slower.
    #[default]
    Auto,
    /// Kept packed.
    Always,
    /// Expanded when they are loaded.
    Never,
}

/// One model in MLX.
#[derive(Debug)]
pub struct MlxModel {
    llama: Llama,
    rope: Rope,
    inv_freq: Vec<f32>,
    shape: CacheShape,
    vocab_size: usize,
    on_gpu: bool,
    /// Inner dimension and columns of the K/V projections, if they are computed in f32 on a CPU.
    plain_projection: Option<(usize, usize)>,
}

impl MlxModel {
    /// Reads all weights of `spec` from `source`.
    ///
    /// # Errors
    /// [`MlxError`] naming the tensor that is missing or malformed, or with MLX's own message.
    pub fn load(
        spec: &ModelSpec,
        source: &dyn TensorSource,
        options: &LoadOptions,
    ) -> Result<Self, MlxError> {
        let on_gpu = matches!(Device::try_default()?.get_type()?, mlx_rs::DeviceType::Gpu);
        let compute =
            options.compute.unwrap_or_else(|| if on_gpu { stored_dtype(source) } else { Dtype::F32 });
        let keep_quantized = match options.quantized {
            Quantized::Auto => on_gpu,
            Quantized::Always => true,
            Quantized::Never => false,
        };
        let llama = Llama::load(spec, &Loader { source, compute, keep_quantized })?;
        let rope = Rope::new(&spec.rope, spec.head_dim, on_gpu)?;
        memory::clear_cache()?;
        Ok(Self {
            llama,
            inv_freq: rope.inv_freq()?,
            rope,
            shape: CacheShape {
                n_layers: spec.n_layers,
                n_kv_heads: spec.n_kv_heads,
                head_dim: spec.head_dim,
                dtype: options.cache.unwrap_or(compute),
            },
            vocab_size: spec.vocab_size,
            on_gpu,
            plain_projection: (!on_gpu && !keep_quantized && compute == Dtype::F32)
                .then_some((spec.hidden, spec.n_kv_heads * spec.head_dim)),
        })
    }

    /// The cache this model keeps, for publication.
    #[must_use]
    pub fn layout(&self, block_tokens: u32) -> CacheLayout {
        let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let CacheShape { n_layers, n_kv_heads, head_dim, dtype } = self.shape;
        let layer = LayerCache::Full { n_kv_heads: narrow(n_kv_heads), head_dim: narrow(head_dim), dtype };
        CacheLayout::uniform(n_layers, layer, block_tokens)
    }

    /// Where MLX runs: `cpu` or `gpu`.
    #[must_use]
    pub fn device(&self) -> &'static str {
        if self.on_gpu { "gpu" } else { "cpu" }
    }

    /// Rotary frequencies in radians per position, `head_dim / 2` of them, exactly as this device computes them
    /// (scaling applied). Another engine gets the same keys from `f32(position) · inv_freq` rounded to f32.
    #[must_use]
    pub fn rope_inv_freq(&self) -> Vec<f32> {
        self.inv_freq.clone()
    }

    /// How this device computes cosines and sines of rotary angles, measured.
    ///
    /// # Errors
    /// MLX's own failures.
    pub fn sin_cos(&self) -> Result<SinCos, MlxError> {
        self.rope.sin_cos(&self.inv_freq)
    }

    /// The order in which this device sums a K/V projection's terms, measured: see
    /// [`shared::control::KvRecipe::summation_runs`]. Empty where it is not a plain f32 product of known order.
    ///
    /// # Errors
    /// MLX's own failures.
    pub fn summation_runs(&self) -> Result<Vec<u32>, MlxError> {
        self.plain_projection.map_or(Ok(Vec::new()), |(inner, columns)| summation::runs(inner, columns))
    }

    /// An empty cache with room for `capacity_tokens`. Memory is taken on the first write.
    #[must_use]
    pub fn new_sequence(&self, capacity_tokens: usize) -> Sequence {
        Sequence::new(self.shape.n_layers, capacity_tokens)
    }

    /// A cache that holds the tokens of `blocks`, in order, with room for `capacity_tokens`.
    ///
    /// # Errors
    /// [`MlxError::Block`] when a block's sizes do not follow from the cache layout.
    pub fn import(&self, blocks: &[&BlockBytes], capacity_tokens: usize) -> Result<Sequence, MlxError> {
        self.shape.import(blocks, capacity_tokens)
    }

    /// Tokens `start..end` of a cache, as bytes.
    ///
    /// # Errors
    /// [`MlxError::Range`] when they are not in `seq`.
    pub fn export(&self, seq: &Sequence, start: usize, end: usize) -> Result<BlockBytes, MlxError> {
        self.shape.export(seq, start, end)
    }

    /// Runs `tokens` at positions `seq.len()…`, all of them in one pass, and appends them to `seq`. With
    /// `want_logits`, returns the logits (f32, one per vocabulary entry) that follow the last of them.
    ///
    /// # Errors
    /// [`MlxError::Empty`] and [`MlxError::Token`] leave `seq` as it was; after MLX's own failures it must be dropped.
    pub fn forward(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
        want_logits: bool,
    ) -> Result<Option<Vec<f32>>, MlxError> {
        let h = self.record(seq, tokens, |_| {})?;
        if want_logits {
            let logits = self.llama.last_logits(&h, dim("tokens", tokens.len())?)?;
            return Ok(Some(array_to_f32(&logits)?));
        }
        eval(seq.arrays())?;
        Ok(None)
    }

    /// As [`forward`](Self::forward), showing `see` the logits that follow each of `tokens`, in order.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward).
    pub fn forward_every(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
        see: &mut dyn FnMut(&[f32]),
    ) -> Result<(), MlxError> {
        let h = self.record(seq, tokens, |_| {})?;
        eval(seq.arrays().chain([&h]))?;
        let n = dim("tokens", tokens.len())?;
        // Logits are wide: only some rows of them exist at a time.
        for start in (0..n).step_by(LOGIT_ROWS) {
            let end = n.min(start + LOGIT_ROWS as i32);
            let logits = self.llama.logits(&h.try_index((.., start..end, ..))?)?;
            let logits = logits.as_dtype(mlx_rs::Dtype::Float32)?.contiguous()?;
            logits.try_as_slice::<f32>()?.chunks_exact(self.vocab_size).for_each(&mut *see);
        }
        Ok(())
    }

    /// As [`forward`](Self::forward) with logits, and every layer's attention input (after its norm) as f32
    /// `[tokens, hidden]`: what another engine must arrive at to compute the same cache.
    ///
    /// # Errors
    /// Those of [`forward`](Self::forward).
    pub fn forward_captured(
        &self,
        seq: &mut Sequence,
        tokens: &[u32],
    ) -> Result<(Vec<f32>, Vec<Vec<f32>>), MlxError> {
        let mut inputs = Vec::with_capacity(self.shape.n_layers);
        let h = self.record(seq, tokens, |x| inputs.push(x.clone()))?;
        let logits = self.llama.last_logits(&h, dim("tokens", tokens.len())?)?;
        eval(inputs.iter().chain([&logits]))?;
        let inputs = inputs.iter().map(array_to_f32).collect::<Result<_, _>>()?;
        Ok((array_to_f32(&logits)?, inputs))
    }

    /// Returns the buffers MLX keeps for reuse to the system; worth it between requests and between prefill chunks.
    ///
    /// # Errors
    /// MLX's own failures.
    pub fn release_unused_memory(&self) -> Result<(), MlxError> {
        Ok(memory::clear_cache()?)
    }

    fn record(&self, seq: &mut Sequence, tokens: &[u32], see: impl FnMut(&Array)) -> Result<Array, MlxError> {
        self.check(tokens)?;
        let write = seq.reserve(tokens.len(), self.shape.dtype)?;
        let ids = Array::from_slice(tokens, &[1, dim("tokens", tokens.len())?]);
        let h = self.llama.hidden(&self.rope, &ids, seq, write, see)?;
        seq.len += tokens.len();
        Ok(h)
    }

    fn check(&self, tokens: &[u32]) -> Result<(), MlxError> {
        if tokens.is_empty() {
            return Err(MlxError::Empty("the list of tokens"));
        }
        match tokens.iter().find(|&&token| token as usize >= self.vocab_size) {
            Some(&token) => Err(MlxError::Token { token, vocab_size: self.vocab_size }),
            None => Ok(()),
        }
    }
}

/// The precision a model was published in: that of its embedding, or of the embedding's scales.
fn stored_dtype(source: &dyn TensorSource) -> Dtype {
    match source.info("model.embed_tokens.weight").map(|info| info.format) {
        Some(TensorFormat::F32) => Dtype::F32,
        Some(TensorFormat::BF16) => Dtype::Bf16,
        _ => Dtype::F16,
    }
}
