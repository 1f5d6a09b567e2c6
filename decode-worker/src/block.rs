//! A block of cache in host memory, and the buffer it is assembled in.

use bytes::Bytes;
use shared::layout::{CacheLayout, LayerCache, Part};
use std::ops::Range;

pub use crate::mlx::{BlockBytes, LayerBytes};

/// Payload bytes of a block.
#[must_use]
pub fn block_bytes(block: &BlockBytes) -> u64 {
    block.layers.iter().flat_map(|layer| &layer.parts).map(|part| part.len() as u64).sum()
}

/// Where each array lies in a buffer, in bytes per token: an array of `n` tokens starts at `n ·` its offset.
#[derive(Debug, Clone)]
pub struct ArrayOffsets {
    arrays: Vec<Place>,
    first_of_layer: Vec<usize>,
    bytes_per_token: usize,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    start_per_token: usize,
    bytes_per_token: usize,
    heads: usize,
}

impl ArrayOffsets {
    /// Offsets of every array of `layout`, in canonical order.
    #[must_use]
    pub fn new(layout: &CacheLayout) -> Self {
        let (mut arrays, mut first_of_layer, mut at) = (Vec::new(), Vec::new(), 0);
        for layer in &layout.layers {
            first_of_layer.push(arrays.len());
            for &part in layer.parts() {
                let bytes_per_token = layer.bytes_per_token(part) as usize;
                arrays.push(Place { start_per_token: at, bytes_per_token, heads: heads(layer) });
                at += bytes_per_token;
            }
        }
        Self { arrays, first_of_layer, bytes_per_token: at }
    }

    /// Position of an array in canonical order. The array must be in the layout.
    #[must_use]
    pub fn index(&self, layer: u16, part: Part) -> usize {
        // Parts are numbered in canonical order within a layer of full attention.
        self.first_of_layer.get(usize::from(layer)).map_or(0, |first| first + part as usize)
    }

    /// Number of arrays.
    #[must_use]
    pub fn n_arrays(&self) -> usize {
        self.arrays.len()
    }

    fn region(&self, array: usize, tokens: usize) -> Range<usize> {
        let place = self.arrays[array];
        let start = place.start_per_token * tokens;
        start..start + place.bytes_per_token * tokens
    }
}

/// One block being filled: all arrays in one allocation.
#[derive(Debug)]
pub struct BlockBuffer {
    tokens: usize,
    data: Vec<u8>,
}

impl BlockBuffer {
    /// Room for `tokens` tokens of every array. The system hands out the pages as they are written.
    #[must_use]
    pub fn new(offsets: &ArrayOffsets, tokens: usize) -> Self {
        Self { tokens, data: vec![0; offsets.bytes_per_token * tokens] }
    }

    /// Tokens that the block has room for.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// One whole array, `[n_kv_heads, tokens, head_dim]`.
    pub fn array_mut(&mut self, offsets: &ArrayOffsets, array: usize) -> &mut [u8] {
        &mut self.data[offsets.region(array, self.tokens)]
    }

    /// Copies `rows` (`[n_kv_heads, count, head_dim]`) to the tokens from `first` on.
    pub fn scatter(&mut self, offsets: &ArrayOffsets, array: usize, first: usize, rows: &[u8]) {
        let heads = offsets.arrays[array].heads;
        let tokens = self.tokens;
        let row = offsets.arrays[array].bytes_per_token / heads;
        let (from, to) = (rows.len() / heads, row * tokens);
        let out = self.array_mut(offsets, array);
        for head in 0..heads {
            let at = head * to + first * row;
            out[at..at + from].copy_from_slice(&rows[head * from..(head + 1) * from]);
        }
    }

    /// The finished block, without a copy.
    #[must_use]
    pub fn finish(self, offsets: &ArrayOffsets) -> BlockBytes {
        let tokens = self.tokens;
        let data = Bytes::from(self.data);
        let mut ends = offsets.first_of_layer.iter().skip(1).copied().chain([offsets.arrays.len()]);
        let layers = offsets
            .first_of_layer
            .iter()
            .map(|&first| {
                let end = ends.next().unwrap_or(first);
                LayerBytes { parts: (first..end).map(|a| data.slice(offsets.region(a, tokens))).collect() }
            })
            .collect();
        BlockBytes { tokens, layers }
    }

    /// The first `tokens` tokens as a block of their own (a copy, unless it is all of them).
    #[must_use]
    pub fn finish_prefix(mut self, offsets: &ArrayOffsets, tokens: usize) -> BlockBytes {
        if tokens >= self.tokens {
            return self.finish(offsets);
        }
        let mut short = Self::new(offsets, tokens);
        for array in 0..offsets.n_arrays() {
            let Place { bytes_per_token, heads, .. } = offsets.arrays[array];
            let (row, all) = (bytes_per_token / heads, self.tokens);
            let from = self.array_mut(offsets, array);
            let rows: Vec<u8> = (0..heads)
                .flat_map(|head| from[head * row * all..][..row * tokens].iter().copied())
                .collect();
            short.array_mut(offsets, array).copy_from_slice(&rows);
        }
        short.finish(offsets)
    }
}

fn heads(layer: &LayerCache) -> usize {
    match *layer {
        LayerCache::Full { n_kv_heads, .. } => n_kv_heads as usize,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::layout::Dtype;

    fn layout() -> CacheLayout {
        CacheLayout::uniform(2, LayerCache::Full { n_kv_heads: 2, head_dim: 2, dtype: Dtype::F16 }, 4)
    }

    /// Array `a` filled so that every byte tells array, head and token.
    fn filled(offsets: &ArrayOffsets, tokens: usize) -> BlockBuffer {
        let mut buffer = BlockBuffer::new(offsets, tokens);
        for array in 0..offsets.n_arrays() {
            let rows = rows(array, 0..tokens);
            buffer.array_mut(offsets, array).copy_from_slice(&rows);
        }
        buffer
    }

    fn rows(array: usize, tokens: Range<usize>) -> Vec<u8> {
        let mut out = Vec::new();
        for head in 0..2 {
            for token in tokens.clone() {
                out.extend([(array * 64 + head * 16 + token) as u8; 4]);
            }
        }
        out
    }

    #[test]
    fn arrays_are_slices_of_one_allocation_in_canonical_order() {
        let offsets = ArrayOffsets::new(&layout());
        let block = filled(&offsets, 4).finish(&offsets);
        assert_eq!(block_bytes(&block), layout().bytes_per_block());
        assert_eq!(block.layers[1].parts[0], rows(offsets.index(1, Part::K), 0..4));
        assert_eq!(block.layers[1].parts[1], rows(offsets.index(1, Part::V), 0..4));
    }

    #[test]
    fn scattered_pieces_make_the_same_block() {
        let offsets = ArrayOffsets::new(&layout());
        let mut pieces = BlockBuffer::new(&offsets, 4);
        for array in 0..4 {
            for (first, end) in [(3, 4), (0, 1), (1, 3)] {
                pieces.scatter(&offsets, array, first, &rows(array, first..end));
            }
        }
        assert_eq!(pieces.finish(&offsets), filled(&offsets, 4).finish(&offsets));
    }

    #[test]
    fn a_prefix_keeps_the_first_tokens_of_every_head() {
        let offsets = ArrayOffsets::new(&layout());
        let short = filled(&offsets, 4).finish_prefix(&offsets, 3);
        assert_eq!(short.tokens, 3);
        for array in 0..4 {
            assert_eq!(short.layers[array / 2].parts[array % 2], rows(array, 0..3));
        }
    }
}
