//! Causal attention for grouped-query heads, blocked, with an online softmax.
//!
//! FlashAttention's recurrence (Dao et al. 2022) on matrix products: a task is one key/value head and one tile of
//! queries, all query heads of the group stacked into one tall matrix, so that both products are large. Tiles of keys
//! that no query of the tile may see are never touched.

use parking_lot::Mutex;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::cache::CpuCache;
use super::math;
use super::matmul::{Matrix, product};
use super::memory::floats;
use crate::ops::{At, Heads, OpsError};

/// Rows of the stacked query matrix that a task aims at.
const TARGET_ROWS: usize = 192;
/// Keys per tile: scores of one tile stay in the second-level cache.
const KEY_TILE: usize = 256;

/// Memory that attention works in, kept between calls.
pub(super) struct Scratch {
    arch: Arch,
    threads: Vec<Mutex<Tile>>,
    /// `[n_kv_heads, tokens, group * head_dim]`.
    by_head: Vec<f32>,
}

/// One thread's memory.
#[derive(Default)]
struct Tile {
    queries: Vec<f32>,
    scores: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

/// What one call computes.
struct Call<'a> {
    at: At,
    heads: Heads,
    group: usize,
    tile_tokens: usize,
    window_tokens: Option<usize>,
    qkv: &'a [f32],
    cache: &'a CpuCache,
}

impl Scratch {
    pub(super) fn new(arch: Arch, threads: usize) -> Self {
        Self { arch, threads: (0..threads).map(|_| Mutex::default()).collect(), by_head: Vec::new() }
    }

    /// Fills `out` (`[tokens, n_heads * head_dim]`); see [`crate::ops::Ops::attention`].
    pub(super) fn attend(
        &mut self,
        at: At,
        heads: Heads,
        window_tokens: Option<usize>,
        qkv: &[f32],
        cache: &CpuCache,
        out: &mut [f32],
    ) -> Result<(), OpsError> {
        let (tokens, d) = (at.chunk.tokens, heads.head_dim);
        let group = heads.n_heads / heads.n_kv_heads;
        let head_width = group * d;
        let wanted = heads.n_heads * d * tokens;
        if self.by_head.len() < wanted {
            self.by_head = floats("attention scratch", wanted)?;
        }
        let tile_tokens = (TARGET_ROWS / group).clamp(16, 128);
        let call = Call { at, heads, group, tile_tokens, window_tokens, qkv, cache };
        let (arch, threads) = (self.arch, &self.threads);
        self.by_head[..wanted]
            .par_chunks_mut(tokens * head_width)
            .enumerate()
            .flat_map(|(kv_head, rows)| {
                let tiles = rows.par_chunks_mut(tile_tokens * head_width).enumerate();
                tiles.map(move |(tile, out)| (kv_head, tile, out))
            })
            .for_each(|(kv_head, tile, out)| {
                let thread = rayon::current_thread_index().unwrap_or(0) % threads.len();
                call.run(arch, kv_head, tile, &mut threads[thread].lock(), out);
            });
        let by_head = &self.by_head[..wanted];
        out[..wanted].par_chunks_mut(heads.n_heads * d).with_min_len(32).enumerate().for_each(|(t, row)| {
            for (h, target) in row.chunks_exact_mut(head_width).enumerate() {
                target.copy_from_slice(&by_head[(h * tokens + t) * head_width..][..head_width]);
            }
        });
        Ok(())
    }
}

impl Call<'_> {
    /// One tile of queries of one key/value head; `out` is `[tile tokens, group, head_dim]`.
    fn run(&self, arch: Arch, kv_head: usize, tile: usize, work: &mut Tile, out: &mut [f32]) {
        let d = self.heads.head_dim;
        let first = tile * self.tile_tokens;
        let rows = out.len() / d;
        let offset = self.at.chunk.offset_tokens + first;
        let last_end = offset + rows / self.group;
        let start = self.window_tokens.map_or(0, |w| (offset + 1).saturating_sub(w));
        work.prepare(rows, d);
        self.stack_queries(kv_head, first, &mut work.queries[..rows * d]);
        out.fill(0.0);
        let (keys, values) = self.cache.layer(self.at.layer);
        let (keys, values) = (keys.head(kv_head), values.head(kv_head));
        let mut begin = start;
        while begin < last_end {
            let end = (begin + KEY_TILE).min(last_end);
            let n = end - begin;
            let scores = &mut work.scores[..rows * n];
            let queries = Matrix::new(&work.queries, rows, d);
            let tile_keys = Matrix::new(&keys[begin * d..end * d], n, d);
            product(scores, queries, tile_keys.transposed(), false, 1);
            arch.dispatch(Softmax {
                scores,
                first_key: begin,
                keys: n,
                first_query: offset,
                group: self.group,
                window_tokens: self.window_tokens,
                max: &mut work.max,
                sum: &mut work.sum,
                out,
                head_dim: d,
            });
            let tile_values = Matrix::new(&values[begin * d..end * d], n, d);
            product(out, Matrix::new(scores, rows, n), tile_values, true, 1);
            begin = end;
        }
        for (row, sum) in out.chunks_exact_mut(d).zip(&work.sum) {
            let scale = 1.0 / sum;
            row.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// Copies the group's query heads of the tile under each other, scaled by `1 / sqrt(head_dim)`.
    fn stack_queries(&self, kv_head: usize, first: usize, out: &mut [f32]) {
        let d = self.heads.head_dim;
        let width = self.heads.columns();
        let group_width = self.group * d;
        let scale = (d as f32).sqrt().recip();
        for (t, rows) in out.chunks_exact_mut(group_width).enumerate() {
            let source = &self.qkv[(first + t) * width + kv_head * group_width..][..group_width];
            for (target, x) in rows.iter_mut().zip(source) {
                *target = x * scale;
            }
        }
    }
}

/// Turns one tile of scores into weights and brings the running maximum, sum and output of every row up to date.
struct Softmax<'a> {
    /// `[rows, keys]`; row `r` is of the query at `first_query + r / group`.
    scores: &'a mut [f32],
    first_key: usize,
    keys: usize,
    first_query: usize,
    group: usize,
    window_tokens: Option<usize>,
    max: &'a mut [f32],
    sum: &'a mut [f32],
    /// `[rows, head_dim]`.
    out: &'a mut [f32],
    head_dim: usize,
}

