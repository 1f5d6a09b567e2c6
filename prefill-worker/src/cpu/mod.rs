//! The CPU backend: f32 throughout, matrix products by `faer`, everything else vectorized through `pulp`, all of it
//! on one rayon pool.
//!
//! Weights are dequantized to f32 when they are uploaded.

mod attention;
mod cache;
mod cast;
mod elementwise;
mod math;
mod matmul;
mod memory;
mod rope;

use std::ops::Range;
use std::sync::Arc;

use pulp::Arch;
use rayon::{ThreadPool, ThreadPoolBuilder};
use shared::angles::SinCos;
use shared::weights::HostTensor;

pub use cache::{CpuCache, CpuSaved};
pub use rope::CpuRope;

use crate::ops::{At, CacheShape, Chunk, Emit, Heads, HostLinear, Ops, OpsError, Piece, Sink, pieces};
use matmul::{Matrix, product};
use memory::floats;

/// Tokens per chunk: enough rows for the products to run at full speed, few enough that activations stay in cache.
const CHUNK_TOKENS: usize = 512;

/// The backend and its threads.
pub struct CpuOps {
    pool: Arc<ThreadPool>,
    arch: Arch,
    threads: usize,
    attention: attention::Scratch,
    /// The decoder's order of summation in products that make keys and values.
    summation_runs: Vec<usize>,
    sin_cos: SinCos,
}

/// A weight in f32.
pub struct CpuWeight {
    /// `[rows, columns]`.
    data: Vec<f32>,
    rows: usize,
    columns: usize,
    /// `[rows]`, or empty.
    bias: Vec<f32>,
}

/// An activation.
pub struct CpuBuffer {
    data: Vec<f32>,
    max_rows: usize,
    /// Columns of what was written last; at most what was planned.
    columns: usize,
}

impl CpuOps {
    /// A backend with that many threads; 0 takes one per core.
    ///
    /// # Errors
    /// [`OpsError::Device`] if threads cannot be started.
    pub fn new(threads: usize) -> Result<Self, OpsError> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("prefill-cpu-{i}"))
            .build()
            .map_err(|e| OpsError::Device(format!("cannot start threads: {e}")))?;
        let threads = pool.current_num_threads();
        let arch = Arch::new();
        let attention = attention::Scratch::new(arch, threads);
        Ok(Self {
            pool: Arc::new(pool),
            arch,
            threads,
            attention,
            summation_runs: Vec::new(),
            sin_cos: SinCos::default(),
        })
    }
}

impl Ops for CpuOps {
    type Weight = CpuWeight;
    type Buffer = CpuBuffer;
    type Rope = CpuRope;
    type Cache = CpuCache;
    type Saved = CpuSaved;

    fn describe(&self) -> String {
        let arch = format!("{:?}", self.arch).to_lowercase();
        let arch = arch.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        format!("cpu ({} threads, {arch}, f32)", self.threads)
    }

    fn preferred_chunk_tokens(&self) -> usize {
        CHUNK_TOKENS
    }

    fn upload_linear(&mut self, linear: HostLinear) -> Result<CpuWeight, OpsError> {
        let columns = linear.weights.first().and_then(|w| w.shape().last().copied()).unwrap_or(0);
        let shapes = linear.weights.iter().map(HostTensor::shape);
        let rows = shapes.clone().map(|s| s.first().copied().unwrap_or(0)).sum::<usize>();
        if columns == 0 || shapes.clone().any(|s| s.len() != 2 || s[1] != columns) {
            return Err(OpsError::Shape(format!("cannot stack weights {:?}", shapes.collect::<Vec<_>>())));
        }
        let data = concatenate(linear.weights, rows * columns)?;
        let bias = concatenate(linear.biases, rows)?;
        if !bias.is_empty() && bias.len() != rows {
            return Err(OpsError::Shape(format!("{} biases for {rows} rows", bias.len())));
        }
        Ok(CpuWeight { data, rows, columns, bias })
    }

    fn upload_norm(&mut self, weight: HostTensor) -> Result<CpuWeight, OpsError> {
        let data = weight.into_f32();
        Ok(CpuWeight { rows: 1, columns: data.len(), data, bias: Vec::new() })
    }

    fn upload_embedding(&mut self, table: HostTensor) -> Result<CpuWeight, OpsError> {
        let &[rows, columns] = table.shape() else {
            return Err(OpsError::Shape(format!("embedding table {:?}", table.shape())));
        };
        Ok(CpuWeight { data: table.into_f32(), rows, columns, bias: Vec::new() })
    }

