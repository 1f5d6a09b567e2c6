//! Heartbeats: every few seconds, and at once when something changed.

use crate::machine::Machine;
use crate::state::State;
use crate::workers::Workers;
use shared::bus::{Bus, HEARTBEAT_INTERVAL, Heartbeat, NodeId, NodeState, subjects, unix_now_ms};
use shared::hexbytes::Hex;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;

/// Changes that come together are told together.
const SETTLE: Duration = Duration::from_millis(50);
/// A wait that took this much longer than it should, by either clock, means that the machine slept.
const SLEPT: Duration = Duration::from_secs(10);

/// What a heartbeat is made of.
pub(crate) struct Beats {
    pub(crate) node: NodeId,
    pub(crate) bus: Bus,
    pub(crate) state: State,
    pub(crate) machine: watch::Receiver<Machine>,
    pub(crate) workers: Workers,
    pub(crate) commands_allowed: bool,
}

impl Beats {
    /// Speaks until the state is [`NodeState::Leaving`], which is the last thing said.
    pub(crate) async fn run(self) {
        let boot_id = Hex::random();
        let started = Instant::now();
        let mut connects = self.bus.connects();
        let (mut state, mut workers) = (self.state.watch(), self.workers.watch());
        let mut sequence = 0;
        let mut looked = (Instant::now(), SystemTime::now());
        loop {
            let now = *state.borrow_and_update();
            workers.borrow_and_update();
            connects.borrow_and_update();
            // A message that waits for the server would only be old when it gets there.
            if self.bus.is_connected() {
                sequence += 1;
                let beat = self.beat(boot_id, sequence, started.elapsed());
                if let Err(error) =
                    self.bus.client.publish(subjects::heartbeat(&self.node), beat.encode()).await
                {
                    tracing::warn!(%error, "heartbeat not sent");
                }
            }
            if now == NodeState::Leaving {
                // The process ends next: what is written must have left.
                let _ = tokio::time::timeout(Duration::from_secs(2), self.bus.client.flush()).await;
                return;
            }
            let due = tokio::select! {
                () = tokio::time::sleep(HEARTBEAT_INTERVAL) => true,
                _ = state.changed() => false,
                _ = workers.changed() => false,
                _ = connects.changed() => false,
            };
            if !due {
                tokio::time::sleep(SETTLE).await;
            }
            // From one look to the next, so that no moment of the round is without a watch.
            let (mono, wall) = std::mem::replace(&mut looked, (Instant::now(), SystemTime::now()));
            if slept(HEARTBEAT_INTERVAL, mono.elapsed(), wall.elapsed().unwrap_or_default()) {
                tracing::info!("this machine slept; connecting again");
                // A connection that is as dead as it looks alive would be noticed only after some pings. One that has
                // changed meanwhile is new already, or on its way.
                if due {
                    let _ = self.bus.client.force_reconnect().await;
                }
            }
        }
    }

    fn beat(&self, boot_id: Hex<16>, sequence: u64, uptime: Duration) -> Heartbeat {
        let machine = self.machine.borrow().clone();
        Heartbeat {
            node: self.node.clone(),
            boot_id,
            sequence,
            sent_at_ms: unix_now_ms(),
            uptime_s: uptime.as_secs(),
            state: self.state.current(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: machine.host,
            os: machine.os,
            arch: std::env::consts::ARCH.to_owned(),
            cpu: machine.cpu,
            memory: machine.memory,
            gpus: machine.gpus,
            workers: self.workers.beats(),
            commands_allowed: self.commands_allowed,
        }
    }
}

/// Whether the machine slept during a wait. The monotonic clock may stand still in sleep, the wall clock does not; a
/// wall clock that was set is not sleep but costs only a reconnect.
fn slept(expected: Duration, mono: Duration, wall: Duration) -> bool {
    mono.max(wall) > expected + SLEPT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_is_seen_on_either_clock() {
        let s = Duration::from_secs;
        assert!(!slept(s(5), s(5), s(5)));
        assert!(!slept(s(5), s(6), s(0)), "a clock set back");
        assert!(slept(s(5), s(5), s(600)), "the monotonic clock stood still");
        assert!(slept(s(5), s(600), s(600)), "the process was stopped");
    }
}
