//! ggml's block formats, turned into plain floats or MLX's affine quantization.
//!
//! `Q4_0`, `Q4_1` and `Q8_0` are affine in groups of 32, so the repacking loses nothing:
//! `Q4_0` is `d·(q − 8)`, that is scale `d`, bias `−8d`; `Q8_0` is `d·q` with signed `q`, that is `q + 128` with bias
//! `−128d`; `Q4_1` is `d·q + m` as it stands.

use crate::weights::affine::Groups;
use crate::weights::{FloatVec, HostTensor, TensorFormat};
use half::{bf16, f16};

const GROUP: usize = 32;

/// A storage format this project reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockFormat {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q8_0,
}

impl BlockFormat {
    /// From ggml's type number; the error is the type's name.
    pub(crate) fn of(kind: u32) -> Result<Self, String> {
        Ok(match kind {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::BF16,
            other => return Err(type_name(other)),
        })
    }

    pub(crate) fn tensor_format(self) -> TensorFormat {
        match self {
            Self::F32 => TensorFormat::F32,
            Self::F16 => TensorFormat::F16,
            Self::BF16 => TensorFormat::BF16,
            Self::Q4_0 | Self::Q4_1 => TensorFormat::Affine { bits: 4, group_size: GROUP as u32 },
            Self::Q8_0 => TensorFormat::Affine { bits: 8, group_size: GROUP as u32 },
        }
    }

    /// Bytes of a tensor; `None` when rows are not whole blocks or the size overflows.
    pub(crate) fn len_bytes(self, shape: &[usize]) -> Option<u64> {
        let (elements, bytes) = self.block();
        let row = shape.last().filter(|n| n.is_multiple_of(elements))?;
        let rows = shape[..shape.len() - 1].iter().try_fold(1u64, |n, d| n.checked_mul(*d as u64))?;
        rows.checked_mul((row / elements) as u64)?.checked_mul(bytes as u64)
    }

    /// Elements and bytes of one block.
    fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (GROUP, 18),
            Self::Q4_1 => (GROUP, 20),
            Self::Q8_0 => (GROUP, 34),
        }
    }

    /// Decode a whole tensor. `bytes` is exactly [`Self::len_bytes`] long. The error says what does not fit.
    pub(crate) fn decode(self, shape: Vec<usize>, bytes: &[u8]) -> Result<HostTensor, String> {
        Ok(match self {
            Self::F32 => HostTensor::F32 { shape, data: elements(bytes, f32::from_le_bytes) },
            Self::F16 => HostTensor::F16 { shape, data: elements(bytes, f16::from_le_bytes) },
            Self::BF16 => HostTensor::BF16 { shape, data: elements(bytes, bf16::from_le_bytes) },
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => self.decode_blocks(shape, bytes)?,
        })
    }

    fn decode_blocks(self, shape: Vec<usize>, bytes: &[u8]) -> Result<HostTensor, String> {
        let bits: u8 = if self == Self::Q8_0 { 8 } else { 4 };
        let blocks = bytes.chunks_exact(self.block().1);
        let mut groups = Groups::with_capacity(blocks.len(), GROUP * usize::from(bits) / 32);
        for block in blocks {
            let scale = f16::from_le_bytes([block[0], block[1]]);
            let (bias, quants) = match self {
                Self::Q4_1 => (f16::from_le_bytes([block[2], block[3]]), &block[4..]),
                Self::Q4_0 => (f16::from_f32(-8.0 * scale.to_f32()), &block[2..]),
                _ => (f16::from_f32(-128.0 * scale.to_f32()), &block[2..]),
            };
            if scale.is_finite() && !bias.is_finite() {
                return Err("a group's scale is too large for a half-precision bias".to_owned());
            }
            let words = &mut groups.packed;
            if bits == 8 {
                words.extend(quants.chunks_exact(4).map(|q| {
                    // Flipping the sign bit adds 128.
                    u32::from_le_bytes([q[0] ^ 0x80, q[1] ^ 0x80, q[2] ^ 0x80, q[3] ^ 0x80])
                }));
            } else {
                // ggml keeps element j in the low and element j + 16 in the high half of byte j.
                words.extend(quants.chunks_exact(8).map(|q| pack_nibbles(q, 0)));
                words.extend(quants.chunks_exact(8).map(|q| pack_nibbles(q, 4)));
            }
            groups.scales.push(scale);
            groups.biases.push(bias);
        }
        Ok(HostTensor::Affine {
            shape,
            bits,
            group_size: GROUP as u32,
            packed: groups.packed,
            scales: FloatVec::F16(groups.scales),
            biases: FloatVec::F16(groups.biases),
        })
    }
}

fn pack_nibbles(bytes: &[u8], shift: u32) -> u32 {
    bytes.iter().rev().fold(0, |word, b| (word << 4) | ((u32::from(*b) >> shift) & 0xF))
}

fn elements<T, const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|b| read(*b)).collect()
}

fn type_name(kind: u32) -> String {
    let name = match kind {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        other => return format!("ggml type {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(format: BlockFormat, bytes: &[u8]) -> Vec<f32> {
        format.decode(vec![1, 32], bytes).unwrap().to_f32()
    }

    #[test]
    fn q4_0_is_scale_times_q_minus_eight() {
        let mut bytes = f16::from_f32(0.5).to_le_bytes().to_vec();
        bytes.extend((0..16u8).map(|j| j | ((15 - j) << 4)));
        let got = block(BlockFormat::Q4_0, &bytes);
        let want: Vec<f32> = (0..16).chain((0..16).rev()).map(|q| 0.5 * (q as f32 - 8.0)).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn q4_1_is_scale_times_q_plus_minimum() {
        let mut bytes = f16::from_f32(0.25).to_le_bytes().to_vec();
        bytes.extend(f16::from_f32(-1.5).to_le_bytes());
        bytes.extend((0..16u8).map(|j| j | (j << 4)));
        let got = block(BlockFormat::Q4_1, &bytes);
        let want: Vec<f32> = (0..16).chain(0..16).map(|q| 0.25 * q as f32 - 1.5).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn q8_0_is_scale_times_signed_q() {
        let quants: Vec<i8> = (0..32).map(|i| (i * 8 - 128) as i8).collect();
        let mut bytes = f16::from_f32(0.0625).to_le_bytes().to_vec();
        bytes.extend(quants.iter().map(|q| *q as u8));
        let got = block(BlockFormat::Q8_0, &bytes);
        let want: Vec<f32> = quants.iter().map(|q| 0.0625 * f32::from(*q)).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn an_overflowing_bias_is_refused() {
        let mut bytes = f16::from_f32(60000.0).to_le_bytes().to_vec();
        bytes.extend([0; 32]);
        assert!(BlockFormat::Q8_0.decode(vec![1, 32], &bytes).is_err());
    }

    #[test]
    fn sizes_overflow_to_none() {
        assert_eq!(BlockFormat::F32.len_bytes(&[usize::MAX, usize::MAX]), None);
        assert_eq!(BlockFormat::Q4_0.len_bytes(&[4, 33]), None);
        assert_eq!(BlockFormat::Q4_1.len_bytes(&[4, 64]), Some(4 * 2 * 20));
    }
}