    fn upload_rope(&mut self, inv_freq: &[f32]) -> Result<CpuRope, OpsError> {
        Ok(CpuRope::new(inv_freq, self.sin_cos))
    }

    fn buffer(&mut self, rows: usize, columns: usize) -> Result<CpuBuffer, OpsError> {
        Ok(CpuBuffer { data: floats("activations", rows * columns)?, max_rows: rows, columns })
    }

    fn cache(&mut self, shape: CacheShape) -> Result<CpuCache, OpsError> {
        CpuCache::new(shape)
    }

    fn save(&mut self, cache: &CpuCache, tokens: Range<usize>) -> Result<CpuSaved, OpsError> {
        cache.save(tokens)
    }

    fn restore(&mut self, saved: &CpuSaved, cache: &mut CpuCache, at: usize) -> Result<(), OpsError> {
        cache.restore(saved, at)
    }

    fn saved_bytes(&self, saved: &CpuSaved) -> usize {
        saved.bytes()
    }

    fn embed(&mut self, table: &CpuWeight, tokens: &[u32], out: &mut CpuBuffer) -> Result<(), OpsError> {
        let width = table.columns;
        let rows = out.overwrite(tokens.len(), width)?;
        for (row, &token) in rows.chunks_exact_mut(width).zip(tokens) {
            let source = table.data.chunks_exact(width).nth(token as usize);
            row.copy_from_slice(
                source.ok_or_else(|| OpsError::Shape(format!("token {token} is not in the table")))?,
            );
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        chunk: Chunk,
        x: &CpuBuffer,
        weight: &CpuWeight,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), OpsError> {
        let x = x.rows(chunk.tokens, weight.columns)?;
        let out = out.overwrite(chunk.tokens, weight.columns)?;
        self.pool.install(|| elementwise::rms_norm(self.arch, x, &weight.data, eps, out));
        Ok(())
    }

    fn linear(
        &mut self,
        chunk: Chunk,
        weight: &CpuWeight,
        x: &CpuBuffer,
        accumulate: bool,
        out: &mut CpuBuffer,
    ) -> Result<(), OpsError> {
        self.multiply(chunk, weight, x, accumulate, out, &[weight.columns])
    }

    fn follow_summation(&mut self, runs: &[usize]) {
        if self.summation_runs != runs {
            self.summation_runs = runs.to_vec();
        }
    }

    fn follow_sin_cos(&mut self, sin_cos: SinCos) {
        self.sin_cos = sin_cos;
    }

    fn linear_keys_values(
        &mut self,
        chunk: Chunk,
        weight: &CpuWeight,
        x: &CpuBuffer,
        out: &mut CpuBuffer,
    ) -> Result<(), OpsError> {
        let covers = self.summation_runs.iter().sum::<usize>() == weight.columns;
        let runs = if covers { self.summation_runs.clone() } else { vec![weight.columns] };
        self.multiply(chunk, weight, x, false, out, &runs)
    }
    fn rope_append(
        &mut self,
        at: At,
        heads: Heads,
        rope: &CpuRope,
        qkv: &mut CpuBuffer,
        cache: &mut CpuCache,
    ) -> Result<(), OpsError> {
        cache.check(at.layer, &(at.chunk.offset_tokens..at.chunk.end()))?;
        if !rope.covers(at.chunk.end()) {
            return Err(OpsError::Unsupported(format!("position {}", at.chunk.end())));
        }
        let qkv = qkv.rows_mut(at.chunk.tokens, heads.columns())?;
        self.pool.install(|| rope::rotate_and_append(at, heads, rope, qkv, cache));
        Ok(())
    }

    fn attention(
        &mut self,
        at: At,
        heads: Heads,
        window_tokens: Option<usize>,
        qkv: &CpuBuffer,
        cache: &CpuCache,
        out: &mut CpuBuffer,
    ) -> Result<(), OpsError> {
        cache.check(at.layer, &(0..at.chunk.end()))?;
        let qkv = qkv.rows(at.chunk.tokens, heads.columns())?;
        let out = out.overwrite(at.chunk.tokens, heads.n_heads * heads.head_dim)?;
        let scratch = &mut self.attention;
        self.pool.install(|| scratch.attend(at, heads, window_tokens, qkv, cache, out))
    }

    fn swiglu(&mut self, chunk: Chunk, gate_up: &CpuBuffer, out: &mut CpuBuffer) -> Result<(), OpsError> {
        let width = gate_up.columns / 2;
        let gate_up = gate_up.rows(chunk.tokens, 2 * width)?;
        let out = out.overwrite(chunk.tokens, width)?;
        self.pool.install(|| elementwise::swiglu(self.arch, gate_up, out, width));
        Ok(())
    }

    fn emit(&mut self, what: Emit, cache: &CpuCache, sink: &Arc<dyn Sink>) -> Result<(), OpsError> {
        cache.check(what.slot, &what.tokens)?;
        let (keys, values) = cache.layer(what.slot);
        let d = cache.shape().head_dim;
        for tokens in pieces(what.tokens, what.block_tokens) {
            let keys = cast::array_bytes(keys, d, &tokens, what.dtype);
            let values = cast::array_bytes(values, d, &tokens, what.dtype);
            sink.deliver(Piece { layer: what.layer, tokens, keys, values })?;
        }
        Ok(())
    }

    fn read(&mut self, chunk: Chunk, x: &CpuBuffer) -> Result<Vec<f32>, OpsError> {
        Ok(x.rows(chunk.tokens, x.columns)?.to_vec())
    }

    fn write(&mut self, chunk: Chunk, values: &[f32], out: &mut CpuBuffer) -> Result<(), OpsError> {
        let columns = values.len() / chunk.tokens.max(1);
        out.overwrite(chunk.tokens, columns)?.copy_from_slice(&values[..chunk.tokens * columns]);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), OpsError> {
        Ok(())
    }
}

impl CpuOps {
    /// `out = x Wᵀ + b` or `out += …`, the inner dimension summed run by run.
    fn multiply(
        &self,
        chunk: Chunk,
        weight: &CpuWeight,
        x: &CpuBuffer,
        accumulate: bool,
        out: &mut CpuBuffer,
        runs: &[usize],
    ) -> Result<(), OpsError> {
        let x = x.rows(chunk.tokens, weight.columns)?;
        let out = match accumulate {
            true => out.rows_mut(chunk.tokens, weight.rows)?,
            false => out.overwrite(chunk.tokens, weight.rows)?,
        };
        for row in out.chunks_exact_mut(weight.rows).filter(|_| !weight.bias.is_empty()) {
            let keep = if accumulate { 1.0 } else { 0.0 };
            row.iter_mut().zip(&weight.bias).for_each(|(x, b)| *x = if keep > 0.0 { *x + b } else { *b });
        }
        let add = accumulate || !weight.bias.is_empty();
        self.pool.install(|| {
            let (rows, columns) = (chunk.tokens, weight.columns);
            let mut start = 0;
            for &run in runs {
                let terms = start..start + run;
                let x = Matrix::new(x, rows, columns).columns(terms.clone());
                let w = Matrix::new(&weight.data, weight.rows, columns).columns(terms).transposed();
                product(out, x, w, add || start > 0, self.threads);
                start += run;
            }
        });
        Ok(())
    }
}

impl CpuBuffer {
    fn rows(&self, rows: usize, columns: usize) -> Result<&[f32], OpsError> {
        self.check(rows, columns)?;
        Ok(&self.data[..rows * columns])
    }

