//! The bus between machines (NATS): its subjects, and what travels on them.
//!
//! - [`subjects`]: every name on the bus, and who may use it
//! - [`Heartbeat`]: what an agent says of its machine every [`HEARTBEAT_INTERVAL`]
//! - [`SignedCommand`]: what an operator asks of an agent; [`ReplayWindow`] decides whether it is fresh
//! - [`Frame`], [`Credit`]: a command's output, and how much of it may be under way
//! - [`Operator`]: gives commands and reads their output
//! - [`Bus`]: a connection that comes back by itself

mod command;
mod connect;
mod gateway_beat;
mod heartbeat;
mod id;
mod keys;
mod operator;
mod output;
mod replay;
mod settings;
pub mod subjects;

pub use command::{
    Action, AskSpec, CommandError, ExecSpec, LogsSpec, MAX_COMMAND_BYTES, Refusal, RefusalCode, Reply,
    SignedCommand, UnsignedCommand,
};
pub use connect::{Bus, BusError, PING_INTERVAL, SERVER_FLOOR, below_floor};
pub use gateway_beat::GatewayBeat;
pub use heartbeat::{
    Cpu, Gpu, HEARTBEAT_INTERVAL, Heartbeat, HeartbeatError, Liveness, MAX_HEARTBEAT_BYTES, Memory,
    NodeState, WorkerBeat,
};
pub use id::{IdError, NodeId};
pub use keys::{KeyError, OperatorKey, PublicKey};
pub use operator::{Operator, OperatorError, Running, WINDOW_BYTES};
pub use output::{AuditLine, Credit, End, Exit, Frame, FrameError, MAX_CHUNK_BYTES};
pub use replay::{NotFresh, ReplayWindow};
pub use settings::{BusArgs, BusSettings};

use crate::hexbytes::Hex;

/// Names one command: 16 random bytes, chosen by the operator.
pub type CommandId = Hex<16>;

/// The wall clock in Unix milliseconds.
#[must_use]
pub fn unix_now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
