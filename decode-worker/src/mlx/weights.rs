//! Weights in MLX: dense or group-quantized projections and the embedding table.

use mlx_rs::{Array, ops};
use shared::layout::Dtype;
use shared::weights::{FloatVec, HostTensor, TensorSource, WeightsError};

use super::MlxError;
use super::host::{dim, mlx_dtype};

/// Reads weights in the precision the engine computes in.
pub(super) struct Loader<'a> {
    pub(super) source: &'a dyn TensorSource,
    pub(super) compute: Dtype,
    /// Whether group-quantized weights stay packed; otherwise they are expanded once, here.
    pub(super) keep_quantized: bool,
}

/// A matrix `[out, in]`.
#[derive(Debug)]
enum Matrix {
    Dense(Array),
    Quantized { packed: Array, scales: Array, biases: Array, group_size: i32, bits: i32 },
}

/// A projection `x · Wᵀ + b`.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Matrix,
    bias: Option<Array>,
}

/// The embedding table, which may serve as the output head too.
#[derive(Debug)]
pub(super) struct Embedding {
    weight: Matrix,
}

impl Loader<'_> {
    /// The projection `<name>.weight`, with `<name>.bias` when `with_bias`.
    pub(super) fn linear(&self, name: &str, with_bias: bool) -> Result<Linear, MlxError> {
        let bias = if with_bias { Some(self.vector(&format!("{name}.bias"))?) } else { None };
        Ok(Linear { weight: self.matrix(&format!("{name}.weight"))?, bias })
    }

    /// The embedding table `<name>.weight`. Its rows are counted here, since MLX gathers rows without looking.
    pub(super) fn embedding(&self, name: &str, vocab_size: usize) -> Result<Embedding, MlxError> {
        let name = format!("{name}.weight");
        let weight = self.matrix(&name)?;
        check_size(&name, weight.rows(), vocab_size)?;
        Ok(Embedding { weight })
    }

    /// A one-dimensional tensor.
    pub(super) fn vector(&self, name: &str) -> Result<Array, MlxError> {
        let tensor = self.source.load(name)?;
        self.dense(name, &tensor)
    }

    fn matrix(&self, name: &str) -> Result<Matrix, MlxError> {
        let tensor = self.source.load(name)?;
        match &tensor {
            HostTensor::Affine { shape, bits, group_size, packed, scales, biases } if self.keep_quantized => {
                let &[rows, columns] = shape.as_slice() else {
                    return Err(not_a_matrix(name, shape));
                };
                let group = *group_size as usize;
                let words = columns * usize::from(*bits) / 32;
                let groups = columns.checked_div(group).unwrap_or(0);
                check_size(name, packed.len(), rows * words)?;
                check_size(name, scales.len(), rows * groups)?;
                check_size(name, biases.len(), rows * groups)?;
                let rows = dim("rows of a weight", rows)?;
                let per_group = [rows, dim("groups of a weight", groups)?];
                let matrix = Matrix::Quantized {
                    packed: Array::from_slice(packed, &[rows, dim("words of a weight", words)?]),
                    scales: self.floats(scales, &per_group)?,
                    biases: self.floats(biases, &per_group)?,
                    group_size: dim("group size", group)?,
                    bits: i32::from(*bits),
                };
                Ok(matrix)
            }
            other => Ok(Matrix::Dense(self.dense(name, other)?)),
        }
    }

    fn dense(&self, name: &str, tensor: &HostTensor) -> Result<Array, MlxError> {
        let shape = tensor.shape();
        let expected = shape.iter().product();
        let sizes = shape.iter().map(|&n| dim("side of a weight", n)).collect::<Result<Vec<_>, _>>()?;
        dim("elements of a weight", expected)?;
        let array = match tensor {
            HostTensor::F32 { data, .. } => {
                check_size(name, data.len(), expected)?;
                Array::from_slice(data, &sizes)
            }
            HostTensor::F16 { data, .. } => {
                check_size(name, data.len(), expected)?;
                Array::from_slice(data, &sizes)
            }
            HostTensor::BF16 { data, .. } => {
                check_size(name, data.len(), expected)?;
                Array::from_slice(data, &sizes)
            }
            HostTensor::Affine { .. } => {
                let data = tensor.to_f32();
                check_size(name, data.len(), expected)?;
                Array::from_slice(&data, &sizes)
            }
        };
        self.converted(&array)
    }

    fn floats(&self, values: &FloatVec, shape: &[i32]) -> Result<Array, MlxError> {
        let array = match values {
            FloatVec::F32(v) => Array::from_slice(v, shape),
            FloatVec::F16(v) => Array::from_slice(v, shape),
            FloatVec::BF16(v) => Array::from_slice(v, shape),
        };
        self.converted(&array)
    }

    /// To the compute precision, evaluated at once so that the stored one is freed before the next tensor is read.
    fn converted(&self, array: &Array) -> Result<Array, MlxError> {
        let array = array.as_dtype(mlx_dtype(self.compute))?;
        array.eval()?;
        Ok(array)
    }
}

impl Linear {
    /// `x [.., in]` to `[.., out]`.
    pub(super) fn forward(&self, x: &Array) -> Result<Array, MlxError> {
        match (&self.weight, &self.bias) {
            (Matrix::Dense(w), Some(bias)) => Ok(ops::addmm(bias, x, w.t(), None, None)?),
            (weight, None) => weight.project(x),
            (weight, Some(bias)) => Ok(weight.project(x)?.add(bias)?),
        }
    }
}

impl Embedding {
    /// Rows of `tokens` (u32 `[1, n]`) as `[1, n, hidden]`. The caller has checked the ids.
    pub(super) fn rows(&self, tokens: &Array) -> Result<Array, MlxError> {
        Ok(match &self.weight {
            Matrix::Dense(w) => w.take_axis(tokens, 0)?,
            Matrix::Quantized { packed, scales, biases, group_size, bits } => ops::dequantize(
                packed.take_axis(tokens, 0)?,
                scales.take_axis(tokens, 0)?,
                Some(&biases.take_axis(tokens, 0)?),
                *group_size,
                *bits,
            )?,
        })
    }

    /// The table as output head: `x [.., hidden]` to logits `[.., vocab]`.
    pub(super) fn project(&self, x: &Array) -> Result<Array, MlxError> {
        self.weight.project(x)
    }
}

impl Matrix {
    fn rows(&self) -> usize {
        let (Self::Dense(w) | Self::Quantized { packed: w, .. }) = self;
        w.shape().first().map_or(0, |&n| n.unsigned_abs() as usize)
    }

    fn project(&self, x: &Array) -> Result<Array, MlxError> {
        Ok(match self {
            Self::Dense(w) => ops::matmul(x, w.t())?,
            Self::Quantized { packed, scales, biases, group_size, bits } => {
                ops::quantized_matmul(x, packed, scales, Some(biases), true, *group_size, *bits)?
            }
        })
    }
}

fn check_size(tensor: &str, found: usize, expected: usize) -> Result<(), MlxError> {
    if found == expected {
        Ok(())
    } else {
        Err(MlxError::TensorSize { tensor: tensor.to_owned(), found, expected })
    }
}

fn not_a_matrix(name: &str, shape: &[usize]) -> MlxError {
    let reason = format!("a quantized weight needs two dimensions, this one has shape {shape:?}");
    MlxError::Weights(WeightsError::Quantization { tensor: name.to_owned(), reason })
}
