//! The cache of one running request.
//!
//! Every layer holds one array of keys and one of values, `[1, n_kv_heads, capacity, head_dim]`. New rows are written
//! in place: the old array's handle is given up when the update is recorded, so MLX may reuse its buffer. Capacity
//! grows in steps, as in mlx-lm.

use mlx_rs::ops::indexing::{TryIndexMutOp, TryIndexOp};
use mlx_rs::{Array, ops};

use super::MlxError;
use super::host::{dim, mlx_dtype};
use shared::layout::Dtype;

/// Capacity is a multiple of this.
const STEP_TOKENS: usize = 256;

/// A running request's cache. A clone shares its arrays until one of both is written to.
#[derive(Debug, Clone)]
pub struct Sequence {
    pub(super) layers: Vec<LayerKv>,
    pub(super) len: usize,
    pub(super) capacity: usize,
}

/// Keys and values of one layer; empty until the first write.
#[derive(Debug, Default, Clone)]
pub(super) struct LayerKv {
    pub(super) k: Option<Array>,
    pub(super) v: Option<Array>,
}

/// Where a forward pass writes: the same for every layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Write {
    /// Tokens before this pass.
    pub(super) start: i32,
    /// Tokens after this pass.
    pub(super) end: i32,
    /// Rows the arrays must have, at least `end`.
    pub(super) capacity: i32,
    /// Element type of the arrays.
    pub(super) dtype: Dtype,
}

impl Sequence {
    pub(super) fn new(n_layers: usize, capacity_tokens: usize) -> Self {
        let layers = (0..n_layers).map(|_| LayerKv::default()).collect();
        Self { layers, len: 0, capacity: Self::round_up(capacity_tokens.max(1)) }
    }

    /// Tokens in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True before the first token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that fit before the arrays grow.
    #[must_use]
    pub fn capacity_tokens(&self) -> usize {
        self.capacity
    }

    /// Forgets every token after the first `tokens`.
    pub fn truncate(&mut self, tokens: usize) {
        self.len = self.len.min(tokens);
    }

    /// Capacity of a cache that has room for so many tokens.
    #[must_use]
    pub fn round_up(tokens: usize) -> usize {
        tokens.div_ceil(STEP_TOKENS) * STEP_TOKENS
    }

    /// Makes room for `tokens` more and says where they go.
    pub(super) fn reserve(&mut self, tokens: usize, dtype: Dtype) -> Result<Write, MlxError> {
        let end = self.len + tokens;
        if end > self.capacity {
            self.capacity = Self::round_up(end);
        }
        Ok(Write {
            start: dim("sequence length", self.len)?,
            end: dim("sequence length", end)?,
            capacity: dim("sequence capacity", self.capacity)?,
            dtype,
        })
    }

    /// All arrays that exist.
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().flat_map(|layer| layer.k.iter().chain(&layer.v))
    }
}

impl LayerKv {
    /// Appends `k` and `v` (`[1, n_kv_heads, tokens, head_dim]`) and returns all rows so far.
    pub(super) fn append(&mut self, k: &Array, v: &Array, write: Write) -> Result<(Array, Array), MlxError> {
        Ok((append(&mut self.k, k, write)?, append(&mut self.v, v, write)?))
    }
}

fn append(slot: &mut Option<Array>, new: &Array, write: Write) -> Result<Array, MlxError> {
    let new = new.as_dtype(mlx_dtype(write.dtype))?;
    let mut array = match slot.take() {
        None => zeros(new.shape(), write.capacity, write.dtype)?,
        Some(old) if old.dim(2) < write.capacity => {
            let more = zeros(new.shape(), write.capacity - write.start, write.dtype)?;
            ops::concatenate(&[old.try_index((.., .., 0..write.start, ..))?, more], 2)?
        }
        Some(old) => old,
    };
    array.try_index_mut((.., .., write.start..write.end, ..), &new)?;
    let rows =
        if write.end < write.capacity { array.try_index((.., .., 0..write.end, ..))? } else { array.clone() };
    *slot = Some(array);
    Ok(rows)
}

/// Zeros with the shape of `like`, except for `tokens` rows.
fn zeros(like: &[i32], tokens: i32, dtype: Dtype) -> Result<Array, MlxError> {
    let mut shape = like.to_vec();
    if let Some(rows) = shape.get_mut(2) {
        *rows = tokens;
    }
    Ok(ops::zeros_dtype(&shape, mlx_dtype(dtype))?)
}
