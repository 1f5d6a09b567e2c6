//! Why a model's description was refused.

use std::path::PathBuf;

/// Failures of reading a model's configuration.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// A configuration file could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A configuration file is not JSON.
    #[error("{path}: {source}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why parsing stopped.
        source: serde_json::Error,
    },
    /// No engine runs this architecture.
    #[error("unsupported architecture {0:?} (supported: llama)")]
    UnsupportedArchitecture(String),
    /// No engine knows this rotary scaling.
    #[error("unsupported rope type {0:?} (supported: default, linear, llama3)")]
    UnsupportedRope(String),
    /// No engine knows this weight quantization.
    #[error("unsupported quantization: {0}")]
    UnsupportedQuantization(String),
    /// The model asks for something else that no engine does.
    #[error("unsupported {key}: {value}")]
    Unsupported {
        /// Configuration key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A required key is absent.
    #[error("configuration lacks {0}")]
    Missing(String),
    /// A key has a value that makes no sense.
    #[error("configuration key {key}: {reason}")]
    Invalid {
        /// Configuration key.
        key: String,
        /// What is wrong.
        reason: String,
    },
}
