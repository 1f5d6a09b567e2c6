//! Rotary position embedding, in MLX's arithmetic.

use std::sync::OnceLock;

use rayon::prelude::*;

use shared::angles::SinCos;

use super::cache::CpuCache;
use crate::ops::{At, Heads};

/// Positions per lazily made table.
const PAGE_POSITIONS: usize = 256;
/// Tables that can exist: positions up to 16 Mi.
const MAX_PAGES: usize = 65_536;

/// Frequencies, and cosines and sines of the positions met so far.
pub struct CpuRope {
    inv_freq: Vec<f32>,
    sin_cos: SinCos,
    pages: Vec<OnceLock<Vec<[f32; 2]>>>,
}

impl CpuRope {
    pub(super) fn new(inv_freq: &[f32], sin_cos: SinCos) -> Self {
        let pages = (0..MAX_PAGES).map(|_| OnceLock::new()).collect();
        Self { inv_freq: inv_freq.to_vec(), sin_cos, pages }
    }

    /// `[cos, sin]` of one position, one pair per frequency.
    ///
    /// The angle is `position * inv_freq` rounded to f32, as MLX makes it; its cosine and sine are the decoder's.
    fn angles(&self, position: usize) -> &[[f32; 2]] {
        let page = self.pages[position / PAGE_POSITIONS].get_or_init(|| {
            let first = position / PAGE_POSITIONS * PAGE_POSITIONS;
            let angle = |p: usize, f: f32| p as f32 * f;
            (first..first + PAGE_POSITIONS)
                .flat_map(|p| self.inv_freq.iter().map(move |&f| angle(p, f)))
                .map(|theta| self.sin_cos.cos_sin(theta).into())
                .collect()
        });
        let half = self.inv_freq.len();
        let start = position % PAGE_POSITIONS * half;
        &page[start..start + half]
    }

    /// True if every position below `end` has a table slot.
    pub(super) fn covers(&self, end: usize) -> bool {
        end <= MAX_PAGES * PAGE_POSITIONS
    }
}

/// Rotates the queries of `qkv` (`[tokens, heads.columns()]`) in place; writes rotated keys and values into the cache.
pub(super) fn rotate_and_append(at: At, heads: Heads, rope: &CpuRope, qkv: &mut [f32], cache: &mut CpuCache) {
    let (width, d) = (heads.columns(), heads.head_dim);
    let query_width = heads.n_heads * d;
    let first = at.chunk.offset_tokens;
    let rows = &mut qkv[..at.chunk.tokens * width];
    if heads.n_heads > 0 {
        rows.par_chunks_mut(width).with_min_len(16).enumerate().for_each(|(t, row)| {
            let angles = rope.angles(first + t);
            for head in row[..query_width].chunks_exact_mut(d) {
                rotate(head, angles);
            }
        });
    }
    let rows = &*rows;
    let value_start = query_width + heads.n_kv_heads * d;
    let (keys, values) = cache.layer_mut(at.layer);
    rayon::join(
        || {
            keys.for_each_head(|h, head| {
                for (t, row) in rows.chunks_exact(width).enumerate() {
                    let source = &row[query_width + h * d..][..d];
                    let target = &mut head[(first + t) * d..][..d];
                    target.copy_from_slice(source);
                    rotate(target, rope.angles(first + t));
                }
            });
        },
        || {
            values.for_each_head(|h, head| {
                for (t, row) in rows.chunks_exact(width).enumerate() {
                    head[(first + t) * d..][..d].copy_from_slice(&row[value_start + h * d..][..d]);
                }
            });
        },
    );
}

/// Half-split rotation of one head. Rust never fuses `a * b - c * d`, so each product is rounded, as in MLX.
fn rotate(head: &mut [f32], angles: &[[f32; 2]]) {
    let (low, high) = head.split_at_mut(angles.len());
    for ((a, b), &[cos, sin]) in low.iter_mut().zip(high).zip(angles) {
        let (x1, x2) = (*a, *b);
        *a = x1 * cos - x2 * sin;
        *b = x1 * sin + x2 * cos;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn angles_are_those_of_f32_theta() {
        let rope = CpuRope::new(&[1.0, 0.1, 0.003], SinCos::Rounded);
        for p in [0usize, 1, 255, 256, 8191] {
            for (i, f) in [1.0f32, 0.1, 0.003].into_iter().enumerate() {
                let theta = f64::from(p as f32 * f);
                assert_eq!(rope.angles(p)[i], [theta.cos() as f32, theta.sin() as f32]);
            }
        }
    }

    #[test]
    fn rotation_keeps_the_norm_and_position_zero_is_identity() {
        let rope = CpuRope::new(&[1.0, 0.01], SinCos::Rounded);
        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut head, rope.angles(0));
        assert_eq!(head, [1.0, 2.0, 3.0, 4.0]);
        rotate(&mut head, rope.angles(77));
        let norm: f32 = head.iter().map(|x| x * x).sum();
        assert!((norm - 30.0).abs() < 1e-4);
    }
}
