//! [`Ops`] on a GPU.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::cast_slice;
use cudarc::driver::CudaFunction;
use half::{bf16, f16};
use shared::weights::HostTensor;

use super::attention::{Attention, Problem};
use super::device::{Device, DeviceFacts, Shape, arguments, device_error, launch, to_i32};
use super::egress::Egress;
use super::elementwise::{Elementwise, Format, Planes, RopeAppend};
use super::gemm::{Gemm, Product};
use super::memory::{DeviceMemory, Ledger};
use super::pinned::PinnedPool;
use super::profile::{Profile, Stage};
use super::sources::Unit;
use super::staging::StagingRing;
use super::weights::{Linear, Matrix, Stored, Weight};
use super::{CudaOptions, Precision};
use crate::ops::{At, CacheShape, Chunk, Emit, Heads, HostLinear, Ops, OpsError, Sink};

/// Block size that cuts nothing.
const ONE_PIECE: usize = i32::MAX as usize;

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
    quantize: Option<CudaFunction>,
    quantized: Option<(DeviceMemory, DeviceMemory)>,
    ids: Option<DeviceMemory>,
    table: Option<RopeTable>,
    pub(super) egress: Egress,
    pub(super) profile: Option<Profile>,
    next_rope: u64,
}

/// An activation buffer, `[rows, columns]`. Elements, except for the residual stream, which is f32.
pub struct Buffer {
    memory: DeviceMemory,
    format: Format,
    rows: usize,
    columns: usize,
}

/// Rotary frequencies.
pub struct Rope {
    id: u64,
    inv_freq: DeviceMemory,
    half_dim: usize,
}

/// Keys and values of a sequence: `[layer][keys | values][n_kv_heads][capacity][head_dim]` elements.
pub struct Cache {
    memory: DeviceMemory,
    shape: CacheShape,
}

/// Tokens of every layer, `[layer][keys | values][n_kv_heads][tokens][head_dim]` elements, on the device.
pub struct Saved {
    memory: DeviceMemory,
    tokens: usize,
}

/// Cosines and sines of the running chunk.
struct RopeTable {
    memory: DeviceMemory,
    holds: Option<(u64, Chunk)>,
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
    fn product(
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
}

impl Buffer {
    fn check(&self, chunk: Chunk, columns: usize, format: Format) -> Result<u64, OpsError> {
        if chunk.tokens > self.rows || columns != self.columns || format != self.format {
            return Err(OpsError::Shape(format!(
                "{} rows of {columns} {format:?} asked of a buffer of {} rows of {} {:?}",
                chunk.tokens, self.rows, self.columns, self.format
            )));
        }
        Ok(self.memory.address())
    }
}

impl Cache {
    /// Planes of a layer's keys followed by its values.
    fn layer(&self, layer: usize, tokens: &Range<usize>) -> Result<Planes, OpsError> {
        if layer >= self.shape.n_layers
            || tokens.start > tokens.end
            || tokens.end > self.shape.capacity_tokens
        {
            return Err(OpsError::Shape(format!(
                "layer {layer}, tokens {tokens:?} of a cache of {:?}",
                self.shape
            )));
        }
        let heads = 2 * self.shape.n_kv_heads;
        let plane = self.shape.capacity_tokens * self.shape.head_dim * 2;
        Ok(Planes { address: self.memory.address() + (layer * heads * plane) as u64, heads, ..self.planes() })
    }

    /// Every plane of every layer.
    fn planes(&self) -> Planes {
        Planes {
            address: self.memory.address(),
            heads: self.shape.n_layers * 2 * self.shape.n_kv_heads,
            capacity_tokens: self.shape.capacity_tokens,
            head_dim: self.shape.head_dim,
        }
    }

    /// Addresses of a layer's keys and of its values.
    fn parts(&self, layer: usize, tokens: &Range<usize>) -> Result<(u64, u64), OpsError> {
        let planes = self.layer(layer, tokens)?;
        let half = self.shape.n_kv_heads * planes.capacity_tokens * planes.head_dim * 2;
        Ok((planes.address, planes.address + half as u64))
    }
}

impl Ops for CudaOps {
    type Weight = Weight;
    type Buffer = Buffer;
    type Rope = Rope;
    type Cache = Cache;
    type Saved = Saved;

    fn describe(&self) -> String {
        let facts = &self.device.facts;
        format!("cuda ({}, {}, {:?})", facts.name, facts.architecture, self.options.precision).to_lowercase()
    }

    fn preferred_chunk_tokens(&self) -> usize {
        self.options.chunk_tokens
    }

    fn upload_linear(&mut self, linear: HostLinear) -> Result<Weight, OpsError> {
        self.store_linear(linear)
    }

    fn upload_norm(&mut self, weight: HostTensor) -> Result<Weight, OpsError> {
        self.store_norm(&weight)
    }

    fn upload_embedding(&mut self, table: HostTensor) -> Result<Weight, OpsError> {
        self.store_embedding(&table)
    }