    fn rows_mut(&mut self, rows: usize, columns: usize) -> Result<&mut [f32], OpsError> {
        self.check(rows, columns)?;
        Ok(&mut self.data[..rows * columns])
    }

    /// Room for `rows x columns`, whatever was there before.
    fn overwrite(&mut self, rows: usize, columns: usize) -> Result<&mut [f32], OpsError> {
        if columns * self.max_rows <= self.data.len() {
            self.columns = columns;
        }
        self.rows_mut(rows, columns)
    }

    fn check(&self, rows: usize, columns: usize) -> Result<(), OpsError> {
        if rows <= self.max_rows && columns == self.columns {
            return Ok(());
        }
        let (max_rows, held) = (self.max_rows, self.columns);
        Err(OpsError::Shape(format!("{rows} x {columns} wanted of a buffer of {max_rows} x {held}")))
    }
}

fn concatenate(tensors: Vec<HostTensor>, elements: usize) -> Result<Vec<f32>, OpsError> {
    if tensors.is_empty() {
        return Ok(Vec::new());
    }
    let mut data = Vec::new();
    let bytes = elements.saturating_mul(size_of::<f32>());
    data.try_reserve_exact(elements).map_err(|_| OpsError::OutOfMemory { what: "weights".into(), bytes })?;
    for tensor in tensors {
        data.extend_from_slice(&tensor.into_f32());
    }
    Ok(data)
}
