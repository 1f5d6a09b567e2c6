//! Weights on the device.

use std::sync::Arc;

use bytemuck::cast_slice;
use shared::weights::{FloatVec, HostTensor};

use super::Precision;
use super::backend::CudaOps;
use super::elementwise::{Format, PackedMatrix};
use super::gemm::Kind;
use super::memory::DeviceMemory;
use crate::ops::{HostLinear, OpsError};

/// An uploaded weight.
pub struct Weight(pub(super) Stored);

/// How it lies on the device.
pub(super) enum Stored {
    /// `[rows, columns]` elements.
    Linear(Box<Linear>),
    /// `[columns]` f32.
    Norm { memory: DeviceMemory, columns: usize },
    /// `[vocab, hidden]` in its own format.
    Embedding { memory: DeviceMemory, format: Format, vocab: usize, hidden: usize },
}

/// A linear layer.
pub(super) struct Linear {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) matrix: Matrix,
    /// Bias as elements and as f32, for the two kinds of output.
    pub(super) bias: Option<(DeviceMemory, DeviceMemory)>,
}

/// Its matrix.
pub(super) enum Matrix {
    /// Elements, ready for a product.
    Dense(DeviceMemory),
    /// Quantized parts, expanded before each product into scratch memory.
    Packed(Vec<Packed>),
    /// E4M3 values and one f32 scale per row.
    Fp8 { values: DeviceMemory, scales: DeviceMemory },
}

/// Rows of a matrix in affine quantization.
pub(super) struct Packed {
    packed: DeviceMemory,
    scales: DeviceMemory,
    biases: DeviceMemory,
    scale_format: Format,
    bits: usize,
    group: usize,
    rows: usize,
    columns: usize,
}

impl Packed {
    /// As the kernel takes it.
    pub(super) fn matrix(&self) -> PackedMatrix {
        PackedMatrix {
            packed: self.packed.address(),
            scales: self.scales.address(),
            biases: self.biases.address(),
            scale_format: self.scale_format,
            bits: self.bits,
            group: self.group,
            rows: self.rows,
            columns: self.columns,
        }
    }
}

impl CudaOps {
    /// Uploads a linear layer, expanded where it fits and packed where it does not.
    pub(super) fn store_linear(&mut self, linear: &HostLinear) -> Result<Weight, OpsError> {
        let (rows, columns) = shape(linear)?;
        let bias = self.store_bias(&linear.biases, rows)?;
        let can_pack = linear.weights.iter().all(|w| matches!(w, HostTensor::Affine { .. }));
        let packed =
            |ops: &Self| linear.weights.iter().map(|w| ops.upload_packed(w)).collect::<Result<Vec<_>, _>>();
        let matrix = if can_pack && self.options.keep_packed {
            Matrix::Packed(packed(self)?)
        } else {
            match self.upload_dense(&linear.weights, rows, columns) {
                Ok(memory) => self.finish_dense(memory, rows, columns)?,
                Err(OpsError::OutOfMemory { what, bytes }) if can_pack => {
                    tracing::warn!(%what, bytes, "weights stay packed: no room for them expanded");
                    Matrix::Packed(packed(self)?)
                }
                Err(error) => return Err(error),
            }
        };
        if let Matrix::Packed(_) = &matrix {
            self.reserve_expansion(rows * columns * 2)?;
        }
        Ok(Weight(Stored::Linear(Box::new(Linear { rows, columns, matrix, bias }))))
    }

    /// A linear layer of normal random values, for benchmarks.
    pub fn random_linear(
        &mut self,
        rows: usize,
        columns: usize,
        bias: bool,
        seed: u64,
    ) -> Result<Weight, OpsError> {
        let memory = self.memory("random weights", rows * columns * 2)?;
        let deviation = 1.0 / (columns as f32).sqrt();
        self.kernels.fill_normal((memory.address(), self.element), rows * columns, 0.0, deviation, seed)?;
        let zeros = [HostTensor::F32 { shape: vec![rows], data: vec![0.0; rows] }];
        let bias = self.store_bias(if bias { &zeros } else { &[] }, rows)?;
        let matrix = self.finish_dense(memory, rows, columns)?;
        Ok(Weight(Stored::Linear(Box::new(Linear { rows, columns, matrix, bias }))))
    }

