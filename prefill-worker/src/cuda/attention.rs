//! Causal attention: which kernel, which tile, and its launch.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::CudaFunction;

use super::Precision;
use super::device::{Device, Shape, arguments, launch, to_i32, to_i64, to_u32};
use super::sources::{HEAD_DIMS, MmaTile, Unit};
use super::tensor_map::{HeadRows, TensorMap};
use crate::ops::OpsError;

/// Rows of queries per block of the warp-group kernel.
const WGMMA_TILE_M: usize = 128;
/// Threads of its block: one producer and two consumer warp groups.
const WGMMA_THREADS: u32 = 384;

/// A kernel to run attention with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Variant {
    /// `mma.sync`, any GPU from sm_80 on.
    Mma(MmaTile),
    /// Warp groups, sm_90a.
    Wgmma {
        /// The two consumers take turns.
        pingpong: bool,
    },
}

impl Variant {
    /// What to run on a device. On Hopper the warp-group kernel won every length measured at head dimension 128 (H200,
    /// 2,048 to 131,072 tokens: 450 to 710 TFLOP/s against 230 to 380), and without turns it was as fast as with them
    /// or faster; it has no other head dimensions than 64 and 128.
    pub(super) fn choose(capability: (u32, u32), head_dim: usize, shared_bytes: usize) -> Self {
        if capability == (9, 0) && matches!(head_dim, 64 | 128) {
            Self::Wgmma { pingpong: false }
        } else {
            Self::Mma(MmaTile::choose(head_dim, shared_bytes))
        }
    }
}

/// One attention call; strides in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Problem {
    /// First query: row 0 of head 0.
    pub(super) q: u64,
    /// Elements between rows of queries.
    pub(super) q_row_stride: usize,
    /// Keys of the layer, `[n_kv_heads, capacity, head_dim]`.
    pub(super) k: u64,
    /// Values, same shape.
    pub(super) v: u64,
    /// Output `[q_len, n_heads * head_dim]`.
    pub(super) out: u64,
    /// Queries.
    pub(super) q_len: usize,
    /// Position of the first query; keys `0..q_start + q_len` are in the cache.
    pub(super) q_start: usize,
    /// Query heads.
    pub(super) n_heads: usize,
    /// Key heads.
    pub(super) n_kv_heads: usize,
    /// Elements per head.
    pub(super) head_dim: usize,
    /// Tokens per plane of the cache.
    pub(super) capacity_tokens: usize,
    /// Keys a query sees, itself included; 0 for all.
    pub(super) window: usize,
}

/// Loaded attention kernels.
pub(super) struct Attention {
    device: Arc<Device>,
    precision: Precision,
    loaded: HashMap<(Variant, usize), CudaFunction>,
}

#[repr(C)]
struct MmaParams {
    q: u64,
    k: u64,
    v: u64,
    out: u64,
    q_row_stride: i64,
    q_head_stride: i64,
    kv_row_stride: i64,
    kv_head_stride: i64,
    out_row_stride: i64,
    out_head_stride: i64,
    q_len: i32,
    q_start: i32,
    n_heads: i32,
    group: i32,
    window: i32,
    scale_log2: f32,
}

#[repr(C)]
struct WgmmaParams {
    out: u64,
    out_row_stride: i64,
    out_head_stride: i64,
    q_len: i32,
    q_start: i32,
    group: i32,
    window: i32,
    scale_log2: f32,
}

impl Attention {
    pub(super) fn new(device: &Arc<Device>, precision: Precision) -> Self {
        Self { device: device.clone(), precision, loaded: HashMap::new() }
    }

    /// Loads the kernel that [`Attention::run`] will use, so that the first request does not wait for the compiler.
    pub(super) fn prepare(&mut self, head_dim: usize) -> Result<(), OpsError> {
        let variant = self.variant(head_dim);
        self.function(variant, head_dim).map(drop)
    }

    /// Runs the variant chosen for this device.
    pub(super) fn run(&mut self, problem: &Problem) -> Result<(), OpsError> {
        self.run_variant(self.variant(problem.head_dim), problem)
    }

    /// Runs a given variant.
    pub(super) fn run_variant(&mut self, variant: Variant, problem: &Problem) -> Result<(), OpsError> {
        check(problem)?;
        let function = self.function(variant, problem.head_dim)?;
        match variant {
            Variant::Mma(tile) => self.run_mma(&function, tile, problem),
            Variant::Wgmma { .. } => self.run_wgmma(&function, problem),
        }
    }

    fn variant(&self, head_dim: usize) -> Variant {
        Variant::choose(self.device.facts.capability, head_dim, self.device.facts.shared_bytes_per_block)
    }

