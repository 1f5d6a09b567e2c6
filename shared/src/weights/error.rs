//! Why tensors could not be had.

use std::path::PathBuf;

/// Failures of reading weights. Every variant that concerns a tensor names it.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The operating system refused a read.
    #[error("{path}: {source}")]
    Io {
        /// File that was read.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The container's structure is damaged.
    #[error("{path}: {reason}")]
    Malformed {
        /// Damaged file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor is stored in a format no engine reads.
    #[error("tensor {tensor}: unsupported dtype {dtype}")]
    UnsupportedDtype {
        /// Canonical name, or the container's when it has no canonical one.
        tensor: String,
        /// Name of the dtype in the container.
        dtype: String,
    },
    /// The model needs a tensor that is not there.
    #[error("tensor {tensor} is missing")]
    Missing {
        /// Canonical name.
        tensor: String,
    },
    /// There is a tensor the architecture has no use for.
    #[error("tensor {tensor} does not belong to this architecture")]
    Unexpected {
        /// Name in the container.
        tensor: String,
    },
    /// A tensor has another shape than the configuration implies.
    #[error("tensor {tensor} has shape {found:?}, the configuration needs {expected:?}")]
    Shape {
        /// Canonical name.
        tensor: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape the configuration implies.
        expected: Vec<usize>,
    },
    /// A tensor's bytes end before its shape does, or lie outside the file.
    #[error("tensor {tensor} is short: needs {needed_bytes} bytes, the file has {found_bytes}")]
    Short {
        /// Canonical name.
        tensor: String,
        /// Bytes its shape needs.
        needed_bytes: u64,
        /// Bytes that are there.
        found_bytes: u64,
    },
    /// A quantized tensor's parts do not fit together.
    #[error("tensor {tensor}: {reason}")]
    Quantization {
        /// Canonical name.
        tensor: String,
        /// What does not fit.
        reason: String,
    },
}
