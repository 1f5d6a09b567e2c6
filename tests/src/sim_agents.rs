//! Simulated agents: real connections to a real NATS server, real heartbeats, no machine behind them.

use shared::bus::{
    Bus, BusSettings, Cpu, Gpu, HEARTBEAT_INTERVAL, Heartbeat, Memory, NodeId, NodeState, WorkerBeat,
};
use shared::bus::{subjects, unix_now_ms};
use shared::control::{ClusterKey, ControlClient, DecodeEvent, DecodeRequest, Hello};
use shared::hexbytes::Hex;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// A machine that says it is there, every five seconds and whenever something about it changes. Dropping it is a
/// killed agent: no goodbye.
pub struct SimulatedAgent {
    /// Its name.
    pub node: NodeId,
    beat: watch::Sender<Heartbeat>,
    /// The connection.
    pub bus: Bus,
    _task: AbortOnDropHandle<()>,
}

impl SimulatedAgent {
    /// Connects and begins to speak.
    pub async fn start(settings: &BusSettings, node: &str, workers: Vec<WorkerBeat>) -> Self {
        let node = NodeId::new(node).unwrap();
        let bus = Bus::connect(settings, "agent", node.as_str()).await.unwrap();
        let (beat, mut current) = watch::channel(heartbeat(&node, workers));
        let (out, subject) = (bus.clone(), subjects::heartbeat(&node));
        let mut connects = bus.connects();
        let task = tokio::spawn(async move {
            let mut tick = tokio::time::interval(HEARTBEAT_INTERVAL);
            for sequence in 1.. {
                tokio::select! {
                    _ = tick.tick() => {}
                    Ok(()) = current.changed() => {}
                    Ok(()) = connects.changed() => {}
                }
                let mut now = current.borrow_and_update().clone();
                let skewed = i128::from(unix_now_ms()) + i128::from(now.sent_at_ms) - i128::from(NO_SKEW_MS);
                now.sent_at_ms = u64::try_from(skewed).unwrap();
                now.sequence = sequence;
                // While the server is away there is nobody to speak to.
                if out.is_connected() {
                    let _ = out.client.publish(subject.clone(), now.encode()).await;
                }
            }
        });
        Self { node, beat, bus, _task: AbortOnDropHandle::new(task) }
    }

    /// Says that the machine drains, or no longer does.
    pub fn set_state(&self, state: NodeState) {
        self.beat.send_modify(|beat| beat.state = state);
    }

    /// Says what workers it has.
    pub fn set_workers(&self, workers: Vec<WorkerBeat>) {
        self.beat.send_modify(|beat| beat.workers = workers);
    }

    /// Sets its wall clock off by so much.
    pub fn skew_clock(&self, by_ms: i64) {
        self.beat.send_modify(|beat| beat.sent_at_ms = NO_SKEW_MS.checked_add_signed(by_ms).unwrap());
    }

    /// What it says, without the time.
    #[must_use]
    pub fn current(&self) -> Heartbeat {
        self.beat.borrow().clone()
    }
}

/// A day: room for a skew in either direction in an unsigned number.
const NO_SKEW_MS: u64 = 86_400_000;

fn heartbeat(node: &NodeId, workers: Vec<WorkerBeat>) -> Heartbeat {
    Heartbeat {
        node: node.clone(),
        boot_id: Hex::random(),
        sequence: 0,
        sent_at_ms: NO_SKEW_MS,
        uptime_s: 0,
        state: NodeState::Alive,
        version: "0.1.0".into(),
        host: format!("{node}.local"),
        os: "Linux 6.12".into(),
        arch: "x86_64".into(),
        cpu: Cpu { model: "Simulated".into(), cores: 16, load_1m: 1.5, busy: 0.1 },
        memory: Memory { total_bytes: 64 << 30, used_bytes: 16 << 30 },
        gpus: vec![Gpu {
            name: "NVIDIA GB10".into(),
            memory_total_bytes: 128 << 30,
            busy: Some(0.3),
            ..Gpu::default()
        }],
        workers,
        commands_allowed: false,
    }
}

/// What an agent says of a worker that runs at `addr`: it asks it.
pub async fn describe(addr: &str) -> WorkerBeat {
    describe_with(addr, &ClusterKey::loopback()).await
}

/// The same where there is a key.
pub async fn describe_with(addr: &str, key: &ClusterKey) -> WorkerBeat {
    type Client = ControlClient<DecodeRequest, DecodeEvent>;
    let (_, hello) = Client::connect(addr, key, Duration::from_secs(10)).await.unwrap();
    worker_beat(&hello, addr)
}

/// The same from its hello.
#[must_use]
pub fn worker_beat(hello: &Hello, addr: &str) -> WorkerBeat {
    let cache = hello.cache.as_ref();
    WorkerBeat {
        role: hello.role,
        name: hello.node.clone(),
        control_addr: addr.to_owned(),
        reachable: true,
        version: hello.version.clone(),
        engine: hello.engine.clone(),
        model: hello.model.clone(),
        tokenizer_digest: Some(hello.tokenizer_digest),
        fingerprint: cache.map(|c| c.fingerprint),
        layout_digest: cache.map(|c| Hex(c.layout.digest())),
        bulk_addr: cache.map(|c| c.bulk_addr.clone()),
        max_tokens: hello.max_tokens,
        capacity_tokens: hello.capacity_tokens,
        queue: 0,
        queue_tokens: 0,
        rates: hello.rates,
        link_bytes_per_s: 0.0,
        prefix_bytes: 0,
        resident_memory_bytes: 100 << 20,
    }
}
