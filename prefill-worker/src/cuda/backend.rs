//! The backend's state and what it does beside [`crate::ops::Ops`].

use std::sync::Arc;

use cudarc::driver::CudaFunction;

use super::attention::Attention;
use super::device::{Device, DeviceFacts, Shape, arguments, device_error, launch, to_i32};
use super::egress::Egress;
use super::elementwise::{Elementwise, Format};
use super::gemm::{Gemm, Product};
use super::handles::{Rope, RopeTable};
use super::memory::{DeviceMemory, Ledger};
use super::pinned::PinnedPool;
use super::profile::Profile;
use super::sources::Unit;
use super::staging::StagingRing;
use super::weights::{Linear, Matrix};
use super::{CudaOptions, Precision};
use crate::ops::{Chunk, OpsError};

/// The CUDA backend.
pub struct CudaOps {
    pub(super) options: CudaOptions,
    pub(super) device: Arc<Device>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) element: Format,
    pub(super) kernels: Elementwise,
    pub(super) attention: Attention,
    pub(super) gemm: Gemm,
    pub(super) expansion: Option<Arc<DeviceMemory>>,
    pub(super) quantize: Option<CudaFunction>,
    pub(super) quantized: Option<(DeviceMemory, DeviceMemory)>,
    pub(super) ids: Option<DeviceMemory>,
    pub(super) table: Option<RopeTable>,
    pub(super) egress: Egress,
    pub(super) profile: Option<Profile>,
    pub(super) next_rope: u64,
}

/// What a run used, for reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Device memory taken now.
    pub device_bytes: usize,
    /// Most device memory taken at once since the last reset.
    pub peak_device_bytes: usize,
    /// Bytes copied to the host so far.
    pub copied_bytes: u64,
}

impl CudaOps {
    pub(super) fn open(options: &CudaOptions) -> Result<Self, OpsError> {
        let device = Device::open(options)?;
        let ledger = Arc::new(Ledger::default());
        let kernels = Elementwise::load(&device, options.precision)?;
        let attention = Attention::new(&device, options.precision);
        let gemm = Gemm::new(&device, &ledger, options.precision, options.workspace_bytes)?;
        let quantize = match options.precision {
            Precision::Fp8 if device.facts.capability < (8, 9) => {
                return Err(OpsError::Unsupported(format!("FP8 on {}", device.facts.architecture)));
            }
            Precision::Fp8 => device.kernels(&Unit::fp8(), &["quantize_rows"], 0)?.pop(),
            Precision::Bf16 | Precision::F16 => None,
        };
        let pool = PinnedPool::new(&device, options.pinned_bytes)?;
        let staging_bytes = options.staging_bytes.min(device.facts.memory_bytes / 64);
        let egress = Egress::new(&device, pool, StagingRing::new(&device, &ledger, staging_bytes)?)?;
        Ok(Self {
            options: options.clone(),
            element: Format::element(options.precision),
            device,
            ledger,
            kernels,
            attention,
            gemm,
            expansion: None,
            quantize,
            quantized: None,
            ids: None,
            table: None,
            egress,
            profile: None,
            next_rope: 0,
        })
    }

    /// What the device says of itself.
    #[must_use]
    pub fn facts(&self) -> &DeviceFacts {
        &self.device.facts
    }

