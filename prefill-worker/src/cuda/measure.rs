//! Rates of single kernels on random data, timed with device events.

use cudarc::driver::sys::CUevent_flags_enum;
use serde::Serialize;

use super::attention::{Problem, Variant};
use super::device::device_error;
use super::gemm::{Kind, Product};
use super::memory::DeviceMemory;
use super::sources::MmaTile;
use super::{CudaOps, Precision};
use crate::ops::OpsError;

/// A measured rate.
#[derive(Debug, Clone, Serialize)]
pub struct Rate {
    /// What ran, with its shape.
    pub name: String,
    /// Median time of a run, in milliseconds.
    pub median_ms: f64,
    /// Fastest and slowest run, in milliseconds.
    pub range_ms: (f64, f64),
    /// Floating-point operations that the result needs, over the median time.
    pub tflops: f64,
}

/// Shape of an attention measurement.
#[derive(Debug, Clone, Copy)]
pub struct AttentionShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key heads.
    pub n_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Queries.
    pub q_len: usize,
    /// Keys before the first query.
    pub q_start: usize,
}

impl AttentionShape {
    /// Two products of `2 * head_dim` operations for each pair that the mask lets through.
    fn operations(&self) -> f64 {
        let (q, start) = (self.q_len as f64, self.q_start as f64);
        4.0 * self.head_dim as f64 * self.n_heads as f64 * (q * start + q * (q + 1.0) / 2.0)
    }
}

impl CudaOps {
    /// Every attention variant that this device can run, on one shape.
    ///
    /// # Errors
    /// [`OpsError`] from the device.
    pub fn measure_attention(&mut self, shape: AttentionShape, runs: usize) -> Result<Vec<Rate>, OpsError> {
        let AttentionShape { n_heads, n_kv_heads, head_dim, q_len, q_start } = shape;
        let kv_len = q_start + q_len;
        let row = (n_heads + 2 * n_kv_heads) * head_dim;
        let q = self.random(q_len * row, 1.0, 1)?;
        let k = self.random(n_kv_heads * kv_len * head_dim, 1.0, 2)?;
        let v = self.random(n_kv_heads * kv_len * head_dim, 1.0, 3)?;
        let out = self.memory("attention output", q_len * n_heads * head_dim * 2)?;
        let problem = Problem {
            q: q.address(),
            q_row_stride: row,
            k: k.address(),
            v: v.address(),
            out: out.address(),
            q_len,
            q_start,
            n_heads,
            n_kv_heads,
            head_dim,
            capacity_tokens: kv_len,
            window: 0,
        };
        let mut rates = Vec::new();
        for variant in self.measured_variants(head_dim) {
            let name = format!(
                "attention {variant:?} d={head_dim} heads={n_heads}/{n_kv_heads} q={q_len}+{q_start}"
            );
            rates.push(self.measure(name, shape.operations(), runs, |ops| {
                ops.attention.run_variant(variant, &problem)
            })?);
        }
        Ok(rates)
    }

    /// One product `[tokens, columns] x [rows, columns]ᵀ`, accumulating into f32 or overwriting elements.
    ///
    /// # Errors
    /// [`OpsError`] from the device.
    pub fn measure_product(
        &mut self,
        (tokens, rows, columns): (usize, usize, usize),
        accumulate: bool,
        runs: usize,
    ) -> Result<Rate, OpsError> {
        let fp8 = self.options.precision == Precision::Fp8;
        let x = self.random(tokens * columns, 1.0, 4)?;
        let w = self.random(rows * columns, 1.0, 5)?;
        let out = self.memory("product", tokens * rows * 4)?;
        out.fill(0)?;
        let kind = Kind { tokens, rows, columns, out_f32: accumulate, accumulate, bias: false, fp8 };
        let mut product = Product {
            x: x.address(),
            weight: w.address(),
            out: out.address(),
            bias: 0,
            scales: (0, 0),
            kind,
        };
        let mut keep = Vec::new();
        if fp8 {
            let mut quantized = |source: u64, rows: usize| {
                let (values, scales) =
                    (self.memory("FP8", rows * columns)?, self.memory("FP8 scales", rows * 4)?);
                self.quantize_rows(values.address(), scales.address(), source, rows, columns)?;
                let addresses = (values.address(), scales.address());
                keep.push((values, scales));
                Ok::<_, OpsError>(addresses)
            };
            let (x8, x_scales) = quantized(product.x, tokens)?;
            let (w8, w_scales) = quantized(product.weight, rows)?;
            product = Product { x: x8, weight: w8, scales: (w_scales, x_scales), ..product };
        }
        let name =
            format!("product {tokens}x{rows}x{columns} {:?} accumulate={accumulate}", self.options.precision);
        let operations = 2.0 * tokens as f64 * rows as f64 * columns as f64;
        self.measure(name, operations, runs, |ops| ops.gemm.run(&product))
    }

    fn measured_variants(&self, head_dim: usize) -> Vec<Variant> {
        let shared_bytes = self.facts().shared_bytes_per_block;
        let mut variants = vec![Variant::Mma(MmaTile::choose(head_dim, shared_bytes))];
        if head_dim == 128 {
            for (m, n, warps, min_blocks) in [(128, 32, 4, 2), (64, 64, 4, 3), (128, 64, 8, 1)] {
                let tile = MmaTile { m, n, warps, min_blocks };
                if tile.shared_bytes(head_dim) <= shared_bytes {
                    variants.push(Variant::Mma(tile));
                }
            }
        }
        if self.facts().capability == (9, 0) && matches!(head_dim, 64 | 128) {
            variants.extend([false, true].map(|pingpong| Variant::Wgmma { pingpong }));
        }
        variants
    }

    fn random(&self, values: usize, deviation: f32, seed: u64) -> Result<DeviceMemory, OpsError> {
        let memory = self.memory("random values", values * 2)?;
        self.kernels.fill_normal((memory.address(), self.element), values, 0.0, deviation, seed)?;
        Ok(memory)
    }

    /// One warm-up, then `runs` timed runs.
    fn measure(
        &mut self,
        name: String,
        operations: f64,
        runs: usize,
        mut run: impl FnMut(&mut Self) -> Result<(), OpsError>,
    ) -> Result<Rate, OpsError> {
        run(self)?;
        let timing = Some(CUevent_flags_enum::CU_EVENT_DEFAULT);
        let mut times_ms = Vec::new();
        for _ in 0..runs.max(1) {
            let start = self.device.compute.record_event(timing).map_err(device_error)?;
            run(self)?;
            let end = self.device.compute.record_event(timing).map_err(device_error)?;
            times_ms.push(f64::from(start.elapsed_ms(&end).map_err(device_error)?));
        }
        times_ms.sort_by(f64::total_cmp);
        let median_ms = times_ms[times_ms.len() / 2];
        let range_ms = (times_ms[0], times_ms[times_ms.len() - 1]);
        Ok(Rate { name, median_ms, range_ms, tflops: operations / median_ms / 1e9 })
    }
}
