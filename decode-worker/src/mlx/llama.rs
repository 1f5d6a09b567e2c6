//! The Llama forward pass, operation for operation as in mlx-lm's `models/llama.py`, so that greedy output over the
//! same weights is the same tokens.

use mlx_rs::fast::{self, ScaledDotProductAttentionMask};
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, ops};
use shared::spec::ModelSpec;

use super::MlxError;
use super::batch::Rows;
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
pub(super) struct Layer {
    input_norm: Array,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) o: Linear,
    post_norm: Array,
    gate: Linear,
    up: Linear,
    down: Linear,
    pub(super) shape: AttentionShape,
    eps: f32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionShape {
    pub(super) n_heads: i32,
    pub(super) n_kv_heads: i32,
    pub(super) head_dim: i32,
    pub(super) scale: f32,
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

    /// As [`hidden`](Self::hidden), of rows that belong to different sequences (`tokens` u32 `[1, rows]`).
    pub(super) fn hidden_rows(
        &self,
        rope: &Rope,
        tokens: &Array,
        rows: &mut Rows<'_, '_>,
    ) -> Result<Array, MlxError> {
        let mut h = self.embedding.rows(tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let x = fast::rms_norm(&h, Some(&layer.input_norm), layer.eps)?;
            h = h.add(layer.attention_rows(rope, &x, index, rows)?)?;
            h = h.add(layer.feed_forward(&h)?)?;
        }
        Ok(h)
    }

    /// Logits `[1, 1, vocab]` of the last of `n` tokens in the residual stream `h [1, n, hidden]`.
    pub(super) fn last_logits(&self, h: &Array, n: i32) -> Result<Array, MlxError> {
        if n == 1 { self.logits(h) } else { self.logits(&h.try_index((.., n - 1..n, ..))?) }
    }

    /// Logits `[1, n, vocab]` of the residual stream `h [1, n, hidden]`.
    pub(super) fn logits(&self, h: &Array) -> Result<Array, MlxError> {
        let x = fast::rms_norm(h, Some(&self.norm), self.eps)?;
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
        let AttentionShape { n_heads, n_kv_heads, head_dim, .. } = self.shape;
        let n = write.end - write.start;
        let heads = |y: Array, count: i32| y.reshape(&[1, n, count, head_dim])?.transpose_axes(&[0, 2, 1, 3]);
        let q = rope.apply(&heads(self.q.forward(x)?, n_heads)?, write.start)?;
        let k = rope.apply(&heads(self.k.forward(x)?, n_kv_heads)?, write.start)?;
        let v = heads(self.v.forward(x)?, n_kv_heads)?;
        let out = self.attend(&q, &k, &v, cache, write)?;
        self.o.forward(&out.transpose_axes(&[0, 2, 1, 3])?.reshape(&[1, n, n_heads * head_dim])?)
    }

    /// Appends keys and values to one sequence's cache and attends to all of it. All of `[1, heads, n, head_dim]`.
    pub(super) fn attend(
        &self,
        q: &Array,
        k: &Array,
        v: &Array,
        cache: &mut LayerKv,
        write: Write,
    ) -> Result<Array, MlxError> {
        let (k, v) = cache.append(k, v, write)?;
        let mask = (write.end - write.start > 1).then_some(ScaledDotProductAttentionMask::Causal);
        Ok(fast::scaled_dot_product_attention(q, &k, &v, self.shape.scale, mask, None)?)
    }

    fn feed_forward(&self, h: &Array) -> Result<Array, MlxError> {
        let x = fast::rms_norm(h, Some(&self.post_norm), self.eps)?;
        let gate = self.gate.forward(&x)?;
        let silu = gate.multiply(ops::sigmoid(&gate)?)?;
        self.down.forward(&silu.multiply(self.up.forward(&x)?)?)
    }
}
