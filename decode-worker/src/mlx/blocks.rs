//! Cache blocks as bytes: into a sequence, and out of it.

use bytes::Bytes;
use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, ops};
use shared::layout::Dtype;

use super::MlxError;
use super::host::{array_from_bytes, array_to_bytes, dim, mlx_dtype};
use super::sequence::{LayerKv, Sequence};

/// The cache of a run of tokens, as the cache layout describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockBytes {
    /// Tokens in this block, at least one.
    pub tokens: usize,
    /// One entry per layer.
    pub layers: Vec<LayerBytes>,
}

/// One layer's share of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerBytes {
    /// In the order of `shared::layout::LayerCache::parts`: keys, values; each `[n_kv_heads, tokens, head_dim]`, row-major.
    pub parts: Vec<Bytes>,
}

/// What every layer of this model's cache looks like.
#[derive(Debug, Clone, Copy)]
pub(super) struct CacheShape {
    pub(super) n_layers: usize,
    pub(super) n_kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) dtype: Dtype,
}

/// Keys and values.
const PARTS: usize = 2;

impl CacheShape {
    /// Fills a new sequence, one layer at a time, so that no more than one layer exists twice.
    pub(super) fn import(
        &self,
        blocks: &[&BlockBytes],
        capacity_tokens: usize,
    ) -> Result<Sequence, MlxError> {
        self.check(blocks)?;
        let len: usize = blocks.iter().map(|block| block.tokens).sum();
        let mut seq = Sequence::new(self.n_layers, capacity_tokens);
        let write = seq.reserve(len, self.dtype)?;
        for (index, slot) in seq.layers.iter_mut().enumerate() {
            let spare = write.capacity - write.end;
            let (k, v) = (self.gather(blocks, index, 0, spare)?, self.gather(blocks, index, 1, spare)?);
            eval([&k, &v])?;
            *slot = LayerKv { k: Some(k), v: Some(v) };
        }
        seq.len = len;
        Ok(seq)
    }

    /// Copies tokens `start..end` out.
    pub(super) fn export(&self, seq: &Sequence, start: usize, end: usize) -> Result<BlockBytes, MlxError> {
        let outside = || MlxError::Range { start, end, len: seq.len };
        if start >= end || end > seq.len {
            return Err(outside());
        }
        let rows = dim("token", start)?..dim("token", end)?;
        let copy = |array: &Option<Array>| -> Result<Bytes, MlxError> {
            let array = array.as_ref().ok_or_else(outside)?;
            array_to_bytes(&array.try_index((.., .., rows.clone(), ..))?, self.dtype)
        };
        let layers = seq
            .layers
            .iter()
            .map(|kv| Ok(LayerBytes { parts: vec![copy(&kv.k)?, copy(&kv.v)?] }))
            .collect::<Result<_, MlxError>>()?;
        Ok(BlockBytes { tokens: end - start, layers })
    }

    /// One array of one layer: the blocks' rows in order, then `spare` rows of zeros.
    fn gather(
        &self,
        blocks: &[&BlockBytes],
        layer: usize,
        part: usize,
        spare: i32,
    ) -> Result<Array, MlxError> {
        let (heads, width) = (dim("n_kv_heads", self.n_kv_heads)?, dim("head_dim", self.head_dim)?);
        let mut pieces = Vec::with_capacity(blocks.len() + 1);
        for block in blocks {
            let shape = [1, heads, dim("tokens of a block", block.tokens)?, width];
            let bytes = block.layers.get(layer).and_then(|l| l.parts.get(part)).map_or(&[][..], |b| &b[..]);
            pieces.push(array_from_bytes(bytes, &shape, self.dtype)?);
        }
        if spare > 0 {
            pieces.push(ops::zeros_dtype(&[1, heads, spare, width], mlx_dtype(self.dtype))?);
        }
        Ok(ops::concatenate(&pieces, 2)?)
    }

    /// Nothing is built from bytes whose count does not follow from the cache layout.
    fn check(&self, blocks: &[&BlockBytes]) -> Result<(), MlxError> {
        if blocks.is_empty() {
            return Err(MlxError::Empty("the list of blocks"));
        }
        let per_token = self.n_kv_heads * self.head_dim * self.dtype.size_bytes();
        for (block, content) in blocks.iter().enumerate() {
            let equal = |what, found: usize, expected: usize| {
                if found == expected { Ok(()) } else { Err(MlxError::Block { block, what, found, expected }) }
            };
            equal("number of layers", content.layers.len(), self.n_layers)?;
            equal("number of empty token runs", usize::from(content.tokens == 0), 0)?;
            for layer in &content.layers {
                equal("number of parts", layer.parts.len(), PARTS)?;
                for bytes in &layer.parts {
                    equal("size of a part in bytes", bytes.len(), per_token.saturating_mul(content.tokens))?;
                }
            }
        }
        Ok(())
    }
}
