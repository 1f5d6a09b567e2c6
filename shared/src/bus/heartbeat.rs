//! What an agent says of its machine.

use super::NodeId;
use crate::control::{Rates, Role};
use crate::hexbytes::Hex;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// An agent is heard at least this often; at once when its state changes.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Longest heartbeat that is read.
pub const MAX_HEARTBEAT_BYTES: usize = 256 << 10;

/// A machine, its devices and its workers at one moment.
///
/// Receivers judge an agent by when its messages arrive, on their own monotonic clock; nothing here is a clock to
/// rely on. `boot_id` and `sequence` order the messages of one agent: a new `boot_id` is a restarted agent, within
/// one the larger sequence is newer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Who speaks; must be the node of the subject.
    pub node: NodeId,
    /// Chosen when the agent started.
    pub boot_id: Hex<16>,
    /// Counts the messages of this boot, from 1.
    pub sequence: u64,
    /// Sender's wall clock in Unix milliseconds; for display only.
    pub sent_at_ms: u64,
    /// Time since the agent started.
    pub uptime_s: u64,
    /// Whether work may be sent here.
    pub state: NodeState,
    /// Software version of the agent.
    pub version: String,
    /// Host name.
    pub host: String,
    /// Operating system and its version.
    pub os: String,
    /// Instruction set, as Rust names it.
    pub arch: String,
    /// Processor.
    pub cpu: Cpu,
    /// Main memory.
    pub memory: Memory,
    /// Accelerators; empty where there is none that can be seen.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// Workers of this machine, those that don't answer included.
    #[serde(default)]
    pub workers: Vec<WorkerBeat>,
    /// Whether the node's own configuration allows any remote command.
    #[serde(default)]
    pub commands_allowed: bool,
}

/// Whether work may be sent to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Yes.
    #[default]
    Alive,
    /// No new work; what runs may finish.
    Draining,
    /// The agent is about to end; the last message of its boot.
    Leaving,
}

/// A processor.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Cpu {
    /// Name as the maker writes it.
    pub model: String,
    /// Logical cores.
    pub cores: u32,
    /// Load average over one minute.
    pub load_1m: f64,
    /// Share of all cores busy since the last message, 0 to 1.
    pub busy: f64,
}

/// Main memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Installed.
    pub total_bytes: u64,
    /// In use, caches not counted.
    pub used_bytes: u64,
}

/// An accelerator.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Gpu {
    /// Name as the maker writes it, e.g. `NVIDIA H200` or `Apple M4 Max`.
    pub name: String,
    /// Its memory; the machine's own where they share it.
    pub memory_total_bytes: u64,
    /// In use; 0 where it can't be told.
    pub memory_used_bytes: u64,
    /// Share of time busy, 0 to 1, where it can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Temperature, where it can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// Power drawn, where it can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
}

/// A worker of the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerBeat {
    /// What it does.
    pub role: Role,
    /// Its name in verdicts.
    pub name: String,
    /// Control address for others, `host:port`.
    pub control_addr: String,
    /// Whether it answered the agent when last asked. A worker that did not is described as last known.
    pub reachable: bool,
    /// Software version.
    pub version: String,
    /// Engine and device.
    pub engine: String,
    /// Model name as clients see it.
    pub model: String,
    /// Digest of the tokenizer; gateway and workers must agree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer_digest: Option<Hex<32>>,
    /// Decode workers: identity of the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Hex<32>>,
    /// Decode workers: digest of the cache's shape.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout_digest: Option<Hex<32>>,
    /// Decode workers: where cache frames are received, `host:port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bulk_addr: Option<String>,
    /// Longest prompt plus answer.
    pub max_tokens: u32,
    /// Most tokens accepted at once; 0 means no own limit.
    pub capacity_tokens: u64,
    /// Requests running or waiting.
    pub queue: u32,
    /// Prefill workers: prompt tokens of those requests.
    #[serde(default)]
    pub queue_tokens: u64,
    /// Measured speeds; 0 where nothing was measured.
    pub rates: Rates,
    /// Payload bytes per second seen between workers; 0 where nothing was measured.
    pub link_bytes_per_s: f64,
    /// Bytes in the worker's prefix store or cache.
    pub prefix_bytes: u64,
    /// Resident memory of the process.
    pub resident_memory_bytes: u64,
}

/// What a silence means, by the listener's own monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Liveness {
    /// Heard within two intervals.
    Alive,
    /// Two heartbeats are missing.
    Suspect,
    /// Three are.
    Gone,
}

