//! Heartbeats for tests.

use shared::bus::{Cpu, Heartbeat, Memory, NodeId, NodeState, WorkerBeat};
use shared::control::{Rates, Role};
use shared::hexbytes::Hex;

/// A machine without workers.
pub(super) fn beat(node: &str) -> Heartbeat {
    Heartbeat {
        node: NodeId::new(node).unwrap(),
        boot_id: Hex([1; 16]),
        sequence: 1,
        sent_at_ms: 0,
        uptime_s: 1,
        state: NodeState::Alive,
        version: "0".into(),
        host: node.into(),
        os: "Linux".into(),
        arch: "x86_64".into(),
        cpu: Cpu::default(),
        memory: Memory::default(),
        gpus: vec![],
        workers: vec![],
        commands_allowed: false,
    }
}

/// A worker.
pub(super) fn worker(role: Role, name: &str, addr: &str) -> WorkerBeat {
    WorkerBeat {
        role,
        name: name.into(),
        control_addr: addr.into(),
        reachable: true,
        version: "0".into(),
        engine: "script".into(),
        model: "m".into(),
        tokenizer_digest: None,
        fingerprint: None,
        layout_digest: None,
        bulk_addr: None,
        max_tokens: 100,
        capacity_tokens: 0,
        queue: 0,
        queue_tokens: 0,
        rates: Rates::default(),
        link_bytes_per_s: 0.0,
        prefix_bytes: 0,
        resident_memory_bytes: 0,
    }
}
