//! What the backend hands out: activations, frequencies, caches and saved blocks.

use std::ops::Range;

use half::{bf16, f16};

use super::elementwise::{Format, Planes};
use super::memory::DeviceMemory;
use crate::ops::{CacheShape, Chunk, OpsError};

/// An activation buffer, `[rows, columns]`. Elements, except for the residual stream, which is f32.
pub struct Buffer {
    pub(super) memory: DeviceMemory,
    pub(super) format: Format,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// Rotary frequencies.
pub struct Rope {
    pub(super) id: u64,
    pub(super) inv_freq: DeviceMemory,
    pub(super) half_dim: usize,
}

/// Keys and values of a sequence: `[layer][keys | values][n_kv_heads][capacity][head_dim]` elements.
pub struct Cache {
    pub(super) memory: DeviceMemory,
    pub(super) shape: CacheShape,
}

/// Tokens of every layer, `[layer][keys | values][n_kv_heads][tokens][head_dim]` elements, on the device.
pub struct Saved {
    pub(super) memory: DeviceMemory,
    pub(super) tokens: usize,
}

/// Cosines and sines of the running chunk.
pub(super) struct RopeTable {
    pub(super) memory: DeviceMemory,
    pub(super) holds: Option<(u64, Chunk)>,
}

impl Buffer {
    pub(super) fn check(&self, chunk: Chunk, columns: usize, format: Format) -> Result<u64, OpsError> {
        if chunk.tokens > self.rows || columns != self.columns || format != self.format {
            return Err(OpsError::Shape(format!(
                "{} rows of {columns} {format:?} asked of a buffer of {} rows of {} {:?}",
                chunk.tokens, self.rows, self.columns, self.format
            )));
        }
        Ok(self.memory.address())
    }
}

impl Cache {
    /// Planes of a layer's keys followed by its values.
    pub(super) fn layer(&self, layer: usize, tokens: &Range<usize>) -> Result<Planes, OpsError> {
        if layer >= self.shape.n_layers
            || tokens.start > tokens.end
            || tokens.end > self.shape.capacity_tokens
        {
            return Err(OpsError::Shape(format!(
                "layer {layer}, tokens {tokens:?} of a cache of {:?}",
                self.shape
            )));
        }
        let heads = 2 * self.shape.n_kv_heads;
        let plane = self.shape.capacity_tokens * self.shape.head_dim * 2;
        Ok(Planes { address: self.memory.address() + (layer * heads * plane) as u64, heads, ..self.planes() })
    }

    /// Every plane of every layer.
    pub(super) fn planes(&self) -> Planes {
        Planes {
            address: self.memory.address(),
            heads: self.shape.n_layers * 2 * self.shape.n_kv_heads,
            capacity_tokens: self.shape.capacity_tokens,
            head_dim: self.shape.head_dim,
        }
    }

    /// Addresses of a layer's keys and of its values.
    pub(super) fn parts(&self, layer: usize, tokens: &Range<usize>) -> Result<(u64, u64), OpsError> {
        let planes = self.layer(layer, tokens)?;
        let half = self.shape.n_kv_heads * planes.capacity_tokens * planes.head_dim * 2;
        Ok((planes.address, planes.address + half as u64))
    }
}

/// Values of a buffer's bytes.
pub(super) fn widen(bytes: &[u8], format: Format) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match format {
        Format::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Format::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Format::Bf16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
    }
}
