//! The Llama forward pass, operation for operation as in mlx-lm's `models/llama.py`, so that greedy output over the
//! same weights is the same tokens.

use mlx_rs::fast::{self, ScaledDotProductAttentionMask};
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, ops};
use shared::spec::ModelSpec;

use super::MlxError;
use super::host::dim;
use super::rope::Rope;
use super::sequence::{LayerKv, Sequence, Write};
use super::weights::{Embedding, Linear, Loader};

/// Weights of one model.
#[derive(Debug)]
pub(super) struct Llama {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Array,
    /// `None`: the embedding table is the output head.
    head: Option<Linear>,
    eps: f32,
}

#[derive(Debug)]
struct Layer {
    input_norm: Array,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    post_norm: Array,
    gate: Linear,
    up: Linear,
    down: Linear,
    shape: AttentionShape,
    eps: f32,
}

#[derive(Debug, Clone, Copy)]
struct AttentionShape {
    n_heads: i32,
    n_kv_heads: i32,
    head_dim: i32,
    scale: f32,
}

impl Llama {
    pub(super) fn load(spec: &ModelSpec, loader: &Loader<'_>) -> Result<Self, MlxError> {
        let shape = AttentionShape {
            n_heads: dim("n_heads", spec.n_heads)?,
            n_kv_heads: dim("n_kv_heads", spec.n_kv_heads)?,
            head_dim: dim("head_dim", spec.head_dim)?,
            scale: (spec.head_dim as f64).powf(-0.5) as f32,
        };
        let layers =
            (0..spec.n_layers).map(|i| Layer::load(spec, loader, i, shape)).collect::<Result<_, _>>()?;
        Ok(Self {
            embedding: loader.embedding("model.embed_tokens", spec.vocab_size)?,
            layers,
            norm: loader.vector("model.norm.weight")?,
            head: if spec.tie_word_embeddings { None } else { Some(loader.linear("lm_head", false)?) },
            eps: spec.rms_norm_eps,
        })
    }

    /// Records the pass over `tokens` (u32 `[1, n]`), writing the cache as it goes; nothing is computed until it is
    /// evaluated. Returns the residual stream after the last layer, `[1, n, hidden]`.
    ///
    /// `see` is shown every layer's attention input (after its norm, `[1, n, hidden]`).
    pub(super) fn hidden(
        &self,
        rope: &Rope,
        tokens: &Array,
        seq: &mut Sequence,
        write: Write,
        mut see: impl FnMut(&Array),
    ) -> Result<Array, MlxError> {
        let mut h = self.embedding.rows(tokens)?;
        for (layer, cache) in self.layers.iter().zip(&mut seq.layers) {
            let x = fast::rms_norm(&h, Some(&layer.input_norm), layer.eps)?;
            see(&x);
            h = h.add(layer.attention(rope, &x, cache, write)?)?;
            h = h.add(layer.feed_forward(&h)?)?;
        }
        Ok(h)
    }

    /// Logits `[1, 1, vocab]` of the last of `n` tokens in the residual stream `h [1, n, hidden]`.
    pub(super) fn last_logits(&self, h: &Array, n: i32) -> Result<Array, MlxError> {
        let last = if n == 1 { h.clone() } else { h.try_index((.., n - 1..n, ..))? };
        let x = fast::rms_norm(&last, Some(&self.norm), self.eps)?;
        match &self.head {
            Some(head) => head.forward(&x),
            None => self.embedding.project(&x),
        }
    }
}

impl Layer {
    fn load(
        spec: &ModelSpec,
        loader: &Loader<'_>,
        index: usize,
        shape: AttentionShape,
    ) -> Result<Self, MlxError> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let attention = |part: &str| loader.linear(&name(&format!("self_attn.{part}")), spec.attention_bias);
        let mlp = |part: &str| loader.linear(&name(&format!("mlp.{part}")), spec.mlp_bias);
        Ok(Self {
            input_norm: loader.vector(&name("input_layernorm.weight"))?,
            q: attention("q_proj")?,
            k: attention("k_proj")?,
            v: attention("v_proj")?,
            o: attention("o_proj")?,
            post_norm: loader.vector(&name("post_attention_layernorm.weight"))?,
            gate: mlp("gate_proj")?,
            up: mlp("up_proj")?,
            down: mlp("down_proj")?,
            shape,
            eps: spec.rms_norm_eps,
        })
    }

    fn attention(
        &self,
        rope: &Rope,
        x: &Array,
        cache: &mut LayerKv,
        write: Write,
    ) -> Result<Array, MlxError> {
        let AttentionShape { n_heads, n_kv_heads, head_dim, scale } = self.shape;
        let n = write.end - write.start;
        let heads = |y: Array, count: i32| y.reshape(&[1, n, count, head_dim])?.transpose_axes(&[0, 2, 1, 3]);
        let q = rope.apply(&heads(self.q.forward(x)?, n_heads)?, write.start)?;
        let k = rope.apply(&heads(self.k.forward(x)?, n_kv_heads)?, write.start)?;
        let v = heads(self.v.forward(x)?, n_kv_heads)?;
        let (k, v) = cache.append(&k, &v, write)?;
        let mask = (n > 1).then_some(ScaledDotProductAttentionMask::Causal);
        let out = fast::scaled_dot_product_attention(&q, &k, &v, scale, mask, None)?;
        self.o.forward(&out.transpose_axes(&[0, 2, 1, 3])?.reshape(&[1, n, n_heads * head_dim])?)
    }

    fn feed_forward(&self, h: &Array) -> Result<Array, MlxError> {
        let x = fast::rms_norm(h, Some(&self.post_norm), self.eps)?;
        let gate = self.gate.forward(&x)?;
        let silu = gate.multiply(ops::sigmoid(&gate)?)?;
        self.down.forward(&silu.multiply(self.up.forward(&x)?)?)
    }
}
