//! What an operator asks of an agent, signed.

use super::keys::{KeyError, OperatorKey, PublicKey};
use super::{CommandId, NodeId};
use crate::hexbytes::Hex;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

/// Longest message that an agent reads as a command.
pub const MAX_COMMAND_BYTES: usize = 512 << 10;
/// Signed together with every command, so that no signature for anything else passes for one.
const DOMAIN: &[u8] = b"pd-bridge command v1\n";

/// A command on the wire. The signature covers the very bytes of `command`, which are parsed only after it held:
/// no second form of the same command exists, and nothing unsigned is interpreted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SignedCommand {
    /// [`UnsignedCommand`] as JSON text.
    pub command: String,
    /// Public key of the signer.
    pub operator: String,
    /// Ed25519 signature, base64url without padding.
    pub signature: String,
}

/// What is signed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnsignedCommand {
    /// The one node that may run it.
    pub node: NodeId,
    /// Names the command and its output.
    pub id: CommandId,
    /// The operator's wall clock in Unix milliseconds.
    pub issued_at_ms: u64,
    /// Never used twice. Known to operator and agent alone, so it is also the token of [`super::Credit`]s.
    pub nonce: Hex<16>,
    /// What to do.
    pub action: Action,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Action {
    /// Runs a program that the node's configuration allows. Output, then [`super::End`].
    Exec(ExecSpec),
    /// Asks the model behind the node's own OpenAI endpoint. Output, then [`super::End`].
    Ask(AskSpec),
    /// Sends the agent's last log lines. Output, then [`super::End`].
    Logs(LogsSpec),
    /// No new work for this node's workers.
    Drain {},
    /// Work is welcome again.
    Resume {},
    /// Ends a running command of the same operator. The reply to this says whether there was one.
    Cancel {
        /// Which.
        command: CommandId,
    },
}

/// A program to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExecSpec {
    /// Program and arguments. No shell is involved.
    pub argv: Vec<String>,
    /// Killed after this time; the node's own limit may be shorter.
    pub timeout_ms: u64,
    /// Output bytes that may be sent before the first credit.
    pub window_bytes: u64,
}

/// A question to the node's own model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskSpec {
    /// Request headers; a question with any but `x-pd-bridge-…` is refused.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
    /// Body of a `POST /v1/chat/completions`, JSON text.
    pub body: String,
    /// Given up after this time; the node's own limit may be shorter.
    pub timeout_ms: u64,
    /// Output bytes that may be sent before the first credit.
    pub window_bytes: u64,
}

/// Which log lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogsSpec {
    /// This many of the last lines, as far as they are still kept.
    pub lines: u32,
    /// Then go on with new ones until cancelled.
    pub follow: bool,
    /// Output bytes that may be sent before the first credit.
    pub window_bytes: u64,
}

/// An agent's answer to the request, before any output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// It is done, or its output follows.
    Accepted {},
    /// Nothing was done.
    Refused(Refusal),
}

/// Why nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// For programs.
    pub code: RefusalCode,
    /// For people.
    pub message: String,
}

/// Why nothing was done, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RefusalCode {
    /// Too long, no JSON, or an unknown key in it.
    Malformed,
    /// The node takes no commands, or none of this kind.
    Disabled,
    /// The node doesn't know the signer.
    UnknownKey,
    /// The signature is not the signer's over these bytes.
    BadSignature,
    /// Signed for another node.
    WrongNode,
    /// Issued too long ago, or before the agent can remember.
    Stale,
    /// Issued too far in the future of the node's clock.
    FromTheFuture,
    /// Seen before, or named like a command that runs.
    Replayed,
    /// More commands than the node takes at once, or than it can remember.
    Busy,
    /// The program or an argument is not allowed.
    NotAllowed,
    /// There is no such running command.
    NotRunning,
    /// The node could not do it.
    Failed,
}

/// A command that can't be made or believed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The operator's key failed.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// It can't be written as JSON.
    #[error("command: {0}")]
    Json(#[from] serde_json::Error),
    /// Longer than [`MAX_COMMAND_BYTES`].
    #[error("a command of {0} bytes is too long")]
    TooLong(usize),
}

impl UnsignedCommand {
    /// A command of this moment, with a new id and nonce.
    #[must_use]
    pub fn new(node: NodeId, action: Action) -> Self {
        Self { node, id: Hex::random(), issued_at_ms: super::unix_now_ms(), nonce: Hex::random(), action }
    }

    /// Signs it.
    ///
    /// # Errors
    /// [`CommandError`].
    pub fn sign(&self, key: &OperatorKey) -> Result<SignedCommand, CommandError> {
        let command = serde_json::to_string(self)?;
        let signature = URL_SAFE_NO_PAD.encode(key.sign(&signed_bytes(&command))?);
        Ok(SignedCommand { command, operator: key.public(), signature })
    }
}

impl SignedCommand {
    /// The message.
    ///
    /// # Errors
    /// [`CommandError::TooLong`].
    pub fn encode(&self) -> Result<bytes::Bytes, CommandError> {
        let message = serde_json::to_vec(self)?;
        if message.len() > MAX_COMMAND_BYTES {
            return Err(CommandError::TooLong(message.len()));
        }
        Ok(message.into())
    }

    /// Reads a message; says nothing of who wrote it.
    ///
    /// # Errors
    /// [`RefusalCode::Malformed`].
    pub fn decode(message: &[u8]) -> Result<Self, Refusal> {
        if message.len() > MAX_COMMAND_BYTES {
            return Err(Refusal::new(
                RefusalCode::Malformed,
                format!("{} bytes are too long", message.len()),
            ));
        }
        serde_json::from_slice(message).map_err(|e| Refusal::new(RefusalCode::Malformed, e))
    }

