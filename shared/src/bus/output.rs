//! A command's output on its way to the operator, and the line that an audit keeps.

use super::{CommandId, NodeId};
use crate::hexbytes::Hex;
use bytes::{BufMut as _, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// Longest piece of output in one message.
pub const MAX_CHUNK_BYTES: usize = 64 << 10;
/// What a shorter piece costs of the window: the window bounds the number of messages, too.
const MIN_COST_BYTES: u64 = 1024;
const HEAD_BYTES: usize = 9;

/// One message of a command's output. On the wire: kind (1 byte: 1 stdout, 2 stderr, 3 end), sequence number (8
/// bytes, little-endian, from 0), then the bytes, or the end as JSON.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// Bytes of standard output.
    Stdout(Bytes),
    /// Bytes of standard error.
    Stderr(Bytes),
    /// Nothing follows.
    End(End),
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// What ended it.
    pub exit: Exit,
    /// Bytes of standard output that were sent.
    pub stdout_bytes: u64,
    /// Bytes of standard error that were sent.
    pub stderr_bytes: u64,
    /// Time it ran.
    pub duration_ms: f64,
}

/// What ended a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "exit", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Exit {
    /// By itself.
    Code {
        /// Exit code.
        code: i32,
    },
    /// A signal that the agent did not send.
    Signal {
        /// Its number.
        signal: i32,
    },
    /// Killed: its time was over.
    TimedOut {},
    /// Killed: the operator cancelled it.
    Cancelled {},
    /// Killed: more output than the node allows.
    OutputLimit {},
    /// Killed: the operator gave no sign of life any more.
    OperatorGone {},
    /// Killed: the agent is ending.
    AgentStopping {},
    /// It could not be started or followed.
    Failed {
        /// Why.
        message: String,
    },
}

/// How many output bytes an operator is ready to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credit {
    /// The command's nonce: a credit without it is ignored.
    pub token: Hex<16>,
    /// Output bytes ([`Frame::cost_bytes`]) granted since the start, all credits together. Repeated at least every few seconds: it is also
    /// the operator's sign of life.
    pub granted_bytes: u64,
}

/// What was asked and what came of it. One line of JSON in the node's audit file, and one message on its subject.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AuditLine {
    /// The node's wall clock, RFC 3339 in UTC.
    pub at: String,
    /// The node.
    pub node: NodeId,
    /// `accepted`, `refused` or `ended`.
    pub event: String,
    /// Public key of the signer, as claimed; a fact only where `verified`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// The node's own name for the signer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator_name: Option<String>,
    /// Whether the signature held.
    pub verified: bool,
    /// The command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<CommandId>,
    /// Its kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Program and arguments, cut at 4 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Why it was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<End>,
    /// Refusals before this one that were too many to write down.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub suppressed: u64,
}

/// A message that is no output.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Too short, or of an unknown kind.
    #[error("not a piece of output")]
    Kind,
    /// Its end is no JSON.
    #[error("end of output: {0}")]
    Json(#[from] serde_json::Error),
}

impl Frame {
    /// The message.
    #[must_use]
    pub fn encode(&self, sequence: u64) -> Bytes {
        let end;
        let (kind, payload): (u8, &[u8]) = match self {
            Self::Stdout(bytes) => (1, bytes),
            Self::Stderr(bytes) => (2, bytes),
            Self::End(e) => {
                // Strings and finite numbers: nothing in it can fail to become JSON.
                end = serde_json::to_vec(e).unwrap_or_default();
                (3, &end)
            }
        };
        let mut message = BytesMut::with_capacity(HEAD_BYTES + payload.len());
        message.put_u8(kind);
        message.put_u64_le(sequence);
        message.put_slice(payload);
        message.freeze()
    }

    /// What it takes from the operator's window, in bytes. The end is free.
    #[must_use]
    pub fn cost_bytes(&self) -> u64 {
        match self {
            Self::Stdout(bytes) | Self::Stderr(bytes) => MIN_COST_BYTES.max(bytes.len() as u64),
            Self::End(_) => 0,
        }
    }

    /// Reads a message: its sequence number and what it carries.
    ///
    /// # Errors
    /// [`FrameError`].
    pub fn decode(message: &Bytes) -> Result<(u64, Self), FrameError> {
        let head = message.get(..HEAD_BYTES).ok_or(FrameError::Kind)?;
        let (kind, sequence) = head.split_at(1);
        let sequence = u64::from_le_bytes(sequence.try_into().map_err(|_| FrameError::Kind)?);
        let payload = message.slice(HEAD_BYTES..);
        let frame = match kind {
            [1] => Self::Stdout(payload),
            [2] => Self::Stderr(payload),
            [3] => Self::End(serde_json::from_slice(&payload)?),
            _ => return Err(FrameError::Kind),
        };
        Ok((sequence, frame))
    }
}

impl Exit {
    /// The exit code that a command line shows for it, as shells do: 128 and the signal, 124 for a timeout, 130 for
    /// a cancelled command, 125 where the node or the bus failed it.
    #[must_use]
    pub fn code(&self) -> u8 {
        match self {
            Self::Code { code } => u8::try_from(*code & 0xff).unwrap_or(1),
            Self::Signal { signal } => u8::try_from(128 + (signal & 0x7f)).unwrap_or(255),
            Self::TimedOut {} => 124,
            Self::Cancelled {} => 130,
            Self::OutputLimit {} | Self::OperatorGone {} | Self::AgentStopping {} | Self::Failed { .. } => {
                125
            }
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code { code } => write!(f, "exit code {code}"),
            Self::Signal { signal } => write!(f, "ended by signal {signal}"),
            Self::TimedOut {} => f.write_str("killed: its time was over"),
            Self::Cancelled {} => f.write_str("cancelled"),
            Self::OutputLimit {} => f.write_str("killed: more output than the node allows"),
            Self::OperatorGone {} => f.write_str("killed: the operator was gone"),
            Self::AgentStopping {} => f.write_str("killed: the agent is ending"),
            Self::Failed { message } => f.write_str(message),
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        let end = End { exit: Exit::Code { code: 3 }, stdout_bytes: 1, stderr_bytes: 2, duration_ms: 4.5 };
        for frame in [Frame::Stdout(Bytes::from_static(b"\0x")), Frame::Stderr(Bytes::new()), Frame::End(end)]
        {
            assert_eq!(Frame::decode(&frame.encode(7)).unwrap(), (7, frame));
        }
        for bad in [&b""[..], b"\x01\0\0", b"\x04\0\0\0\0\0\0\0\0", b"\x03\0\0\0\0\0\0\0\0{"] {
            assert!(Frame::decode(&Bytes::from_static(bad)).is_err());
        }
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(Exit::Code { code: 7 }.code(), 7);
        assert_eq!(Exit::Signal { signal: 9 }.code(), 137);
        assert_eq!(Exit::TimedOut {}.code(), 124);
    }
}
