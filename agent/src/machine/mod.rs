//! The machine that the agent runs on, looked at every few seconds on a thread of its own: a driver that hangs must
//! not silence the heartbeat.

mod gpu;

use shared::bus::{Cpu, Gpu, HEARTBEAT_INTERVAL, Memory};
use std::time::Duration;
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};
use tokio::sync::watch;

/// Longest wait for the first look, before the first heartbeat.
const FIRST_LOOK: Duration = Duration::from_secs(2);

/// What was seen last.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Machine {
    pub(crate) host: String,
    pub(crate) os: String,
    pub(crate) cpu: Cpu,
    pub(crate) memory: Memory,
    pub(crate) gpus: Vec<Gpu>,
}

impl Machine {
    /// Starts looking. Ends when nobody listens any more.
    pub(crate) async fn watch() -> watch::Receiver<Self> {
        let (tx, mut rx) = watch::channel(Self::default());
        let started = std::thread::Builder::new().name("machine".into()).spawn(move || look(&tx));
        if let Err(error) = started {
            tracing::error!(%error, "no thread to look at the machine");
        }
        // A machine without values is better than none, if a driver hangs at once.
        let _ = tokio::time::timeout(FIRST_LOOK, rx.changed()).await;
        rx
    }
}

fn look(to: &watch::Sender<Machine>) {
    let cpu = CpuRefreshKind::nothing().with_usage();
    let kinds = RefreshKind::nothing().with_cpu(cpu).with_memory(MemoryRefreshKind::nothing().with_ram());
    let mut system = match System::new_with_specifics(kinds) {
        Ok(system) => system,
        Err(error) => return tracing::error!(%error, "this machine can't be looked at"),
    };
    let gpus = gpu::Gpus::open();
    let host = System::host_name().unwrap_or_default();
    let os = System::long_os_version().unwrap_or_else(|_| std::env::consts::OS.to_owned());
    while !to.is_closed() {
        system.refresh_cpu_usage();
        system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
        let memory = Memory { total_bytes: system.total_memory(), used_bytes: system.used_memory() };
        let model = system.cpus().first().map(|c| c.brand().trim().to_owned()).unwrap_or_default();
        let cpu = Cpu {
            model,
            cores: u32::try_from(system.cpus().len()).unwrap_or(u32::MAX),
            load_1m: System::load_average().map_or(0.0, |load| load.one),
            busy: (f64::from(system.global_cpu_usage()) / 100.0).clamp(0.0, 1.0),
        };
        let gpus = gpus.look(memory);
        to.send_replace(Machine { host: host.clone(), os: os.clone(), cpu, memory, gpus });
        std::thread::sleep(HEARTBEAT_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn this_machine_has_a_processor_and_memory() {
        let machine = Machine::watch().await.borrow().clone();
        assert!(machine.cpu.cores >= 1 && !machine.os.is_empty(), "{machine:?}");
        assert!(
            machine.memory.total_bytes > 1 << 26 && machine.memory.used_bytes < machine.memory.total_bytes
        );
    }
}
