//! Row-wise operations.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::math;

/// Rows handed to a thread at once.
const ROWS_PER_TASK: usize = 32;

/// `out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight`.
pub(super) fn rms_norm(arch: Arch, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    let tasks = x.par_chunks(width * ROWS_PER_TASK).zip(out.par_chunks_mut(width * ROWS_PER_TASK));
    tasks.for_each(|(x, out)| arch.dispatch(RmsNorm { x, weight, eps, out }));
}

/// `out[t, i] = silu(gate_up[t, i]) * gate_up[t, width + i]`.
pub(super) fn swiglu(arch: Arch, gate_up: &[f32], out: &mut [f32], width: usize) {
    let tasks = gate_up.par_chunks(2 * width * ROWS_PER_TASK).zip(out.par_chunks_mut(width * ROWS_PER_TASK));
    tasks.for_each(|(gate_up, out)| arch.dispatch(SwiGlu { gate_up, out, width }));
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl WithSimd for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let mean = math::sum_of_squares(x) / width as f32;
            let scale = 1.0 / (mean + self.eps).sqrt();
            for ((o, x), w) in out.iter_mut().zip(x).zip(self.weight) {
                *o = x * scale * w;
            }
        }
    }
}

struct SwiGlu<'a> {
    gate_up: &'a [f32],
    out: &'a mut [f32],
    width: usize,
}

impl WithSimd for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let rows = self.gate_up.chunks_exact(2 * self.width);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(self.width)) {
            let (gate, up) = row.split_at(self.width);
            for ((o, &g), u) in out.iter_mut().zip(gate).zip(up) {
                *o = math::silu(g) * u;
            }
        }
    }
}
