//! Arrays that a worker wrote down (safetensors).

use super::VerifyError;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

/// One file, in memory.
pub(super) struct Dump {
    name: String,
    bytes: Vec<u8>,
}

/// One array: its raw bytes and the same values in f32.
pub(super) struct DumpedArray {
    pub(super) shape: Vec<usize>,
    pub(super) raw: Vec<u8>,
    pub(super) values: Vec<f32>,
}

impl Dump {
    /// Reads a file.
    ///
    /// # Errors
    /// [`VerifyError::File`].
    pub(super) fn open(path: &Path) -> Result<Self, VerifyError> {
        let bytes =
            std::fs::read(path).map_err(|source| VerifyError::File { path: path.to_owned(), source })?;
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        Ok(Self { name, bytes })
    }

    /// One array by name.
    ///
    /// # Errors
    /// [`VerifyError::Dump`] when it is absent or of a type that caches do not have.
    pub(super) fn array(&self, name: &str) -> Result<DumpedArray, VerifyError> {
        let wrong = |message: String| VerifyError::Dump { file: self.name.clone(), message };
        let tensors = SafeTensors::deserialize(&self.bytes).map_err(|e| wrong(e.to_string()))?;
        let view = tensors.tensor(name).map_err(|e| wrong(format!("{name}: {e}")))?;
        let raw = view.data();
        let (pairs, _) = raw.as_chunks::<2>();
        let (quads, _) = raw.as_chunks::<4>();
        let values = match view.dtype() {
            Dtype::F32 => quads.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::F16 => pairs.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => pairs.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => return Err(wrong(format!("{name} is {other:?}"))),
        };
        Ok(DumpedArray { shape: view.shape().to_vec(), raw: raw.to_vec(), values })
    }

    /// The first-token logits.
    ///
    /// # Errors
    /// [`VerifyError::Dump`].
    pub(super) fn logits(&self) -> Result<Vec<f32>, VerifyError> {
        self.array("logits").map(|a| a.values)
    }

    /// An error about this file.
    pub(super) fn wrong(&self, message: String) -> VerifyError {
        VerifyError::Dump { file: self.name.clone(), message }
    }
}
