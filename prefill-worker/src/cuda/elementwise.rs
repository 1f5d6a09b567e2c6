//! Launches of the memory-bound kernels. Shapes are checked by the callers in [`super::backend`].

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::CudaFunction;
use shared::layout::Dtype;

use super::Precision;
use super::device::{Device, Shape, arguments, launch, to_i32, to_i64, to_u32};
use super::sources::Unit;
use crate::ops::OpsError;

/// Storage formats as the kernels number them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Format {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
}

impl Format {
    /// Format of activations under a precision.
    pub(super) fn element(precision: Precision) -> Self {
        match precision {
            Precision::Bf16 | Precision::Fp8 => Self::Bf16,
            Precision::F16 => Self::F16,
        }
    }

    /// Bytes per value.
    pub(super) fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

impl From<Dtype> for Format {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

/// Where a range of a cache lies: `heads` planes of `[capacity, head_dim]` from `address` on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planes {
    pub(super) address: u64,
    pub(super) heads: usize,
    pub(super) capacity_tokens: usize,
    pub(super) head_dim: usize,
}

/// Loaded kernels.
pub(super) struct Elementwise {
    device: Arc<Device>,
    embedding_gather: CudaFunction,
    rms_norm: CudaFunction,
    rope_table: CudaFunction,
    rope_append: CudaFunction,
    swiglu: CudaFunction,
    pack_pieces: CudaFunction,
    restore_cache: CudaFunction,
    cast_format: CudaFunction,
    dequantize_affine: CudaFunction,
    fill_normal: CudaFunction,
}

/// Arguments of the rotation kernel, as the kernel declares them.
#[repr(C)]
struct RopeParams {
    qkv: u64,
    k_cache: u64,
    v_cache: u64,
    table: u64,
    row_stride: i64,
    cache_head_stride: i64,
    tokens: i32,
    start: i32,
    q_heads: i32,
    kv_heads: i32,
    head_dim: i32,
}

/// What [`Elementwise::rope_append`] works on; strides in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeAppend {
    pub(super) qkv: u64,
    pub(super) keys: u64,
    pub(super) values: u64,
    pub(super) table: u64,
    pub(super) tokens: usize,
    pub(super) start: usize,
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) capacity_tokens: usize,
}

