//! A llama model's tensors in a GGUF file.

use super::header::{GgufFile, GgufTensor};
use super::names::{Role, role};
use crate::weights::{FloatVec, HostTensor, TensorInfo, TensorSource, WeightsError};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tensors of a GGUF file under canonical names, query and key rows in half-split rotary order.
#[derive(Debug)]
pub struct GgufSource {
    file: Arc<GgufFile>,
    tensors: BTreeMap<String, Entry>,
    head_dim: usize,
}

#[derive(Debug)]
struct Entry {
    tensor: GgufTensor,
    interleaved: bool,
}

impl GgufSource {
    /// Map the names of an opened file. `head_dim` is the width of one attention head.
    ///
    /// # Errors
    /// [`WeightsError::Unexpected`] names a tensor no llama model has.
    pub(crate) fn new(file: Arc<GgufFile>, head_dim: usize) -> Result<Self, WeightsError> {
        let mut tensors = BTreeMap::new();
        for (gguf_name, tensor) in file.tensors() {
            match role(gguf_name) {
                Role::Weight { name, interleaved } => {
                    tensors.insert(name, Entry { tensor: tensor.clone(), interleaved });
                }
                Role::RopeFactors => {}
                Role::Unknown => return Err(WeightsError::Unexpected { tensor: gguf_name.clone() }),
            }
        }
        Ok(Self { file, tensors, head_dim })
    }
}

impl TensorSource for GgufSource {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let Entry { tensor, .. } = self.tensors.get(name)?;
        Some(TensorInfo { shape: tensor.shape.clone(), format: tensor.format.tensor_format() })
    }

    fn stored_bytes(&self, name: &str) -> Option<u64> {
        self.tensors.get(name).map(|entry| entry.tensor.len_bytes())
    }

    fn load(&self, name: &str) -> Result<HostTensor, WeightsError> {
        let missing = || WeightsError::Missing { tensor: name.to_owned() };
        let Entry { tensor, interleaved } = self.tensors.get(name).ok_or_else(missing)?;
        let bytes = self.file.read(tensor)?;
        let decoded = tensor
            .format
            .decode(tensor.shape.clone(), &bytes)
            .and_then(|t| if *interleaved { split_halves(t, self.head_dim) } else { Ok(t) });
        decoded.map_err(|reason| WeightsError::Quantization { tensor: name.to_owned(), reason })
    }
}

/// Undo llama.cpp's interleaving of rotary pairs: row `2i + j` of a head becomes row `j · head_dim / 2 + i`.
fn split_halves(tensor: HostTensor, head_dim: usize) -> Result<HostTensor, String> {
    let rows = tensor.shape().first().copied().unwrap_or(0);
    if head_dim == 0 || !head_dim.is_multiple_of(2) || !rows.is_multiple_of(head_dim) || rows == 0 {
        return Err(format!("{rows} rows are not whole heads of {head_dim}"));
    }
    let floats = |v: FloatVec| match v {
        FloatVec::F32(v) => FloatVec::F32(reorder(&v, rows, head_dim)),
        FloatVec::F16(v) => FloatVec::F16(reorder(&v, rows, head_dim)),
        FloatVec::BF16(v) => FloatVec::BF16(reorder(&v, rows, head_dim)),
    };
    Ok(match tensor {
        HostTensor::F32 { shape, data } => HostTensor::F32 { shape, data: reorder(&data, rows, head_dim) },
        HostTensor::F16 { shape, data } => HostTensor::F16 { shape, data: reorder(&data, rows, head_dim) },
        HostTensor::BF16 { shape, data } => HostTensor::BF16 { shape, data: reorder(&data, rows, head_dim) },
        HostTensor::Affine { shape, bits, group_size, packed, scales, biases } => HostTensor::Affine {
            shape,
            bits,
            group_size,
            packed: reorder(&packed, rows, head_dim),
            scales: floats(scales),
            biases: floats(biases),
        },
    })
}

fn reorder<T: Copy>(data: &[T], rows: usize, head_dim: usize) -> Vec<T> {
    let row = data.len() / rows;
    let half = head_dim / 2;
    let mut out = Vec::with_capacity(data.len());
    for head in data.chunks_exact(row * head_dim) {
        for pair_member in 0..2 {
            for pair in 0..half {
                let at = (2 * pair + pair_member) * row;
                out.extend_from_slice(&head[at..at + row]);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_become_halves() {
        let shape = vec![8, 1];
        // Two heads of 4: stored order is (first half, second half) pairs.
        let stored = HostTensor::F32 { shape: shape.clone(), data: vec![0., 2., 1., 3., 10., 12., 11., 13.] };
        let split = split_halves(stored, 4).unwrap();
        assert_eq!(split, HostTensor::F32 { shape, data: vec![0., 1., 2., 3., 10., 11., 12., 13.] });
    }

    #[test]
    fn partial_heads_are_refused() {
        let tensor = HostTensor::F32 { shape: vec![6], data: vec![0.; 6] };
        assert!(split_halves(tensor, 4).is_err());
    }
}
