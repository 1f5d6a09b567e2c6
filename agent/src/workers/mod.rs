//! The workers of this machine: asked over the control protocol how they are.

mod probe;
mod supervise;

pub(crate) use supervise::{Program, Supervisor};

use parking_lot::Mutex;
use shared::bus::WorkerBeat;
use shared::control::{ClusterKey, Role};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What is known of each worker; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Workers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    beats: Mutex<BTreeMap<Key, WorkerBeat>>,
    /// Told when a worker comes, goes, or is another one.
    changed: watch::Sender<()>,
    key: ClusterKey,
    advertise_host: Option<String>,
}

/// Role and address here.
type Key = (&'static str, String);

impl Workers {
    /// No worker yet. `advertise_host` is how others reach workers that are known here by a loopback address.
    pub(crate) fn new(key: ClusterKey, advertise_host: Option<String>) -> Self {
        Self(Arc::new(Shared { beats: Mutex::default(), changed: watch::channel(()).0, key, advertise_host }))
    }

    /// Follows a worker until `stop`.
    pub(crate) fn follow(&self, role: Role, addr: String, stop: CancellationToken) {
        let workers = self.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = probe::follow(&workers, role, &addr) => {}
                () = stop.cancelled() => workers.forget(role, &addr),
            }
        });
    }

    /// What to say of them.
    pub(crate) fn beats(&self) -> Vec<WorkerBeat> {
        self.0.beats.lock().values().cloned().collect()
    }

    /// Told when a heartbeat should not wait.
    pub(crate) fn watch(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    /// A worker answered.
    fn note(&self, role: Role, addr: &str, beat: WorkerBeat) {
        let old = self.0.beats.lock().insert(key(role, addr), beat.clone());
        let is_news = old.is_none_or(|old| {
            (old.reachable, old.fingerprint, old.name, old.version)
                != (true, beat.fingerprint, beat.name, beat.version)
        });
        if is_news {
            self.0.changed.send_replace(());
        }
    }

    /// A worker does not answer.
    fn lost(&self, role: Role, addr: &str) {
        let mut beats = self.0.beats.lock();
        let Some(beat) = beats.get_mut(&key(role, addr)) else { return };
        if std::mem::replace(&mut beat.reachable, false) {
            drop(beats);
            self.0.changed.send_replace(());
        }
    }

    fn forget(&self, role: Role, addr: &str) {
        if self.0.beats.lock().remove(&key(role, addr)).is_some() {
            self.0.changed.send_replace(());
        }
    }

    /// The address for others.
    fn advertised(&self, addr: &str) -> String {
        let (host, port) = addr.rsplit_once(':').unwrap_or((addr, ""));
        let is_local = host == "localhost"
            || host.trim_matches(['[', ']']).parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        match &self.0.advertise_host {
            Some(host) if is_local => format!("{host}:{port}"),
            _ => addr.to_owned(),
        }
    }
}

fn key(role: Role, addr: &str) -> Key {
    let role = match role {
        Role::Decode => "decode",
        Role::Prefill => "prefill",
    };
    (role, addr.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_advertised_under_another_name() {
        let workers = Workers::new(ClusterKey::loopback(), Some("spark.lan".into()));
        assert_eq!(workers.advertised("127.0.0.1:7001"), "spark.lan:7001");
        assert_eq!(workers.advertised("[::1]:7001"), "spark.lan:7001");
        assert_eq!(workers.advertised("10.0.0.7:7001"), "10.0.0.7:7001");
        assert_eq!(Workers::new(ClusterKey::loopback(), None).advertised("127.0.0.1:1"), "127.0.0.1:1");
    }
}