impl Liveness {
    /// What silence of this length means. A little more than whole intervals, for the message's way.
    #[must_use]
    pub fn after(silent_for: Duration) -> Self {
        let slack = HEARTBEAT_INTERVAL / 10;
        match silent_for.checked_sub(slack) {
            Some(silent_for) if silent_for >= 3 * HEARTBEAT_INTERVAL => Self::Gone,
            Some(silent_for) if silent_for >= 2 * HEARTBEAT_INTERVAL => Self::Suspect,
            _ => Self::Alive,
        }
    }
}

/// A message that is no heartbeat.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeartbeatError {
    /// Longer than [`MAX_HEARTBEAT_BYTES`].
    #[error("heartbeat of {0} bytes")]
    TooLong(usize),
    /// Not the JSON of a heartbeat.
    #[error("heartbeat: {0}")]
    Json(#[from] serde_json::Error),
    /// It speaks for another node than its subject does.
    #[error("a heartbeat of `{claimed}` on the subject of `{subject}`")]
    WrongNode {
        /// Node in the message.
        claimed: NodeId,
        /// The subject.
        subject: String,
    },
}

impl Heartbeat {
    /// Reads a message that came on `subject`. Unknown keys are ignored: a newer agent may say more.
    ///
    /// # Errors
    /// [`HeartbeatError`].
    pub fn decode(subject: &str, message: &[u8]) -> Result<Self, HeartbeatError> {
        if message.len() > MAX_HEARTBEAT_BYTES {
            return Err(HeartbeatError::TooLong(message.len()));
        }
        let beat: Self = serde_json::from_slice(message)?;
        if super::subjects::node_of(subject).as_ref() != Some(&beat.node) {
            return Err(HeartbeatError::WrongNode { claimed: beat.node, subject: subject.to_owned() });
        }
        Ok(beat)
    }

    /// The message.
    #[must_use]
    pub fn encode(&self) -> bytes::Bytes {
        // Strings, numbers and lists of them: nothing in it can fail to become JSON.
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    /// Whether this is newer than another message of the same node.
    #[must_use]
    pub fn is_newer_than(&self, other: &Self) -> bool {
        self.boot_id != other.boot_id || self.sequence > other.sequence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat() -> Heartbeat {
        Heartbeat {
            node: NodeId::new("spark").unwrap(),
            boot_id: Hex([1; 16]),
            sequence: 3,
            sent_at_ms: 1,
            uptime_s: 2,
            state: NodeState::Alive,
            version: "0.1.0".into(),
            host: "spark.local".into(),
            os: "Linux".into(),
            arch: "aarch64".into(),
            cpu: Cpu::default(),
            memory: Memory::default(),
            gpus: vec![Gpu { name: "NVIDIA GB10".into(), ..Gpu::default() }],
            workers: Vec::new(),
            commands_allowed: false,
        }
    }

    #[test]
    fn a_heartbeat_speaks_for_its_own_subject_only() {
        let message = beat().encode();
        assert_eq!(Heartbeat::decode("pd.v1.heartbeat.spark", &message).unwrap(), beat());
        assert!(matches!(
            Heartbeat::decode("pd.v1.heartbeat.other", &message),
            Err(HeartbeatError::WrongNode { .. })
        ));
        assert!(Heartbeat::decode("pd.v1.heartbeat.spark", b"{").is_err());
        let long = vec![b' '; MAX_HEARTBEAT_BYTES + 1];
        assert!(matches!(Heartbeat::decode("pd.v1.heartbeat.spark", &long), Err(HeartbeatError::TooLong(_))));
    }

    #[test]
    fn silence_is_suspect_after_two_missed_and_gone_after_three() {
        let after = |ms| Liveness::after(Duration::from_millis(ms));
        assert_eq!([0, 9_999, 10_499].map(after), [Liveness::Alive; 3]);
        assert_eq!([10_500, 11_000, 15_499].map(after), [Liveness::Suspect; 3]);
        assert_eq!([15_500, 16_000, 1_000_000].map(after), [Liveness::Gone; 3]);
    }

    #[test]
    fn order_is_by_boot_and_sequence() {
        let older = Heartbeat { sequence: 2, ..beat() };
        let restarted = Heartbeat { sequence: 1, boot_id: Hex([2; 16]), ..beat() };
        assert!(
            beat().is_newer_than(&older) && !older.is_newer_than(&beat()) && !beat().is_newer_than(&beat())
        );
        assert!(restarted.is_newer_than(&beat()));
    }
}