    fn upload_rope(&mut self, inv_freq: &[f32]) -> Result<Rope, OpsError> {
        if inv_freq.is_empty() || inv_freq.len() % 8 != 0 {
            return Err(OpsError::Unsupported(format!("rotation over {} pairs", inv_freq.len())));
        }
        self.attention.prepare(inv_freq.len() * 2)?;
        let memory = self.memory("rotary frequencies", inv_freq.len() * 4)?;
        memory.write(0, cast_slice(inv_freq))?;
        self.next_rope += 1;
        Ok(Rope { id: self.next_rope, inv_freq: memory, half_dim: inv_freq.len() })
    }

    fn buffer(&mut self, rows: usize, columns: usize) -> Result<Buffer, OpsError> {
        let memory = self.memory("activations", rows * columns * 2)?;
        Ok(Buffer { memory, format: self.element, rows, columns })
    }

    fn cache(&mut self, shape: CacheShape) -> Result<Cache, OpsError> {
        let values = shape.n_layers * 2 * shape.n_kv_heads * shape.capacity_tokens * shape.head_dim;
        Ok(Cache { memory: self.memory("keys and values", values * 2)?, shape })
    }

    fn save(&mut self, cache: &Cache, tokens: Range<usize>) -> Result<Saved, OpsError> {
        cache.layer(0, &tokens)?;
        let planes = cache.planes();
        let memory =
            self.memory("saved keys and values", planes.heads * tokens.len() * planes.head_dim * 2)?;
        self.kernels.pack_pieces(memory.address(), planes, &tokens, ONE_PIECE, self.element)?;
        Ok(Saved { memory, tokens: tokens.len() })
    }

    fn restore(&mut self, saved: &Saved, cache: &mut Cache, at: usize) -> Result<(), OpsError> {
        cache.layer(0, &(at..at + saved.tokens))?;
        let planes = cache.planes();
        if planes.heads * saved.tokens * planes.head_dim * 2 != saved.memory.bytes() {
            return Err(OpsError::Shape("saved tokens are of another model".into()));
        }
        self.kernels.restore_cache(planes, saved.memory.address(), at, saved.tokens)
    }

    fn saved_bytes(&self, saved: &Saved) -> usize {
        saved.memory.bytes()
    }

    fn embed(&mut self, table: &Weight, tokens: &[u32], out: &mut Buffer) -> Result<(), OpsError> {
        let Stored::Embedding { memory, format, vocab, hidden } = &table.0 else {
            return Err(OpsError::Shape("not an embedding table".into()));
        };
        if tokens.len() > out.rows || *hidden != out.columns {
            return Err(OpsError::Shape(format!(
                "{} tokens of {hidden} into {} rows",
                tokens.len(),
                out.rows
            )));
        }
        if out.format != Format::F32 {
            // The buffer that takes embeddings is the residual stream: from now on it is f32.
            out.memory = self.memory("residual stream", out.rows * out.columns * 4)?;
            out.format = Format::F32;
        }
        if self.ids.as_ref().is_none_or(|ids| ids.bytes() < tokens.len() * 4) {
            self.ids = Some(self.memory("token ids", out.rows * 4)?);
        }
        let Some(ids) = &self.ids else { return Err(OpsError::Device("no memory for token ids".into())) };
        ids.write(0, cast_slice(tokens))?;
        let (target, ids, table) = (out.memory.address(), ids.address(), (memory.address(), *format));
        self.staged(Stage::Other, |ops| ops.kernels.embed(target, table, ids, tokens.len(), *hidden, *vocab))
    }

    fn rms_norm(
        &mut self,
        chunk: Chunk,
        x: &Buffer,
        weight: &Weight,
        eps: f32,
        out: &mut Buffer,
    ) -> Result<(), OpsError> {
        let Stored::Norm { memory, columns } = &weight.0 else {
            return Err(OpsError::Shape("not a norm weight".into()));
        };
        let source = x.check(chunk, *columns, Format::F32)?;
        let target = out.check(chunk, *columns, self.element)?;
        self.staged(Stage::Other, |ops| {
            ops.kernels.rms_norm(source, 0, memory.address(), target, chunk.tokens, *columns, eps)
        })
    }

    fn linear(
        &mut self,
        chunk: Chunk,
        weight: &Weight,
        x: &Buffer,
        accumulate: bool,
        out: &mut Buffer,
    ) -> Result<(), OpsError> {
        let Stored::Linear(linear) = &weight.0 else {
            return Err(OpsError::Shape("not a linear layer".into()));
        };
        let source = x.check(chunk, linear.columns, self.element)?;
        // The last layer's projection is narrower than the buffer: its rows lie densely at the front.
        if chunk.tokens > out.rows || linear.rows > out.columns {
            return Err(OpsError::Shape(format!("{} rows of {} do not fit", chunk.tokens, linear.rows)));
        }
        let out_f32 = out.format == Format::F32;
        let target = out.memory.address();
        self.staged(Stage::Product, |ops| {
            ops.product(linear, source, target, chunk.tokens, out_f32, accumulate)
        })
    }

