//! Metrics of machines and workers; their names are in the table of `crate::metrics`.

use super::{Directory, Entry, Presence, state};
use crate::fleet::{Fleet, Standing};
use prometheus::{GaugeVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};
use shared::bus::{Gpu, WorkerBeat};
use shared::control::Role;

/// States of a machine; each is exported, also at 0.
const STATES: [&str; 5] = ["alive", "draining", "suspect", "leaving", "gone"];

/// Gauges that are brought up to date when they are read.
pub(crate) struct FleetMetrics {
    nodes: IntGaugeVec,
    node_up: IntGaugeVec,
    heartbeat_age: GaugeVec,
    node_load: GaugeVec,
    node_cpu: GaugeVec,
    node_memory_used: GaugeVec,
    node_memory_total: GaugeVec,
    gpu_busy: GaugeVec,
    gpu_memory_used: GaugeVec,
    gpu_memory_total: GaugeVec,
    worker_queue: GaugeVec,
    worker_speed: GaugeVec,
    worker_memory: GaugeVec,
    workers: IntGaugeVec,
    worker_requests: IntGaugeVec,
    heartbeats: IntCounterVec,
    bus_connected: IntGauge,
}

impl FleetMetrics {
    /// Creates and registers everything.
    ///
    /// # Errors
    /// Only when two metrics share a name.
    pub(crate) fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let opts = |name: &str, help: &str| Opts::new(format!("pd_bridge_{name}"), help);
        let whole = |name: &str, help: &str, labels: &[&str]| {
            let gauge = IntGaugeVec::new(opts(name, help), labels)?;
            registry.register(Box::new(gauge.clone())).map(|()| gauge)
        };
        let real = |name: &str, help: &str, labels: &[&str]| {
            let gauge = GaugeVec::new(opts(name, help), labels)?;
            registry.register(Box::new(gauge.clone())).map(|()| gauge)
        };
        let heartbeats =
            IntCounterVec::new(opts("heartbeats_total", "Heartbeats by what became of them."), &["result"])?;
        registry.register(Box::new(heartbeats.clone()))?;
        let bus_connected =
            IntGauge::with_opts(opts("bus_connected", "Whether the bus is reached; absent without one."))?;
        let (node, gpu, worker) = (&["node"], &["node", "gpu"], &["node", "role", "worker"]);
        Ok(Self {
            nodes: whole("nodes", "Machines on the bus.", &["state"])?,
            node_up: whole("node_up", "Whether a machine is heard.", node)?,
            heartbeat_age: real("node_heartbeat_age_seconds", "Time since a machine was heard.", node)?,
            node_load: real("node_load", "Load average over one minute.", node)?,
            node_cpu: real("node_cpu_busy_ratio", "Share of all cores that is busy.", node)?,
            node_memory_used: real("node_memory_used_bytes", "Main memory in use.", node)?,
            node_memory_total: real("node_memory_total_bytes", "Main memory.", node)?,
            gpu_busy: real("node_gpu_utilization_ratio", "Share of time that a GPU is busy.", gpu)?,
            gpu_memory_used: real("node_gpu_memory_used_bytes", "GPU memory in use.", gpu)?,
            gpu_memory_total: real("node_gpu_memory_total_bytes", "GPU memory.", gpu)?,
            worker_queue: real("node_worker_queue", "Requests running or waiting.", worker)?,
            worker_speed: real(
                "node_worker_tokens_per_second",
                "Measured speed.",
                &["node", "role", "worker", "phase"],
            )?,
            worker_memory: real("node_worker_memory_bytes", "Resident memory of a worker.", worker)?,
            workers: whole("workers", "Workers by how far they are counted on.", &["role", "state"])?,
            worker_requests: whole(
                "worker_requests",
                "Requests of a worker, everybody's.",
                &["role", "worker"],
            )?,
            heartbeats,
            bus_connected,
        })
    }

    /// Brings everything up to date.
    pub(crate) fn observe(&self, registry: &Registry, fleet: &Fleet, directory: Option<&Directory>) {
        self.workers.reset();
        self.worker_requests.reset();
        for worker in fleet.view() {
            let (role, standing) = (role(worker.role), standing(worker.standing));
            let standing = if worker.connected { standing } else { "unconnected" };
            self.workers.with_label_values(&[role, standing]).inc();
            let requests = i64::try_from(worker.requests).unwrap_or(i64::MAX);
            self.worker_requests.with_label_values(&[role, &worker.id]).set(requests);
        }
        let Some(directory) = directory else { return };
        // Without a bus the gauge would be a lie either way; registering it again changes nothing.
        let _ = registry.register(Box::new(self.bus_connected.clone()));
        self.bus_connected.set(i64::from(directory.is_bus_up()));
        for (result, count) in directory.tally.counts() {
            let counter = self.heartbeats.with_label_values(&[result]);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
        for gauge in [&self.nodes, &self.node_up] {
            gauge.reset();
        }
        for gauge in [
            &self.heartbeat_age,
            &self.node_load,
            &self.node_cpu,
            &self.node_memory_used,
            &self.node_memory_total,
            &self.gpu_busy,
            &self.gpu_memory_used,
            &self.gpu_memory_total,
            &self.worker_queue,
            &self.worker_speed,
            &self.worker_memory,
        ] {
            gauge.reset();
        }
        for state in STATES {
            self.nodes.with_label_values(&[state]).set(0);
        }
        for (entry, age) in directory.nodes() {
            self.node(&entry, age.as_secs_f64());
        }
    }

    fn node(&self, entry: &Entry, age_s: f64) {
        let (beat, node) = (&entry.beat, entry.beat.node.as_str());
        self.nodes.with_label_values(&[state(entry)]).inc();
        self.node_up.with_label_values(&[node]).set(i64::from(entry.presence != Presence::Gone));
        self.heartbeat_age.with_label_values(&[node]).set(age_s);
        if entry.presence == Presence::Gone {
            // Its last figures are no figures of now.
            return;
        }
        self.node_load.with_label_values(&[node]).set(beat.cpu.load_1m);
        self.node_cpu.with_label_values(&[node]).set(beat.cpu.busy);
        self.node_memory_used.with_label_values(&[node]).set(beat.memory.used_bytes as f64);
        self.node_memory_total.with_label_values(&[node]).set(beat.memory.total_bytes as f64);
        for (index, gpu) in beat.gpus.iter().enumerate() {
            self.gpu(node, &index.to_string(), gpu);
        }
        for worker in &beat.workers {
            self.worker(node, worker);
        }
    }

    fn gpu(&self, node: &str, index: &str, gpu: &Gpu) {
        if let Some(busy) = gpu.busy {
            self.gpu_busy.with_label_values(&[node, index]).set(busy);
        }
        self.gpu_memory_used.with_label_values(&[node, index]).set(gpu.memory_used_bytes as f64);
        self.gpu_memory_total.with_label_values(&[node, index]).set(gpu.memory_total_bytes as f64);
    }

    fn worker(&self, node: &str, worker: &WorkerBeat) {
        let labels = [node, role(worker.role), worker.name.as_str()];
        self.worker_queue.with_label_values(&labels).set(f64::from(worker.queue));
        self.worker_memory.with_label_values(&labels).set(worker.resident_memory_bytes as f64);
        for (phase, speed) in
            [("prefill", worker.rates.prefill_tokens_per_s), ("decode", worker.rates.decode_tokens_per_s)]
        {
            if speed > 0.0 {
                self.worker_speed.with_label_values(&[labels[0], labels[1], labels[2], phase]).set(speed);
            }
        }
    }
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}

fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::Alive => "alive",
        Standing::Suspect => "suspect",
        Standing::Lost => "lost",
        Standing::Draining => "draining",
    }
}