/// A quantized matrix on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedMatrix {
    pub(super) packed: u64,
    pub(super) scales: u64,
    pub(super) biases: u64,
    pub(super) scale_format: Format,
    pub(super) bits: usize,
    pub(super) group: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Elementwise {
    pub(super) fn load(device: &Arc<Device>, precision: Precision) -> Result<Self, OpsError> {
        let names = [
            "embedding_gather",
            "rms_norm",
            "rope_table",
            "rope_append",
            "swiglu",
            "pack_pieces",
            "restore_cache",
            "cast_format",
            "dequantize_affine",
            "fill_normal",
        ];
        let loaded = device.kernels(&Unit::elementwise(precision), &names, 0)?;
        let [
            embedding_gather,
            rms_norm,
            rope_table,
            rope_append,
            swiglu,
            pack_pieces,
            restore_cache,
            cast_format,
            dequantize_affine,
            fill_normal,
        ]: [CudaFunction; 10] =
            loaded.try_into().map_err(|_| OpsError::Device("a kernel module lacks kernels".into()))?;
        Ok(Self {
            device: device.clone(),
            embedding_gather,
            rms_norm,
            rope_table,
            rope_append,
            swiglu,
            pack_pieces,
            restore_cache,
            cast_format,
            dequantize_affine,
            fill_normal,
        })
    }

    /// `x[t, :] = table[ids[t], :]`, x in f32.
    pub(super) fn embed(
        &self,
        x: u64,
        table: (u64, Format),
        ids: u64,
        tokens: usize,
        hidden: usize,
        vocab: usize,
    ) -> Result<(), OpsError> {
        let (address, format) = table;
        let (hidden, vocab) = (to_i32(hidden), to_u32(vocab));
        self.run(
            &self.embedding_gather,
            Shape::rows(tokens, 256),
            arguments![x, address, ids, hidden, vocab, format],
        )
    }

    /// RMSNorm of f32 rows into elements.
    pub(super) fn rms_norm(
        &self,
        x: u64,
        weight: u64,
        out: u64,
        rows: usize,
        hidden: usize,
        eps: f32,
    ) -> Result<(), OpsError> {
        // Four vectors of eight per thread cover 16,384 columns at 512 threads.
        let block =
            to_u32(hidden.div_ceil(8).div_ceil(if hidden > 4096 { 4 } else { 1 }).next_multiple_of(32));
        if block > 512 || !hidden.is_multiple_of(8) {
            return Err(OpsError::Unsupported(format!("RMSNorm over {hidden} columns")));
        }
        let hidden = to_i32(hidden);
        self.run(&self.rms_norm, Shape::rows(rows, block), arguments![x, weight, out, hidden, eps])
    }

    /// Cosines and sines of `tokens` positions from `start`.
    pub(super) fn rope_table(
        &self,
        table: u64,
        inv_freq: u64,
        start: usize,
        half_dim: usize,
        tokens: usize,
    ) -> Result<(), OpsError> {
        let shape =
            Shape { grid: (to_u32((half_dim * tokens).div_ceil(256)), 1, 1), block: 256, shared_bytes: 0 };
        let (start, half_dim, tokens) = (to_i32(start), to_i32(half_dim), to_i32(tokens));
        self.run(&self.rope_table, shape, arguments![table, inv_freq, start, half_dim, tokens])
    }

    /// Rotates queries in place, appends rotated keys and plain values to the cache.
    pub(super) fn rope_append(&self, what: RopeAppend) -> Result<(), OpsError> {
        let heads = what.q_heads + 2 * what.kv_heads;
        let params = RopeParams {
            qkv: what.qkv,
            k_cache: what.keys,
            v_cache: what.values,
            table: what.table,
            row_stride: to_i64(heads * what.head_dim),
            cache_head_stride: to_i64(what.capacity_tokens * what.head_dim),
            tokens: to_i32(what.tokens),
            start: to_i32(what.start),
            q_heads: to_i32(what.q_heads),
            kv_heads: to_i32(what.kv_heads),
            head_dim: to_i32(what.head_dim),
        };
        self.run(
            &self.rope_append,
            Shape::items(what.tokens * heads * what.head_dim / 16),
            arguments![params],
        )
    }

    /// `out = silu(gate) * up`, row by row.
    pub(super) fn swiglu(&self, out: u64, gate_up: u64, rows: usize, inner: usize) -> Result<(), OpsError> {
        let values = rows * inner;
        let (units, inner) = (to_i64(values / 8), to_i32(inner));
        self.run(&self.swiglu, Shape::items(values / 8), arguments![out, gate_up, inner, units])
    }

    /// Tokens of every plane in the wanted format, cut at multiples of `block_tokens`, piece after piece.
    pub(super) fn pack_pieces(
        &self,
        out: u64,
        planes: Planes,
        tokens: &Range<usize>,
        block_tokens: usize,
        format: Format,
    ) -> Result<(), OpsError> {
        let shape = Shape::items(planes.heads * tokens.len() * planes.head_dim / 8);
        let stride = to_i64(planes.capacity_tokens * planes.head_dim);
        let (first, count, block) = (to_i32(tokens.start), to_i32(tokens.len()), to_i32(block_tokens));
        let (head_dim, heads, source) = (to_i32(planes.head_dim), to_i32(planes.heads), planes.address);
        self.run(
            &self.pack_pieces,
            shape,
            arguments![out, source, stride, first, count, block, head_dim, heads, format],
        )
    }

    /// The reverse, for elements.
    pub(super) fn restore_cache(
        &self,
        planes: Planes,
        source: u64,
        first: usize,
        tokens: usize,
    ) -> Result<(), OpsError> {
        let shape = Shape::items(planes.heads * tokens * planes.head_dim / 8);
        let stride = to_i64(planes.capacity_tokens * planes.head_dim);
        let (first, tokens, head_dim, heads) =
            (to_i32(first), to_i32(tokens), to_i32(planes.head_dim), to_i32(planes.heads));
        let out = planes.address;
        self.run(&self.restore_cache, shape, arguments![out, source, stride, first, tokens, head_dim, heads])
    }

    /// Converts `n` values between formats.
    pub(super) fn cast(&self, out: (u64, Format), source: (u64, Format), n: usize) -> Result<(), OpsError> {
        let ((out, to), (source, from), count) = (out, source, to_i64(n));
        self.run(&self.cast_format, Shape::items(n), arguments![out, source, count, to, from])
    }

    /// Expands a quantized matrix into elements, row-major.
    pub(super) fn dequantize(&self, out: u64, matrix: PackedMatrix) -> Result<(), OpsError> {
        let words = matrix.rows * matrix.columns * matrix.bits / 32;
        let (bits, group, columns, count) =
            (to_i32(matrix.bits), to_i32(matrix.group), to_i32(matrix.columns), to_i64(words));
        let PackedMatrix { packed, scales, biases, scale_format, .. } = matrix;
        self.run(
            &self.dequantize_affine,
            Shape::items(words),
            arguments![out, packed, scales, biases, scale_format, bits, group, columns, count],
        )
    }

    /// Normal random values.
    pub(super) fn fill_normal(
        &self,
        out: (u64, Format),
        n: usize,
        mean: f32,
        deviation: f32,
        seed: u64,
    ) -> Result<(), OpsError> {
        let ((out, format), count) = (out, to_i64(n));
        self.run(&self.fill_normal, Shape::items(n), arguments![out, count, format, mean, deviation, seed])
    }

    fn run(
        &self,
        function: &CudaFunction,
        shape: Shape,
        arguments: &mut [*mut std::ffi::c_void],
    ) -> Result<(), OpsError> {
        // SAFETY: each caller above passes the kernel's parameter types; addresses come from buffers whose sizes the
        // backend checked and which it frees only in order with this stream.
        unsafe { launch(&self.device.compute, function, shape, arguments) }
    }
}
