//! Why a worker refuses.

use serde::{Deserialize, Serialize};

/// An error from a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct WorkerError {
    /// Machine-readable cause.
    pub code: WorkerErrorCode,
    /// For people.
    pub message: String,
}

/// Causes of a worker error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WorkerErrorCode {
    /// The message makes no sense here (unknown request, bad range, token outside the vocabulary).
    InvalidRequest,
    /// Prompt plus answer exceed what the worker can hold.
    TooLong,
    /// More work than the worker accepts.
    Busy,
    /// The client required a bridge and the transfer gave none.
    BridgeRequired,
    /// This decoder's cache cannot be made by this worker.
    Incompatible,
    /// The decoder was introduced but forgotten since, or never was: it must be introduced (again).
    NotPaired,
    /// The transfer failed; the cause is in the message.
    TransferFailed,
    /// The deadline passed.
    Timeout,
    /// The request was cancelled.
    Cancelled,
    /// The engine failed.
    Engine,
}

impl WorkerError {
    /// An error with a message for people.
    pub fn new(code: WorkerErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl WorkerErrorCode {
    /// The snake_case name, as in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::TooLong => "too_long",
            Self::Busy => "busy",
            Self::BridgeRequired => "bridge_required",
            Self::Incompatible => "incompatible",
            Self::NotPaired => "not_paired",
            Self::TransferFailed => "transfer_failed",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::Engine => "engine",
        }
    }
}
