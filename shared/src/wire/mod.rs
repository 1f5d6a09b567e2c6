//! Cache frames: the bulk protocol between a prefill worker and a decode worker.
//!
//! A connection carries frames: a fixed 56-byte little-endian header, then the payload. The sender opens
//! with [`Open`], sends `data` frames within its credit, and ends with [`Commit`]; the receiver answers
//! with credits and one [`TransferReceipt`]. Either side may send [`Abort`] at any time. A connection that
//! closes without a commit is an abort.

mod body;
mod digest;
mod header;

pub use body::{Abort, AbortCode, Commit, MAX_BODY_BYTES, Open, TransferReceipt, parse_credit};
pub use digest::TransferDigest;
pub use header::{FrameHeader, FrameKind, HEADER_BYTES, HeaderError, MAGIC, VERSION, payload_crc};
