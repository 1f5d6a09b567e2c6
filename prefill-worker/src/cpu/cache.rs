//! Keys and values of a running sequence in host memory.

use std::ops::Range;

use rayon::prelude::*;

use super::memory::floats;
use crate::ops::{CacheShape, OpsError};

/// Every layer's keys (rotated) and values, f32.
pub struct CpuCache {
    shape: CacheShape,
    layers: Vec<[HeadRows; 2]>,
}

/// One array of one layer, `[n_kv_heads, capacity_tokens, head_dim]`.
pub(super) struct HeadRows {
    data: Vec<f32>,
    head_elements: usize,
}

/// Some tokens of every layer, `[layer, part, head, token, element]`.
pub struct CpuSaved {
    data: Vec<f32>,
    tokens: usize,
}

impl CpuCache {
    pub(super) fn new(shape: CacheShape) -> Result<Self, OpsError> {
        let head_elements = shape.capacity_tokens * shape.head_dim;
        let array = || -> Result<HeadRows, OpsError> {
            let data = floats("K/V cache", shape.n_kv_heads * head_elements)?;
            Ok(HeadRows { data, head_elements })
        };
        let layers =
            (0..shape.n_layers).map(|_| Ok([array()?, array()?])).collect::<Result<_, OpsError>>()?;
        Ok(Self { shape, layers })
    }

    pub(super) fn shape(&self) -> CacheShape {
        self.shape
    }

    pub(super) fn layer(&self, layer: usize) -> (&HeadRows, &HeadRows) {
        let [keys, values] = &self.layers[layer];
        (keys, values)
    }

    pub(super) fn layer_mut(&mut self, layer: usize) -> (&mut HeadRows, &mut HeadRows) {
        let [keys, values] = &mut self.layers[layer];
        (keys, values)
    }

    /// Refuses ranges outside of the cache.
    pub(super) fn check(&self, layer: usize, tokens: &Range<usize>) -> Result<(), OpsError> {
        if layer < self.shape.n_layers
            && tokens.start <= tokens.end
            && tokens.end <= self.shape.capacity_tokens
        {
            return Ok(());
        }
        Err(OpsError::Shape(format!(
            "layer {layer}, tokens {tokens:?} are outside of a cache of {:?}",
            self.shape
        )))
    }

    /// Copies tokens of every layer out.
    pub(super) fn save(&self, tokens: Range<usize>) -> Result<CpuSaved, OpsError> {
        self.check(0, &tokens)?;
        let d = self.shape.head_dim;
        let run = tokens.len() * d;
        let mut data = floats("saved block", self.layers.len() * 2 * self.shape.n_kv_heads * run)?;
        let sources = self.layers.iter().flatten().flat_map(HeadRows::heads);
        for (target, head) in data.chunks_exact_mut(run.max(1)).zip(sources) {
            target.copy_from_slice(&head[tokens.start * d..tokens.end * d]);
        }
        Ok(CpuSaved { data, tokens: tokens.len() })
    }

    /// Copies saved tokens of every layer in, at position `at`.
    pub(super) fn restore(&mut self, saved: &CpuSaved, at: usize) -> Result<(), OpsError> {
        self.check(0, &(at..at + saved.tokens))?;
        let d = self.shape.head_dim;
        let run = saved.tokens * d;
        if saved.data.len() != self.layers.len() * 2 * self.shape.n_kv_heads * run {
            return Err(OpsError::Shape("saved block is of another model".into()));
        }
        let targets = self.layers.iter_mut().flatten().flat_map(HeadRows::heads_mut);
        for (source, head) in saved.data.chunks_exact(run.max(1)).zip(targets) {
            head[at * d..at * d + run].copy_from_slice(source);
        }
        Ok(())
    }
}

impl HeadRows {
    /// One head's rows, `[capacity_tokens, head_dim]`.
    pub(super) fn head(&self, head: usize) -> &[f32] {
        &self.data[head * self.head_elements..][..self.head_elements]
    }

    pub(super) fn heads(&self) -> impl Iterator<Item = &[f32]> {
        self.data.chunks_exact(self.head_elements.max(1))
    }

    fn heads_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.data.chunks_exact_mut(self.head_elements.max(1))
    }

    /// Runs `write(head, rows)` for every head, in parallel.
    pub(super) fn for_each_head(&mut self, write: impl Fn(usize, &mut [f32]) + Sync) {
        self.data
            .par_chunks_exact_mut(self.head_elements.max(1))
            .enumerate()
            .for_each(|(head, rows)| write(head, rows));
    }
}

impl CpuSaved {
    pub(super) fn bytes(&self) -> usize {
        self.data.len() * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_tokens_come_back_at_another_position() {
        let shape = CacheShape { n_layers: 2, n_kv_heads: 3, head_dim: 4, capacity_tokens: 10 };
        let mut cache = CpuCache::new(shape).unwrap();
        for layer in 0..2 {
            let (keys, values) = cache.layer_mut(layer);
            keys.for_each_head(|h, rows| {
                rows.iter_mut().enumerate().for_each(|(i, x)| *x = (layer * 1000 + h * 100 + i) as f32)
            });
            values.for_each_head(|h, rows| {
                rows.iter_mut().enumerate().for_each(|(i, x)| *x = -((layer * 1000 + h * 100 + i) as f32))
            });
        }
        let saved = cache.save(2..5).unwrap();
        assert_eq!(saved.bytes(), 2 * 2 * 3 * 3 * 4 * 4);
        let mut other = CpuCache::new(CacheShape { capacity_tokens: 20, ..shape }).unwrap();
        other.restore(&saved, 11).unwrap();
        for layer in 0..2 {
            for head in 0..3 {
                assert_eq!(other.layer(layer).0.head(head)[44..56], cache.layer(layer).0.head(head)[8..20]);
                assert_eq!(other.layer(layer).1.head(head)[44..56], cache.layer(layer).1.head(head)[8..20]);
            }
        }
        assert!(cache.restore(&saved, 8).is_err());
    }
}