    /// Memory and traffic.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            device_bytes: self.ledger.now_bytes(),
            peak_device_bytes: self.ledger.peak_bytes(),
            copied_bytes: self.egress.copied_bytes(),
        }
    }

    /// Starts a new peak from what is taken now.
    pub fn reset_peak(&mut self) {
        self.ledger.reset_peak();
    }

    /// Waits for computing only, not for pieces on their way out.
    pub fn finish_computing(&mut self) -> Result<(), OpsError> {
        self.device.compute.synchronize().map_err(device_error)
    }

    /// Loads the attention kernel of a head dimension before the first request needs it.
    pub fn prepare_attention(&mut self, head_dim: usize) -> Result<(), OpsError> {
        self.attention.prepare(head_dim)
    }

    pub(super) fn memory(&self, what: &str, bytes: usize) -> Result<DeviceMemory, OpsError> {
        DeviceMemory::new(&self.device, &self.ledger, what, bytes)
    }

    pub(super) fn quantize_rows(
        &self,
        values: u64,
        scales: u64,
        source: u64,
        rows: usize,
        columns: usize,
    ) -> Result<(), OpsError> {
        let Some(function) = &self.quantize else {
            return Err(OpsError::Unsupported("FP8 was not asked for".into()));
        };
        let columns = to_i32(columns);
        // SAFETY: the kernel's parameter types; the callers sized the buffers.
        unsafe {
            launch(
                &self.device.compute,
                function,
                Shape::rows(rows, 256),
                arguments![values, scales, source, columns],
            )
        }
    }

    /// Runs one product of a linear layer on raw addresses.
    pub(super) fn product(
        &mut self,
        linear: &Linear,
        x: u64,
        out: u64,
        tokens: usize,
        out_f32: bool,
        accumulate: bool,
    ) -> Result<(), OpsError> {
        let kind = self.kind(linear, tokens, out_f32, accumulate);
        let bias = match &linear.bias {
            Some((narrow, wide)) => {
                if out_f32 {
                    wide.address()
                } else {
                    narrow.address()
                }
            }
            None => 0,
        };
        let plain = |x, weight| Product { x, weight, out, bias, scales: (0, 0), kind };
        let product = match &linear.matrix {
            Matrix::Dense(memory) => plain(x, memory.address()),
            Matrix::Packed(parts) => {
                let Some(expansion) = self.expansion.clone() else {
                    return Err(OpsError::Device("no memory for expanded weights".into()));
                };
                let mut address = expansion.address();
                for part in parts {
                    let matrix = part.matrix();
                    self.kernels.dequantize(address, matrix)?;
                    address += (matrix.rows * matrix.columns * 2) as u64;
                }
                plain(x, expansion.address())
            }
            Matrix::Fp8 { values, scales } => {
                let (bytes, rows) = (tokens * linear.columns, tokens * 4);
                if self.quantized.as_ref().is_none_or(|(v, s)| v.bytes() < bytes || s.bytes() < rows) {
                    self.quantized = None;
                    self.quantized =
                        Some((self.memory("FP8 activations", bytes)?, self.memory("FP8 scales", rows)?));
                }
                let Some((x8, x_scales)) = &self.quantized else {
                    return Err(OpsError::Device("no memory for FP8 activations".into()));
                };
                self.quantize_rows(x8.address(), x_scales.address(), x, tokens, linear.columns)?;
                Product {
                    scales: (scales.address(), x_scales.address()),
                    ..plain(x8.address(), values.address())
                }
            }
        };
        self.gemm.run(&product)
    }

    /// The table of a chunk, computed when the chunk or the frequencies change.
    pub(super) fn rope_table(&mut self, rope: &Rope, chunk: Chunk) -> Result<u64, OpsError> {
        let bytes = chunk.tokens * rope.half_dim * 8;
        if self.table.as_ref().is_none_or(|table| table.memory.bytes() < bytes) {
            self.table = Some(RopeTable { memory: self.memory("rotations", bytes)?, holds: None });
        }
        let Some(table) = &mut self.table else {
            return Err(OpsError::Device("no memory for rotations".into()));
        };
        if table.holds != Some((rope.id, chunk)) {
            let address = table.memory.address();
            self.kernels.rope_table(
                address,
                rope.inv_freq.address(),
                chunk.offset_tokens,
                rope.half_dim,
                chunk.tokens,
            )?;
            table.holds = Some((rope.id, chunk));
        }
        Ok(table.memory.address())
    }
}