    fn rope_append(
        &mut self,
        at: At,
        heads: Heads,
        rope: &Rope,
        qkv: &mut Buffer,
        cache: &mut Cache,
    ) -> Result<(), OpsError> {
        let tokens = at.chunk.offset_tokens..at.chunk.end();
        let (keys, values) = cache.parts(at.layer, &tokens)?;
        let shape = cache.shape;
        let fits = heads.columns() <= qkv.columns && at.chunk.tokens <= qkv.rows;
        if !fits
            || rope.half_dim * 2 != heads.head_dim
            || heads.n_kv_heads != shape.n_kv_heads
            || heads.head_dim != shape.head_dim
        {
            return Err(OpsError::Shape(format!("{heads:?} against {shape:?} and {} pairs", rope.half_dim)));
        }
        let table = self.staged(Stage::Other, |ops| ops.rope_table(rope, at.chunk))?;
        let append = RopeAppend {
            qkv: qkv.memory.address(),
            keys,
            values,
            table,
            tokens: at.chunk.tokens,
            start: at.chunk.offset_tokens,
            q_heads: heads.n_heads,
            kv_heads: heads.n_kv_heads,
            head_dim: heads.head_dim,
            capacity_tokens: shape.capacity_tokens,
        };
        self.staged(Stage::Other, |ops| ops.kernels.rope_append(append))
    }

    fn attention(
        &mut self,
        at: At,
        heads: Heads,
        window_tokens: Option<usize>,
        qkv: &Buffer,
        cache: &Cache,
        out: &mut Buffer,
    ) -> Result<(), OpsError> {
        let (k, v) = cache.parts(at.layer, &(0..at.chunk.end()))?;
        let q = qkv.check(at.chunk, heads.columns(), self.element)?;
        let target = out.check(at.chunk, heads.n_heads * heads.head_dim, self.element)?;
        let problem = Problem {
            q,
            q_row_stride: heads.columns(),
            k,
            v,
            out: target,
            q_len: at.chunk.tokens,
            q_start: at.chunk.offset_tokens,
            n_heads: heads.n_heads,
            n_kv_heads: heads.n_kv_heads,
            head_dim: heads.head_dim,
            capacity_tokens: cache.shape.capacity_tokens,
            window: window_tokens.unwrap_or(0),
        };
        self.staged(Stage::Attention, |ops| ops.attention.run(&problem))
    }

    fn swiglu(&mut self, chunk: Chunk, gate_up: &Buffer, out: &mut Buffer) -> Result<(), OpsError> {
        let inner = out.columns;
        let source = gate_up.check(chunk, 2 * inner, self.element)?;
        let target = out.check(chunk, inner, self.element)?;
        self.staged(Stage::Other, |ops| ops.kernels.swiglu(target, source, chunk.tokens, inner))
    }

    fn emit(&mut self, what: Emit, cache: &Cache, sink: &Arc<dyn Sink>) -> Result<(), OpsError> {
        let planes = cache.layer(what.slot, &what.tokens)?;
        let format = Format::from(what.dtype);
        let token_bytes = planes.heads * planes.head_dim * format.bytes();
        for tokens in self.egress.portions(&what, token_bytes) {
            let staged = self.egress.reserve(tokens.len() * token_bytes)?;
            self.staged(Stage::Reconstruction, |ops| {
                ops.kernels.pack_pieces(staged.address(), planes, &tokens, what.block_tokens, format)
            })?;
            self.egress.send(staged, Emit { tokens, ..what.clone() }, token_bytes, sink)?;
        }
        Ok(())
    }

    fn read(&mut self, chunk: Chunk, x: &Buffer) -> Result<Vec<f32>, OpsError> {
        let values = chunk.tokens.min(x.rows) * x.columns;
        let mut bytes = vec![0u8; values * x.format.bytes()];
        x.memory.read(0, &mut bytes)?;
        Ok(widen(&bytes, x.format))
    }

    fn write(&mut self, chunk: Chunk, values: &[f32], out: &mut Buffer) -> Result<(), OpsError> {
        if values.len() != chunk.tokens * out.columns || chunk.tokens > out.rows {
            return Err(OpsError::Shape(format!(
                "{} values for {} rows of {}",
                values.len(),
                chunk.tokens,
                out.columns
            )));
        }
        let wide = self.memory("values from the host", values.len() * 4)?;
        wide.write(0, cast_slice(values))?;
        self.kernels.cast((out.memory.address(), out.format), (wide.address(), Format::F32), values.len())
    }

    fn synchronize(&mut self) -> Result<(), OpsError> {
        let computed = self.finish_computing();
        self.egress.drain().and(computed)
    }
}

impl CudaOps {
    /// The table of a chunk, computed when the chunk or the frequencies change.
    fn rope_table(&mut self, rope: &Rope, chunk: Chunk) -> Result<u64, OpsError> {
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

/// Values of a buffer's bytes.
pub(super) fn widen(bytes: &[u8], format: Format) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match format {
        Format::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Format::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Format::Bf16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
    }
}