impl WithSimd for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let end = self.first_key + self.keys;
        for (r, row) in self.scores.chunks_exact_mut(self.keys).enumerate() {
            let position = self.first_query + r / self.group;
            let visible_end = (position + 1).clamp(self.first_key, end) - self.first_key;
            let from = self.window_tokens.map_or(0, |w| (position + 1).saturating_sub(w));
            let visible_start = from.clamp(self.first_key, self.first_key + visible_end) - self.first_key;
            row[..visible_start].fill(0.0);
            row[visible_end..].fill(0.0);
            let visible = &mut row[visible_start..visible_end];
            if visible.is_empty() {
                continue;
            }
            let max = math::max(visible).max(self.max[r]);
            let sum = math::exp_sum(visible, max);
            if max > self.max[r] {
                let shrink = math::exp(self.max[r] - max);
                self.sum[r] *= shrink;
                self.out[r * self.head_dim..][..self.head_dim].iter_mut().for_each(|x| *x *= shrink);
                self.max[r] = max;
            }
            self.sum[r] += sum;
        }
    }
}

impl Tile {
    fn prepare(&mut self, rows: usize, head_dim: usize) {
        grow(&mut self.queries, rows * head_dim);
        grow(&mut self.scores, rows * KEY_TILE);
        self.max.clear();
        self.max.resize(rows, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(rows, 0.0);
    }
}

fn grow(data: &mut Vec<f32>, n: usize) {
    if data.len() < n {
        data.resize(n, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{CacheShape, Chunk};

    fn noise(seed: u64, n: usize) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// f64 softmax attention of one query.
    fn reference(
        q: &[f32],
        keys: &[f32],
        values: &[f32],
        d: usize,
        visible: std::ops::Range<usize>,
    ) -> Vec<f64> {
        let dot = |j: usize| {
            q.iter().zip(&keys[j * d..]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
                / (d as f64).sqrt()
        };
        let scores: Vec<f64> = visible.clone().map(dot).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        (0..d)
            .map(|i| {
                visible.clone().zip(&weights).map(|(j, w)| w * f64::from(values[j * d + i])).sum::<f64>()
                    / sum
            })
            .collect()
    }

    fn check(heads: Heads, chunk: Chunk, window_tokens: Option<usize>) {
        let d = heads.head_dim;
        let shape = CacheShape {
            n_layers: 2,
            n_kv_heads: heads.n_kv_heads,
            head_dim: d,
            capacity_tokens: chunk.end() + 3,
        };
        let mut cache = CpuCache::new(shape).unwrap();
        let (keys, values) = cache.layer_mut(1);
        keys.for_each_head(|h, rows| rows.copy_from_slice(&noise(h as u64 + 1, rows.len())));
        values.for_each_head(|h, rows| rows.copy_from_slice(&noise(h as u64 + 91, rows.len())));
        let qkv: Vec<f32> = noise(7, chunk.tokens * heads.columns()).iter().map(|x| x * 4.0).collect();
        let width = heads.n_heads * d;
        let mut out = vec![f32::NAN; chunk.tokens * width];
        let mut scratch = Scratch::new(Arch::new(), 2);
        scratch.attend(At { chunk, layer: 1 }, heads, window_tokens, &qkv, &cache, &mut out).unwrap();
        let (keys, values) = cache.layer(1);
        for t in 0..chunk.tokens {
            for h in 0..heads.n_heads {
                let kv = h / (heads.n_heads / heads.n_kv_heads);
                let end = chunk.offset_tokens + t + 1;
                let start = window_tokens.map_or(0, |w| end.saturating_sub(w));
                let q = &qkv[t * heads.columns() + h * d..][..d];
                let want = reference(q, keys.head(kv), values.head(kv), d, start..end);
                for (got, want) in out[t * width + h * d..][..d].iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() < 1e-5, "token {t} head {h}: {got} {want}");
                }
            }
        }
    }

    #[test]
    fn agrees_with_f64_at_odd_lengths_offsets_and_windows() {
        let grouped = Heads { n_heads: 9, n_kv_heads: 3, head_dim: 64 };
        let plain = Heads { n_heads: 2, n_kv_heads: 2, head_dim: 16 };
        let wide = Heads { n_heads: 16, n_kv_heads: 1, head_dim: 8 };
        for heads in [grouped, plain, wide] {
            for (offset_tokens, tokens) in [(0, 1), (0, 67), (300, 1), (257, 130), (511, 65)] {
                for window in [None, Some(1), Some(40), Some(300)] {
                    check(heads, Chunk { offset_tokens, tokens }, window);
                }
            }
        }
    }
}
