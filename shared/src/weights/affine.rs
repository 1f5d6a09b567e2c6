//! MLX's affine quantization.

use half::f16;

/// Groups in the making: packed words, scales, biases.
pub(crate) struct Groups {
    pub(crate) packed: Vec<u32>,
    pub(crate) scales: Vec<f16>,
    pub(crate) biases: Vec<f16>,
}

impl Groups {
    pub(crate) fn with_capacity(groups: usize, words_per_group: usize) -> Self {
        Self {
            packed: Vec::with_capacity(groups.saturating_mul(words_per_group)),
            scales: Vec::with_capacity(groups),
            biases: Vec::with_capacity(groups),
        }
    }
}

/// `scale · q + bias` for `n` elements; groups run along the row, and rows are whole groups.
pub(crate) fn dequantize(
    n: usize,
    bits: u8,
    group: usize,
    packed: &[u32],
    scales: &[f32],
    biases: &[f32],
) -> Vec<f32> {
    let bits = u32::from(bits);
    if bits == 0 || bits >= 32 || group == 0 {
        return Vec::new();
    }
    let per_word = 32 / bits;
    let words_per_group = (group / per_word as usize).max(1);
    let mask = (1u32 << bits) - 1;
    let mut out = Vec::with_capacity(n);
    for ((words, &scale), &bias) in packed.chunks(words_per_group).zip(scales).zip(biases) {
        for &word in words {
            out.extend((0..per_word).map(|i| scale * ((word >> (i * bits)) & mask) as f32 + bias));
        }
    }
    out
}
