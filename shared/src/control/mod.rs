//! Control connections: JSON over WebSocket, one connection multiplexing many requests.
//!
//! A worker listens; the gateway (and, to fetch projections, a prefill worker) connects. Both sides prove
//! the cluster key, then the worker says [`Hello`]. Every request carries an id that its events repeat.

mod client;
mod handshake;
mod hello;
mod inbox;
mod messages;
mod server;
mod window;

pub use client::{ControlClient, ControlError, EventStream, Incoming};
pub use handshake::{ClusterKey, ClusterKeyError};
pub use hello::{CacheIdentity, Hello, KvRecipe, PROTOCOL_VERSION, Rates, Role, RopeRecipe};
pub use messages::{
    Constraint, DecodeEvent, DecodeReceipt, DecodeRequest, DecodeStats, FinishReason, GenerateSpec, PairSpec,
    PrefillEvent, PrefillReport, PrefillRequest, PrefillSpec, PrefillStats, Require, Sampling, TokenLogprobs,
    TransferOffer, WorkerError, WorkerErrorCode,
};
pub use server::{ConnectionId, Handler, Responder, serve};
pub use window::Window;

/// Largest message a worker accepts, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// A message with the request it belongs to.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Envelope<T> {
    /// Chosen by the requester, unique on its connection.
    pub id: u64,
    /// The request or event.
    pub body: T,
    /// `traceparent` of the span that a request belongs to, while traces are made; who does not know it ignores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
}
