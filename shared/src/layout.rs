//! The decoder's cache layout: what a finished cache looks like, byte for byte.
//!
//! The decoder publishes a [`CacheLayout`]; the prefill worker obeys it. Both derive every size they
//! allocate or check from here, so there is one place where "how many bytes" is decided.

use serde::{Deserialize, Serialize};

/// Default number of tokens in a block of the prefix store.
pub const DEFAULT_BLOCK_TOKENS: u32 = 256;

/// The decoder's cache, layer by layer, plus the block size its prefix store works in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheLayout {
    /// Tokens per block; block keys exist for full blocks only.
    pub block_tokens: u32,
    /// One entry per transformer layer, in order.
    pub layers: Vec<LayerCache>,
}

/// Cache of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum LayerCache {
    /// Keys and values of every position: two arrays `[n_kv_heads, tokens, head_dim]`.
    Full {
        /// Key/value heads.
        n_kv_heads: u32,
        /// Elements per head.
        head_dim: u32,
        /// Element type of both arrays.
        dtype: Dtype,
    },
}

/// Element type of a cache array, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
}

/// One array of a layer's cache. The discriminant is the number on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u16)]
pub enum Part {
    /// Keys, after rotary embedding.
    K = 0,
    /// Values.
    V = 1,
}

/// Why a layout is unusable.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// A field is outside what any implementation here accepts.
    #[error("cache layout: {field} is {value}, allowed is {allowed}")]
    OutOfRange {
        /// Name of the field.
        field: &'static str,
        /// What was given.
        value: u64,
        /// What is allowed.
        allowed: &'static str,
    },
}

impl CacheLayout {
    /// A layout whose layers are all alike.
    #[must_use]
    pub fn uniform(n_layers: usize, layer: LayerCache, block_tokens: u32) -> Self {
        Self { block_tokens, layers: vec![layer; n_layers] }
    }

    /// Checks ranges, so that sizes computed from this layout cannot overflow.
    ///
    /// # Errors
    /// [`LayoutError::OutOfRange`] naming the field.
    pub fn validate(&self) -> Result<(), LayoutError> {
        let check = |field, value: u64, max: u64, allowed| {
            if value == 0 || value > max {
                Err(LayoutError::OutOfRange { field, value, allowed })
            } else {
                Ok(())
            }
        };
        check("block_tokens", u64::from(self.block_tokens), 8192, "1..=8192")?;
        check("layers", self.layers.len() as u64, 1024, "1..=1024")?;
        for layer in &self.layers {
            let LayerCache::Full { n_kv_heads, head_dim, .. } = *layer;
            check("n_kv_heads", u64::from(n_kv_heads), 1024, "1..=1024")?;
            check("head_dim", u64::from(head_dim), 4096, "1..=4096")?;
        }
        Ok(())
    }

    /// Bytes of the whole cache for one token.
    #[must_use]
    pub fn bytes_per_token(&self) -> u64 {
        self.layers.iter().map(|l| l.parts().iter().map(|&p| l.bytes_per_token(p)).sum::<u64>()).sum()
    }

    /// Bytes of the whole cache for one full block.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        self.bytes_per_token() * u64::from(self.block_tokens)
    }

    /// Number of arrays over all layers.
    #[must_use]
    pub fn n_arrays(&self) -> usize {
        self.layers.iter().map(|l| l.parts().len()).sum()
    }

    /// Every `(layer, part)` in canonical order.
    pub fn arrays(&self) -> impl Iterator<Item = (u16, Part)> + '_ {
        self.layers
            .iter()
            .enumerate()
            .flat_map(|(i, l)| l.parts().iter().map(move |&p| (u16::try_from(i).unwrap_or(u16::MAX), p)))
    }

    /// BLAKE3 over a canonical binary form; equal in every process and language.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut h = blake3::Hasher::new();
        h.update(b"pd-bridge/layout/v1");
        h.update(&self.block_tokens.to_le_bytes());
        h.update(&(self.layers.len() as u32).to_le_bytes());
        for layer in &self.layers {
            let LayerCache::Full { n_kv_heads, head_dim, dtype } = *layer;
            h.update(&[0]);
            h.update(&n_kv_heads.to_le_bytes());
            h.update(&head_dim.to_le_bytes());
            h.update(&[dtype.code()]);
        }
        *h.finalize().as_bytes()
    }
}

impl LayerCache {
    /// The arrays that make up this layer, in canonical order.
    #[must_use]
    pub fn parts(&self) -> &'static [Part] {
        match self {
            Self::Full { .. } => &[Part::K, Part::V],
        }
    }

    /// Bytes of one array for one token.
    #[must_use]
    pub fn bytes_per_token(&self, _part: Part) -> u64 {
        let Self::Full { n_kv_heads, head_dim, dtype } = *self;
        u64::from(n_kv_heads) * u64::from(head_dim) * dtype.size_bytes() as u64
    }
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Bits of the significand, the hidden one included.
    #[must_use]
    pub fn significand_bits(self) -> i32 {
        match self {
            Self::F32 => 24,
            Self::F16 => 11,
            Self::Bf16 => 8,
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 2,
        }
    }
}

impl std::str::FromStr for Dtype {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "f32" | "float32" => Ok(Self::F32),
            "f16" | "float16" => Ok(Self::F16),
            "bf16" | "bfloat16" => Ok(Self::Bf16),
            other => Err(format!("`{other}` is not one of f32, f16, bf16")),
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

impl TryFrom<u16> for Part {
    type Error = u16;
    fn try_from(code: u16) -> Result<Self, u16> {
        match code {
            0 => Ok(Self::K),
            1 => Ok(Self::V),
            other => Err(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smol() -> CacheLayout {
        let layer = LayerCache::Full { n_kv_heads: 3, head_dim: 64, dtype: Dtype::F16 };
        CacheLayout::uniform(30, layer, 256)
    }

    #[test]
    fn sizes_follow_from_shapes() {
        assert_eq!(smol().bytes_per_token(), 30 * 2 * 3 * 64 * 2);
        assert_eq!(smol().bytes_per_block(), 256 * 30 * 2 * 3 * 64 * 2);
        assert_eq!(smol().n_arrays(), 60);
    }

    #[test]
    fn digest_depends_on_every_field() {
        let base = smol().digest();
        for change in [
            CacheLayout { block_tokens: 128, ..smol() },
            CacheLayout::uniform(29, smol().layers[0], 256),
            CacheLayout::uniform(
                30,
                LayerCache::Full { n_kv_heads: 4, head_dim: 64, dtype: Dtype::F16 },
                256,
            ),
            CacheLayout::uniform(
                30,
                LayerCache::Full { n_kv_heads: 3, head_dim: 32, dtype: Dtype::F16 },
                256,
            ),
            CacheLayout::uniform(
                30,
                LayerCache::Full { n_kv_heads: 3, head_dim: 64, dtype: Dtype::Bf16 },
                256,
            ),
        ] {
            assert_ne!(change.digest(), base);
        }
    }

    #[test]
    fn absurd_layouts_are_refused() {
        assert!(CacheLayout { block_tokens: 0, ..smol() }.validate().is_err());
        assert!(CacheLayout { layers: vec![], ..smol() }.validate().is_err());
        assert!(smol().validate().is_ok());
    }
}
