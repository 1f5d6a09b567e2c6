//! One token for each of several sequences in one pass.
//!
//! Everything that multiplies by weights sees all rows at once, so the weights are read once; rotation, cache and
//! attention go by sequence. A row's numbers do not depend on the others where the device's matrix products do not
//! depend on their number of rows (on Linux the BLAS of `deploy/setup` guarantees that).

use mlx_rs::{Array, ops};

use super::host::dim;
use super::llama::{AttentionShape, Layer};
use super::sequence::{Sequence, Write};
use super::{MlxError, MlxModel};

/// Rows of a pass: which caches they go to and where.
pub(super) struct Rows<'a, 'b> {
    pub(super) sequences: &'a mut [&'b mut Sequence],
    pub(super) writes: Vec<Write>,
    /// Positions, i32 `[rows]`.
    pub(super) offsets: Array,
}

impl MlxModel {
    /// Appends one token to each of several sequences and returns the logits that follow each, in order.
    ///
    /// # Errors
    /// [`MlxError::Empty`] and [`MlxError::Token`] leave the sequences as they were; after MLX's own failures they
    /// must be dropped.
    pub fn decode_batch(&self, rows: &mut [(&mut Sequence, u32)]) -> Result<Vec<Vec<f32>>, MlxError> {
        let tokens: Vec<u32> = rows.iter().map(|(_, token)| *token).collect();
        self.check(&tokens)?;
        let mut sequences: Vec<&mut Sequence> =
            rows.iter_mut().map(|(sequence, _)| &mut **sequence).collect();
        let writes = sequences
            .iter_mut()
            .map(|sequence| sequence.reserve(1, self.shape.dtype))
            .collect::<Result<Vec<_>, _>>()?;
        let n = dim("rows", tokens.len())?;
        let starts: Vec<i32> = writes.iter().map(|write| write.start).collect();
        let offsets = Array::from_slice(&starts, &[n]);
        let mut batch = Rows { sequences: &mut sequences, writes, offsets };
        let h = self.llama.hidden_rows(&self.rope, &Array::from_slice(&tokens, &[1, n]), &mut batch)?;
        let logits = self.llama.logits(&h)?.as_dtype(mlx_rs::Dtype::Float32)?.contiguous()?;
        let logits = logits.try_as_slice::<f32>()?;
        for sequence in sequences {
            sequence.len += 1;
        }
        Ok(logits.chunks_exact(self.vocab_size).map(<[f32]>::to_vec).collect())
    }
}

impl Layer {
    /// As `attention`, of rows that belong to different sequences: `x [1, rows, hidden]`.
    pub(super) fn attention_rows(
        &self,
        rope: &super::rope::Rope,
        x: &Array,
        index: usize,
        rows: &mut Rows<'_, '_>,
    ) -> Result<Array, MlxError> {
        let AttentionShape { n_heads, n_kv_heads, head_dim, .. } = self.shape;
        let n = dim("rows", rows.writes.len())?;
        let heads = |y: Array, count: i32| y.reshape(&[n, count, 1, head_dim]);
        let q = rope.apply_rows(&heads(self.q.forward(x)?, n_heads)?, &rows.offsets)?;
        let k = rope.apply_rows(&heads(self.k.forward(x)?, n_kv_heads)?, &rows.offsets)?;
        let v = heads(self.v.forward(x)?, n_kv_heads)?;
        let (q, k, v) =
            (ops::split_equal(&q, n, 0)?, ops::split_equal(&k, n, 0)?, ops::split_equal(&v, n, 0)?);
        let mut outs = Vec::with_capacity(rows.writes.len());
        let parts = q.iter().zip(&k).zip(&v);
        for ((sequence, write), ((q, k), v)) in rows.sequences.iter_mut().zip(&rows.writes).zip(parts) {
            if let Some(cache) = sequence.layers.get_mut(index) {
                outs.push(self.attend(q, k, v, cache, *write)?);
            }
        }
        let out = if n == 1 { outs.swap_remove(0) } else { ops::concatenate(&outs, 0)? };
        self.o.forward(&out.reshape(&[1, n, n_heads * head_dim])?)
    }
}