    /// A norm weight of ones, for benchmarks.
    pub fn unit_norm(&mut self, columns: usize) -> Result<Weight, OpsError> {
        self.store_norm(&HostTensor::F32 { shape: vec![columns], data: vec![1.0; columns] })
    }

    /// An embedding table of normal random values, for benchmarks.
    pub fn random_embedding(&mut self, vocab: usize, hidden: usize, seed: u64) -> Result<Weight, OpsError> {
        let memory = self.memory("random embedding", vocab * hidden * 2)?;
        self.kernels.fill_normal((memory.address(), self.element), vocab * hidden, 0.0, 1.0, seed)?;
        Ok(Weight(Stored::Embedding { memory, format: self.element, vocab, hidden }))
    }

    pub(super) fn store_norm(&mut self, weight: &HostTensor) -> Result<Weight, OpsError> {
        let values = weight.to_f32();
        let memory = self.uploaded("norm", cast_slice(&values))?;
        Ok(Weight(Stored::Norm { memory, columns: values.len() }))
    }

    /// Keeps the table in a float format that loses nothing of what the file holds.
    pub(super) fn store_embedding(&mut self, table: &HostTensor) -> Result<Weight, OpsError> {
        let &[vocab, hidden] = table.shape() else {
            return Err(OpsError::Shape(format!("embedding table {:?}", table.shape())));
        };
        let (memory, format) = match table {
            HostTensor::F16 { data, .. } => (self.uploaded("embedding", cast_slice(data))?, Format::F16),
            HostTensor::BF16 { data, .. } => (self.uploaded("embedding", cast_slice(data))?, Format::Bf16),
            HostTensor::F32 { .. } | HostTensor::Affine { .. } => {
                (self.uploaded("embedding", cast_slice(&table.to_f32()))?, Format::F32)
            }
        };
        Ok(Weight(Stored::Embedding { memory, format, vocab, hidden }))
    }

    fn store_bias(
        &mut self,
        biases: &[HostTensor],
        rows: usize,
    ) -> Result<Option<(DeviceMemory, DeviceMemory)>, OpsError> {
        if biases.is_empty() {
            return Ok(None);
        }
        let values: Vec<f32> = biases.iter().flat_map(HostTensor::to_f32).collect();
        if values.len() != rows {
            return Err(OpsError::Shape(format!("{} bias values for {rows} rows", values.len())));
        }
        let wide = self.uploaded("bias", cast_slice(&values))?;
        let narrow = self.memory("bias", rows * 2)?;
        self.kernels.cast((narrow.address(), self.element), (wide.address(), Format::F32), rows)?;
        Ok(Some((narrow, wide)))
    }

    fn upload_dense(
        &mut self,
        parts: &[HostTensor],
        rows: usize,
        columns: usize,
    ) -> Result<DeviceMemory, OpsError> {
        let whole = self.memory("weights", rows * columns * 2)?;
        let mut address = whole.address();
        for part in parts {
            let n = part.shape().iter().product::<usize>();
            let out = (address, self.element);
            match part {
                HostTensor::Affine { .. } => {
                    let packed = self.upload_packed(part)?;
                    self.kernels.dequantize(address, packed.matrix())?;
                }
                HostTensor::F32 { data, .. } => self.upload_cast(out, cast_slice(data), Format::F32, n)?,
                HostTensor::F16 { data, .. } => self.upload_cast(out, cast_slice(data), Format::F16, n)?,
                HostTensor::BF16 { data, .. } => self.upload_cast(out, cast_slice(data), Format::Bf16, n)?,
            }
            address += n as u64 * 2;
        }
        Ok(whole)
    }

    /// Freed in stream order, so the source may go while the cast is still queued.
    fn upload_cast(
        &self,
        out: (u64, Format),
        bytes: &[u8],
        format: Format,
        n: usize,
    ) -> Result<(), OpsError> {
        let source = self.uploaded("weights in their own format", bytes)?;
        self.kernels.cast(out, (source.address(), format), n)
    }

