//! Why a request got no answer.

use shared::control::{WorkerError, WorkerErrorCode};
use shared::verdict::Verdict;

/// A failed request with the verdict to show.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    /// What went wrong.
    pub(crate) kind: FailureKind,
    /// What the header says.
    pub(crate) verdict: Box<Verdict>,
}

/// What went wrong.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum FailureKind {
    /// No decoder is connected.
    #[error("no decode worker is connected")]
    NoDecodeWorker,
    /// The decoder's connection broke and the request could not be tried again.
    #[error("the decode worker was lost")]
    DecodeWorkerLost,
    /// The client required a bridge.
    #[error("a bridge was required and none was possible: {0}")]
    Refused(String),
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {prompt_tokens} tokens, the model takes {max_tokens} with the answer")]
    TooLong {
        /// Length of the prompt.
        prompt_tokens: u32,
        /// Limit for prompt and answer.
        max_tokens: u32,
    },
    /// A token id the model does not have.
    #[error("token {0} is outside the model's vocabulary")]
    BadToken(u32),
    /// What the answer must look like makes no sense.
    #[error("{message}")]
    BadConstraint {
        /// The parameter that said it.
        param: &'static str,
        /// What the decoder said of it.
        message: String,
    },
    /// A deadline passed.
    #[error("{0} took too long")]
    Timeout(&'static str),
    /// The decoder reported an error.
    #[error("{0}")]
    Worker(WorkerError),
    /// A message that does not belong here.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// The tokenizer's decoder failed.
    #[error("detokenizing failed: {0}")]
    Text(String),
}

impl FailureKind {
    /// Short code for the verdict's reason and the metrics.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::NoDecodeWorker => "no_decode_worker",
            Self::DecodeWorkerLost => "decode_worker_lost",
            Self::Refused(_) => "bridge_required",
            Self::TooLong { .. } => "context_length_exceeded",
            Self::BadToken(_) | Self::BadConstraint { .. } => "invalid_request",
            Self::Timeout(_) => "timeout",
            Self::Worker(error) => match error.code {
                WorkerErrorCode::TooLong => "context_length_exceeded",
                code => code.as_str(),
            },
            Self::Protocol(_) => "protocol_error",
            Self::Text(_) => "internal",
        }
    }
}
