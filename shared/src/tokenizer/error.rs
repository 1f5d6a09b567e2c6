//! Why a tokenizer was refused.

use crate::weights::WeightsError;
use std::path::PathBuf;

/// Failures of opening or using a tokenizer.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The GGUF file that should hold the vocabulary is damaged.
    #[error(transparent)]
    Container(#[from] WeightsError),
    /// The vocabulary is of a kind that is not supported.
    #[error("unsupported {key} {value:?}")]
    Unsupported {
        /// Metadata key.
        key: &'static str,
        /// Its value.
        value: String,
    },
    /// The GGUF file holds no vocabulary, or only part of one.
    #[error("the model file lacks {0}")]
    Missing(&'static str),
    /// The tokenizer's definition or its use is invalid.
    #[error("tokenizer: {0}")]
    Invalid(String),
}