    fn upload_packed(&self, tensor: &HostTensor) -> Result<Packed, OpsError> {
        let HostTensor::Affine { shape, bits, group_size, packed, scales, biases } = tensor else {
            return Err(OpsError::Shape("not a quantized tensor".into()));
        };
        let &[rows, columns] = shape.as_slice() else {
            return Err(OpsError::Shape(format!("quantized tensor of shape {shape:?}")));
        };
        let (bits, group) = (usize::from(*bits), *group_size as usize);
        let group_fits = group > 0 && columns % group == 0 && group % (32 / bits.max(1)) == 0;
        if !matches!(bits, 2 | 4 | 8) || !group_fits {
            return Err(OpsError::Unsupported(format!(
                "{bits}-bit weights in groups of {group}, {columns} columns"
            )));
        }
        // Scales and biases may be stored in two formats; one format serves both where they agree.
        let same = std::mem::discriminant(scales) == std::mem::discriminant(biases);
        let (scale_format, scales, biases) = match (scales, biases) {
            (FloatVec::F16(s), FloatVec::F16(b)) => (
                Format::F16,
                self.uploaded("scales", cast_slice(s))?,
                self.uploaded("biases", cast_slice(b))?,
            ),
            (FloatVec::BF16(s), FloatVec::BF16(b)) if same => (
                Format::Bf16,
                self.uploaded("scales", cast_slice(s))?,
                self.uploaded("biases", cast_slice(b))?,
            ),
            (s, b) => (
                Format::F32,
                self.uploaded("scales", cast_slice(&s.to_f32()))?,
                self.uploaded("biases", cast_slice(&b.to_f32()))?,
            ),
        };
        let packed = self.uploaded("packed weights", cast_slice(packed))?;
        Ok(Packed { packed, scales, biases, scale_format, bits, group, rows, columns })
    }

    /// With FP8 a dense matrix is only the way to its quantized form.
    fn finish_dense(
        &mut self,
        memory: DeviceMemory,
        rows: usize,
        columns: usize,
    ) -> Result<Matrix, OpsError> {
        if self.options.precision != Precision::Fp8 {
            return Ok(Matrix::Dense(memory));
        }
        let values = self.memory("FP8 weights", rows * columns)?;
        let scales = self.memory("FP8 scales", rows * 4)?;
        self.quantize_rows(values.address(), scales.address(), memory.address(), rows, columns)?;
        Ok(Matrix::Fp8 { values, scales })
    }

    /// Room for the largest packed matrix, expanded.
    fn reserve_expansion(&mut self, bytes: usize) -> Result<(), OpsError> {
        if self.expansion.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            self.expansion = Some(Arc::new(self.memory("expanded weights", bytes)?));
        }
        Ok(())
    }

    fn uploaded(&self, what: &str, bytes: &[u8]) -> Result<DeviceMemory, OpsError> {
        let memory = self.memory(what, bytes.len())?;
        memory.write(0, bytes)?;
        Ok(memory)
    }

    /// Shape and types of a product with this layer.
    pub(super) fn kind(&self, linear: &Linear, tokens: usize, out_f32: bool, accumulate: bool) -> Kind {
        Kind {
            tokens,
            rows: linear.rows,
            columns: linear.columns,
            out_f32,
            accumulate,
            bias: linear.bias.is_some(),
            fp8: matches!(linear.matrix, Matrix::Fp8 { .. }),
        }
    }
}

/// Rows and columns of the concatenation.
fn shape(linear: &HostLinear) -> Result<(usize, usize), OpsError> {
    let mut rows = 0;
    let mut columns = None;
    for weight in &linear.weights {
        let &[out, input] = weight.shape() else {
            return Err(OpsError::Shape(format!("linear weight of shape {:?}", weight.shape())));
        };
        if *columns.get_or_insert(input) != input {
            return Err(OpsError::Shape("concatenated weights differ in their input width".into()));
        }
        rows += out;
    }
    match columns {
        // Rows of operands and outputs are read 16 bytes at a time.
        Some(columns) if rows % 8 == 0 && columns % 16 == 0 => Ok((rows, columns)),
        _ => Err(OpsError::Unsupported(format!("linear layer of {rows} by {columns:?}"))),
    }
}
