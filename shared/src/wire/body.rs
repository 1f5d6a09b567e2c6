//! JSON bodies of the frames that carry no rows.

use crate::hexbytes::Hex;
use serde::{Deserialize, Serialize};

/// Largest body a receiver reads.
pub const MAX_BODY_BYTES: usize = 16 * 1024;

/// First frame from the sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Open {
    /// One-use secret that the decoder issued for this transfer.
    pub ticket: Hex<16>,
    /// Fingerprint of the decoder that the rows were made for.
    pub fingerprint: Hex<32>,
    /// Digest of the layout that the rows obey.
    pub layout_digest: Hex<32>,
    /// Digest of the whole prompt's token ids.
    pub tokens_digest: Hex<32>,
    /// First token position that will be sent.
    pub token_start: u32,
    /// End (exclusive) of the positions that will be sent.
    pub token_end: u32,
}

/// Last frame from the sender: what was sent, in numbers that the receiver checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Commit {
    /// First token position sent.
    pub token_start: u32,
    /// End (exclusive) of the positions sent; smaller than announced when the sender stopped early.
    pub token_end: u32,
    /// Number of data frames.
    pub frames: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// [`super::TransferDigest`] of them.
    pub digest: Hex<32>,
    /// Why the sender stopped early, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub short_reason: Option<String>,
}

/// The receiver's answer to a commit whose every check passed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferReceipt {
    /// End (exclusive) of the positions that became usable.
    pub token_end: u32,
    /// Data frames counted.
    pub frames: u64,
    /// Payload bytes counted.
    pub payload_bytes: u64,
    /// Digest that the receiver computed.
    pub digest: Hex<32>,
}

/// The end of a transfer that gave nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{code}: {message}")]
pub struct Abort {
    /// Machine-readable cause.
    pub code: AbortCode,
    /// For people.
    pub message: String,
}

/// Causes of an abort; they become `reason` in the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AbortCode {
    /// The ticket is unknown, used, expired, or for something else.
    BadTicket,
    /// The two sides mean different models.
    FingerprintMismatch,
    /// The two sides mean different cache layouts (dtype, heads, block size).
    LayoutMismatch,
    /// The two sides mean different prompts.
    TokensMismatch,
    /// A frame failed its checksum, or the commit its digest.
    Checksum,
    /// Rows are missing, doubled, or outside the range.
    Incomplete,
    /// A frame that this protocol does not allow here.
    ProtocolError,
    /// More bytes than the receiver holds for one transfer.
    OverBudget,
    /// The connection closed before the commit.
    ConnectionLost,
    /// Nothing arrived for too long.
    Timeout,
    /// The request was cancelled.
    Cancelled,
    /// The prefill engine failed.
    PrefillFailed,
    /// The prefill worker has more work than it accepts.
    PrefillBusy,
    /// Something else broke.
    Internal,
}

impl AbortCode {
    /// The snake_case name, as in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BadTicket => "bad_ticket",
            Self::FingerprintMismatch => "fingerprint_mismatch",
            Self::LayoutMismatch => "layout_mismatch",
            Self::TokensMismatch => "tokens_mismatch",
            Self::Checksum => "checksum",
            Self::Incomplete => "incomplete",
            Self::ProtocolError => "protocol_error",
            Self::OverBudget => "over_budget",
            Self::ConnectionLost => "connection_lost",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::PrefillFailed => "prefill_failed",
            Self::PrefillBusy => "prefill_busy",
            Self::Internal => "internal",
        }
    }
}

impl std::fmt::Display for AbortCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Abort {
    /// An abort with a message for people.
    pub fn new(code: AbortCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Reads the payload of a credit frame: bytes as u64 LE.
#[must_use]
pub fn parse_credit(payload: &[u8]) -> Option<u64> {
    payload.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abort_codes_have_one_name() {
        for code in [AbortCode::BadTicket, AbortCode::Checksum, AbortCode::PrefillBusy, AbortCode::Internal] {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
        }
    }
}
