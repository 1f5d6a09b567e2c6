//! Requests and events, one enum per kind of worker and direction.

mod answer;
mod decode;
mod error;
mod prefill;

pub use answer::{Constraint, FinishReason, GenerateSpec, Require, Sampling, TokenLogprobs};
pub use decode::{DecodeEvent, DecodeReceipt, DecodeRequest, DecodeStats};
pub use error::{WorkerError, WorkerErrorCode};
pub use prefill::{
    PairSpec, PrefillEvent, PrefillReport, PrefillRequest, PrefillSpec, PrefillStats, TransferOffer,
};
