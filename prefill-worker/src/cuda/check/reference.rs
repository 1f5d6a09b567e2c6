//! The operations in float64, written for clarity.

use rayon::prelude::*;

/// Shape of an attention call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) head_dim: usize,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) q_len: usize,
    pub(super) q_start: usize,
    pub(super) window: usize,
}

/// Attention of rows `[q_len, n_heads, head_dim]` over planes `[n_kv_heads, kv_len, head_dim]`.
pub(super) fn attention(case: Case, q: &[f32], k: &[f32], v: &[f32]) -> Vec<f64> {
    let Case { head_dim: d, n_heads, n_kv_heads, q_len, q_start, window } = case;
    let kv_len = q_start + q_len;
    let scale = 1.0 / (d as f64).sqrt();
    let row = |index: usize| {
        let (t, h) = (index / n_heads, index % n_heads);
        let query = &q[index * d..(index + 1) * d];
        let plane = (h / (n_heads / n_kv_heads)) * kv_len;
        let position = q_start + t;
        let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
        let dot = |j: usize| {
            let key = &k[(plane + j) * d..(plane + j + 1) * d];
            query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * scale
        };
        let scores: Vec<f64> = (first..=position).map(dot).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0; d];
        for (j, weight) in (first..).zip(&weights) {
            for (o, x) in out.iter_mut().zip(&v[(plane + j) * d..]) {
                *o += weight / sum * f64::from(*x);
            }
        }
        out
    };
    (0..q_len * n_heads).into_par_iter().flat_map_iter(row).collect()
}

/// `x Wᵀ + b` for `x [n, columns]` and `w [rows, columns]`.
pub(super) fn linear(x: &[f32], w: &[f32], bias: Option<&[f32]>, columns: usize) -> Vec<f64> {
    let rows = w.len() / columns;
    x.par_chunks(columns)
        .flat_map_iter(|x| {
            (0..rows).map(move |r| {
                let dot: f64 =
                    x.iter().zip(&w[r * columns..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                dot + bias.map_or(0.0, |b| f64::from(b[r]))
            })
        })
        .collect()
}

/// RMSNorm of rows.
pub(super) fn rms_norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    x.chunks(weight.len())
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            row.iter().zip(weight).map(move |(x, w)| x * scale * f64::from(*w)).collect::<Vec<_>>()
        })
        .collect()
}

/// Half-split rotation of one head at a position; the angle is an f32 product by definition.
pub(super) fn rotate(x: &[f32], inv_freq: &[f32], position: usize) -> Vec<f64> {
    let half = inv_freq.len();
    let angle = |i: usize| f64::from(position as f32 * inv_freq[i]);
    let at = |i: usize| f64::from(x[i]);
    let low = (0..half).map(|i| at(i) * angle(i).cos() - at(i + half) * angle(i).sin());
    let high = (0..half).map(|i| at(i) * angle(i).sin() + at(i + half) * angle(i).cos());
    low.chain(high).collect()
}

/// `silu(gate) * up` of rows `[gate | up]`.
pub(super) fn swiglu(gate_up: &[f32], inner: usize) -> Vec<f64> {
    gate_up
        .chunks(2 * inner)
        .flat_map(|row| {
            (0..inner).map(|i| {
                let (gate, up) = (f64::from(row[i]), f64::from(row[inner + i]));
                gate / (1.0 + (-gate).exp()) * up
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_key_is_returned_whole() {
        let case = Case { head_dim: 4, n_heads: 2, n_kv_heads: 1, q_len: 1, q_start: 0, window: 0 };
        let v = [1.0, 2.0, 3.0, 4.0];
        let out = attention(case, &[0.5; 8], &[0.1; 4], &v);
        assert_eq!(out, [1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn a_window_of_one_sees_only_itself() {
        let case = Case { head_dim: 2, n_heads: 1, n_kv_heads: 1, q_len: 2, q_start: 1, window: 1 };
        let v = [9.0, 9.0, 1.0, 2.0, 3.0, 4.0];
        assert_eq!(attention(case, &[1.0; 4], &[1.0; 6], &v), [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn position_zero_is_not_rotated() {
        assert_eq!(rotate(&[1.0, 2.0], &[0.3], 0), [1.0, 2.0]);
    }
}
