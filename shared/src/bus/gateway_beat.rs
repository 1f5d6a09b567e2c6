//! What a gateway says of itself.

use super::NodeId;
use crate::hexbytes::Hex;
use serde::{Deserialize, Serialize};

/// A gateway at one moment; for people, no other gateway relies on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GatewayBeat {
    /// Name of the gateway.
    pub id: NodeId,
    /// Chosen when the process started.
    pub boot_id: Hex<16>,
    /// Counts the messages of this boot, from 1.
    pub sequence: u64,
    /// Where it serves, `host:port`.
    pub addr: String,
    /// Software version.
    pub version: String,
    /// Model that it serves.
    pub model: String,
    /// Requests being answered.
    pub in_flight: u32,
    /// Connected prefill workers.
    pub prefill_workers: u32,
    /// Connected decode workers.
    pub decode_workers: u32,
}