    /// The command, if one of `operators` signed it for `node`. Freshness is [`super::ReplayWindow`]'s business.
    ///
    /// # Errors
    /// [`RefusalCode::UnknownKey`], [`RefusalCode::BadSignature`], [`RefusalCode::Malformed`],
    /// [`RefusalCode::WrongNode`].
    pub fn verify<'k>(
        &self,
        node: &NodeId,
        operators: impl IntoIterator<Item = &'k PublicKey>,
    ) -> Result<UnsignedCommand, Refusal> {
        let key = operators.into_iter().find(|key| key.as_str() == self.operator).ok_or_else(|| {
            Refusal::new(RefusalCode::UnknownKey, "this node doesn't know the key that signed")
        })?;
        let signature = URL_SAFE_NO_PAD.decode(&self.signature).unwrap_or_default();
        if !key.verifies(&signed_bytes(&self.command), &signature) {
            return Err(Refusal::new(RefusalCode::BadSignature, "the signature doesn't match the command"));
        }
        let command: UnsignedCommand =
            serde_json::from_str(&self.command).map_err(|e| Refusal::new(RefusalCode::Malformed, e))?;
        if command.node != *node {
            return Err(Refusal::new(
                RefusalCode::WrongNode,
                format!("signed for `{}`, this is `{node}`", command.node),
            ));
        }
        Ok(command)
    }
}

impl Reply {
    /// The message.
    #[must_use]
    pub fn encode(&self) -> bytes::Bytes {
        // Strings and unit names: nothing in it can fail to become JSON.
        serde_json::to_vec(self).unwrap_or_default().into()
    }
}

impl Refusal {
    /// A refusal with words for people.
    pub fn new(code: RefusalCode, message: impl std::fmt::Display) -> Self {
        Self { code, message: message.to_string().chars().take(500).collect() }
    }
}

impl Action {
    /// The kind, as in JSON.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Exec(_) => "exec",
            Self::Ask(_) => "ask",
            Self::Logs(_) => "logs",
            Self::Drain {} => "drain",
            Self::Resume {} => "resume",
            Self::Cancel { .. } => "cancel",
        }
    }
}

fn signed_bytes(command: &str) -> Vec<u8> {
    [DOMAIN, command.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exec(node: &str) -> UnsignedCommand {
        let spec = ExecSpec { argv: vec!["true".into()], timeout_ms: 1000, window_bytes: 1 << 20 };
        UnsignedCommand::new(NodeId::new(node).unwrap(), Action::Exec(spec))
    }

    fn code(result: Result<UnsignedCommand, Refusal>) -> RefusalCode {
        result.unwrap_err().code
    }

    #[test]
    fn a_signed_command_is_believed_by_its_node_alone() {
        let (key, other) = (OperatorKey::generate(), OperatorKey::generate());
        let known = [PublicKey::new(&other.public()).unwrap(), PublicKey::new(&key.public()).unwrap()];
        let (here, there) = (NodeId::new("here").unwrap(), NodeId::new("there").unwrap());
        let command = exec("here");
        let signed = SignedCommand::decode(&command.sign(&key).unwrap().encode().unwrap()).unwrap();
        assert_eq!(signed.verify(&here, &known).unwrap(), command);
        assert_eq!(code(signed.verify(&there, &known)), RefusalCode::WrongNode);
        assert_eq!(code(signed.verify(&here, &known[..1])), RefusalCode::UnknownKey);
        let claimed = SignedCommand { operator: other.public(), ..signed };
        assert_eq!(code(claimed.verify(&here, &known)), RefusalCode::BadSignature);
    }

    #[test]
    fn no_byte_of_a_signed_command_can_be_altered() {
        let key = OperatorKey::generate();
        let known = [PublicKey::new(&key.public()).unwrap()];
        let node = NodeId::new("here").unwrap();
        let signed = exec("here").sign(&key).unwrap();
        for i in 0..signed.command.len() {
            let mut bytes = signed.command.clone().into_bytes();
            bytes[i] ^= 1;
            let altered = SignedCommand { command: String::from_utf8(bytes).unwrap(), ..signed.clone() };
            assert_eq!(code(altered.verify(&node, &known)), RefusalCode::BadSignature, "byte {i}");
        }
        let spaced = SignedCommand { command: format!(" {}", signed.command), ..signed.clone() };
        assert_eq!(code(spaced.verify(&node, &known)), RefusalCode::BadSignature);
        let unsigned = SignedCommand { signature: String::new(), ..signed };
        assert_eq!(code(unsigned.verify(&node, &known)), RefusalCode::BadSignature);
    }

    #[test]
    fn unknown_keys_and_long_messages_are_malformed() {
        let key = OperatorKey::generate();
        let signed = exec("here").sign(&key).unwrap();
        let mut value = serde_json::to_value(&signed).unwrap();
        value["extra"] = 1.into();
        for message in ["{", "[]", &value.to_string()] {
            assert_eq!(SignedCommand::decode(message.as_bytes()).unwrap_err().code, RefusalCode::Malformed);
        }
        let long = SignedCommand { command: "x".repeat(MAX_COMMAND_BYTES), ..signed };
        assert!(long.encode().is_err());
        let extra = r#"{"kind":"drain","also":1}"#;
        assert!(serde_json::from_str::<Action>(extra).is_err());
    }
}