    fn function(&mut self, variant: Variant, head_dim: usize) -> Result<CudaFunction, OpsError> {
        if let Some(function) = self.loaded.get(&(variant, head_dim)) {
            return Ok(function.clone());
        }
        if !HEAD_DIMS.contains(&head_dim) {
            return Err(OpsError::Unsupported(format!("attention with head dimension {head_dim}")));
        }
        let (unit, name) = match variant {
            Variant::Mma(tile) => (Unit::attention_mma(self.precision, head_dim, tile), "attention_mma"),
            Variant::Wgmma { pingpong } => {
                (Unit::attention_wgmma(self.precision, head_dim, pingpong), "attention_wgmma")
            }
        };
        let function = self
            .device
            .kernels(&unit, &[name], shared_bytes(variant, head_dim))?
            .pop()
            .ok_or_else(|| OpsError::Device("attention kernel missing".into()))?;
        self.loaded.insert((variant, head_dim), function.clone());
        Ok(function)
    }

    fn run_mma(&self, function: &CudaFunction, tile: MmaTile, p: &Problem) -> Result<(), OpsError> {
        let params = MmaParams {
            q: p.q,
            k: p.k,
            v: p.v,
            out: p.out,
            q_row_stride: to_i64(p.q_row_stride),
            q_head_stride: to_i64(p.head_dim),
            kv_row_stride: to_i64(p.head_dim),
            kv_head_stride: to_i64(p.capacity_tokens * p.head_dim),
            out_row_stride: to_i64(p.n_heads * p.head_dim),
            out_head_stride: to_i64(p.head_dim),
            q_len: to_i32(p.q_len),
            q_start: to_i32(p.q_start),
            n_heads: to_i32(p.n_heads),
            group: to_i32(p.n_heads / p.n_kv_heads),
            window: to_i32(p.window),
            scale_log2: scale_log2(p.head_dim),
        };
        let shape = Shape {
            grid: (to_u32(p.n_heads), to_u32(p.q_len.div_ceil(tile.m)), 1),
            block: to_u32(tile.warps * 32),
            shared_bytes: to_u32(tile.shared_bytes(p.head_dim)),
        };
        // SAFETY: the struct mirrors the kernel's parameter; addresses and sizes were checked against the buffers.
        unsafe { launch(&self.device.compute, function, shape, arguments![params]) }
    }

    fn run_wgmma(&self, function: &CudaFunction, p: &Problem) -> Result<(), OpsError> {
        let queries = HeadRows {
            address: p.q,
            heads: p.n_heads,
            rows: p.q_len,
            head_dim: p.head_dim,
            row_stride: p.q_row_stride,
            head_stride: p.head_dim,
        };
        let keys = HeadRows {
            address: p.k,
            heads: p.n_kv_heads,
            rows: p.q_start + p.q_len,
            head_dim: p.head_dim,
            row_stride: p.head_dim,
            head_stride: p.capacity_tokens * p.head_dim,
        };
        let q_map = TensorMap::new(queries, self.precision)?;
        let k_map = TensorMap::new(keys, self.precision)?;
        let v_map = TensorMap::new(HeadRows { address: p.v, ..keys }, self.precision)?;
        let params = WgmmaParams {
            out: p.out,
            out_row_stride: to_i64(p.n_heads * p.head_dim),
            out_head_stride: to_i64(p.head_dim),
            q_len: to_i32(p.q_len),
            q_start: to_i32(p.q_start),
            group: to_i32(p.n_heads / p.n_kv_heads),
            window: to_i32(p.window),
            scale_log2: scale_log2(p.head_dim),
        };
        let shape = Shape {
            grid: (to_u32(p.n_heads), to_u32(p.q_len.div_ceil(WGMMA_TILE_M)), 1),
            block: WGMMA_THREADS,
            shared_bytes: to_u32(shared_bytes(Variant::Wgmma { pingpong: false }, p.head_dim)),
        };
        // SAFETY: the three maps and the struct mirror the kernel's parameters; sizes were checked by the caller.
        unsafe { launch(&self.device.compute, function, shape, arguments![q_map, k_map, v_map, params]) }
    }
}

fn check(p: &Problem) -> Result<(), OpsError> {
    let whole_groups = p.n_kv_heads > 0 && p.n_heads.is_multiple_of(p.n_kv_heads);
    if p.q_len == 0 || !whole_groups || p.q_start + p.q_len > p.capacity_tokens {
        return Err(OpsError::Shape(format!("attention over {p:?}")));
    }
    Ok(())
}

/// Dynamic shared memory; the warp-group kernel rounds its start up to 1,024 bytes.
fn shared_bytes(variant: Variant, head_dim: usize) -> usize {
    match variant {
        Variant::Mma(tile) => tile.shared_bytes(head_dim),
        Variant::Wgmma { .. } => 5 * (head_dim / 64) * 128 * 128 + 1024,
    }
}

/// Softmax scale for powers of two: `log2(e) / sqrt(head_dim)`.
fn scale_log2(head_dim: usize) -> f32 {
    (std::f64::consts::LOG2_E / (head_dim as f64).sqrt()) as f32
}
