//! Tensors in host memory.

use super::affine;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorFormat {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    BF16,
    /// Integers with a scale and a bias per group of a row.
    Affine {
        /// Bits of one integer: 4 or 8.
        bits: u8,
        /// Elements that share a scale and a bias.
        group_size: u32,
    },
}

/// What is known of a tensor before it is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Logical shape: `[out, in]` for a projection, `[width]` for a norm or a bias.
    pub shape: Vec<usize>,
    /// Stored format.
    pub format: TensorFormat,
}

impl TensorInfo {
    /// Bytes of such a tensor; scales and biases of a quantized one count as half precision.
    #[must_use]
    pub fn default_bytes(&self) -> u64 {
        let elements = self.shape.iter().fold(1u64, |n, d| n.saturating_mul(*d as u64));
        match self.format {
            TensorFormat::F32 => elements.saturating_mul(4),
            TensorFormat::F16 | TensorFormat::BF16 => elements.saturating_mul(2),
            TensorFormat::Affine { bits, group_size } => (elements / 8)
                .saturating_mul(u64::from(bits))
                .saturating_add((elements / u64::from(group_size.max(1))).saturating_mul(4)),
        }
    }
}

/// A vector of floats in its stored precision.
#[derive(Clone, Debug, PartialEq)]
pub enum FloatVec {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// IEEE halves.
    F16(Vec<f16>),
    /// bfloat16s.
    BF16(Vec<bf16>),
}

impl FloatVec {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::F16(v) => v.len(),
            Self::BF16(v) => v.len(),
        }
    }

    /// True without elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Widen to f32 (exact).
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(v) => v.clone(),
            Self::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Self::BF16(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }
}

/// A tensor in host memory: row-major, logical shape in `shape`.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// 32-bit floats.
    F32 {
        /// Logical shape.
        shape: Vec<usize>,
        /// Row-major elements.
        data: Vec<f32>,
    },
    /// IEEE halves.
    F16 {
        /// Logical shape.
        shape: Vec<usize>,
        /// Row-major elements.
        data: Vec<f16>,
    },
    /// bfloat16s.
    BF16 {
        /// Logical shape.
        shape: Vec<usize>,
        /// Row-major elements.
        data: Vec<bf16>,
    },
    /// `w[r, c] = scales[r, c / group_size] · q[r, c] + biases[r, c / group_size]`, MLX's affine quantization.
    Affine {
        /// Logical shape `[rows, columns]`.
        shape: Vec<usize>,
        /// Bits of one integer: 4 or 8.
        bits: u8,
        /// Elements that share a scale and a bias.
        group_size: u32,
        /// `[rows, columns · bits / 32]`: integers packed from the low bits up, as MLX packs them.
        packed: Vec<u32>,
        /// `[rows, columns / group_size]`.
        scales: FloatVec,
        /// `[rows, columns / group_size]`.
        biases: FloatVec,
    },
}

impl HostTensor {
    /// Logical shape.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::F32 { shape, .. }
            | Self::F16 { shape, .. }
            | Self::BF16 { shape, .. }
            | Self::Affine { shape, .. } => shape,
        }
    }

    /// Stored format.
    #[must_use]
    pub fn format(&self) -> TensorFormat {
        match self {
            Self::F32 { .. } => TensorFormat::F32,
            Self::F16 { .. } => TensorFormat::F16,
            Self::BF16 { .. } => TensorFormat::BF16,
            Self::Affine { bits, group_size, .. } => {
                TensorFormat::Affine { bits: *bits, group_size: *group_size }
            }
        }
    }

    /// All elements as f32, row-major. Affine weights are `scale · q + bias`, product and sum each rounded to f32.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32 { data, .. } => data.clone(),
            Self::F16 { data, .. } => data.iter().map(|x| x.to_f32()).collect(),
            Self::BF16 { data, .. } => data.iter().map(|x| x.to_f32()).collect(),
            Self::Affine { shape, bits, group_size, packed, scales, biases } => affine::dequantize(
                shape.iter().product(),
                *bits,
                *group_size as usize,
                packed,
                &scales.to_f32(),
                &biases.to_f32(),
            ),
        }
    }

    /// The same tensor as f32, reusing the memory where it already is.
    #[must_use]
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32 { data, .. } => data,
            other => other.to_f32(),
        }
    }
}
