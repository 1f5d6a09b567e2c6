//! The fleet as people see it.

use super::link::Link;
use super::members::{Member, Standing};
use super::slot::Slot;
use super::{Fleet, Pairing};
use serde::Serialize;
use serde::de::DeserializeOwned;
use shared::control::{Rates, Role};
use std::sync::Arc;

/// A worker as this gateway sees it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct WorkerView {
    /// What it does.
    pub(crate) role: Role,
    /// Its name in the fleet.
    pub(crate) id: String,
    /// Where it listens, while it does.
    pub(crate) control_addr: Option<String>,
    /// Whether new requests go to it.
    pub(crate) standing: Standing,
    /// Whether this gateway is connected to it.
    pub(crate) connected: bool,
    /// Everybody's requests, as far as known.
    pub(crate) requests: u64,
    /// This gateway's.
    pub(crate) requests_here: u64,
    /// What it says of itself, while connected.
    #[serde(flatten)]
    pub(crate) about: Option<About>,
    /// Workers of the other kind that it can bridge with.
    pub(crate) paired_with: Vec<String>,
}

/// What a worker says of itself.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct About {
    /// Name in verdicts.
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) engine: String,
    pub(crate) model: String,
    /// Decode workers: identity of the cache, in hex.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fingerprint: Option<String>,
    /// Speeds as last told.
    pub(crate) rates: Rates,
}

impl Fleet {
    /// All workers, decoders first, by name.
    pub(crate) fn view(&self) -> Vec<WorkerView> {
        let (workers, pairs) = (self.workers.read(), self.pairs.read());
        let live = |pairing: &Arc<Pairing>| pairing.is_live();
        let decoders = workers.decoders.iter().map(|(id, slot)| {
            let peers = pairs.of(id).filter(|(_, p)| live(p)).map(|(prefill, _)| prefill.clone()).collect();
            view(Role::Decode, id, slot, peers)
        });
        let prefills = workers.prefills.iter().map(|(id, slot)| {
            let with = |d: &&String| pairs.of(d).any(|(prefill, p)| prefill == id && live(p));
            view(Role::Prefill, id, slot, workers.decoders.keys().filter(with).cloned().collect())
        });
        decoders.chain(prefills).collect()
    }

    /// Connected prefill and decode workers.
    pub(crate) fn connected(&self) -> (u32, u32) {
        let workers = self.workers.read();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let prefills = workers.prefills.values().filter(|s| s.node.link().is_some()).count();
        let decoders = workers.decoders.values().filter(|s| s.node.link().is_some()).count();
        (count(prefills), count(decoders))
    }
}

fn view<Req, Ev>(role: Role, id: &str, slot: &Slot<Req, Ev>, paired_with: Vec<String>) -> WorkerView
where
    Req: Serialize + Send + Sync + 'static,
    Ev: DeserializeOwned + Send + 'static,
{
    let Member { addr, standing, reported, .. } = slot.member();
    let link = slot.node.link();
    let heard = reported.map_or(0, |r| u64::from(r.requests));
    WorkerView {
        role,
        id: id.to_owned(),
        control_addr: addr,
        standing,
        connected: link.is_some(),
        requests: link.as_ref().map_or(heard, |l| l.load.all_requests()),
        requests_here: link.as_ref().map_or(0, |l| l.load.requests()),
        about: link.as_deref().map(about),
        paired_with,
    }
}

fn about<Req, Ev>(link: &Link<Req, Ev>) -> About {
    let hello = &link.hello;
    About {
        name: hello.node.clone(),
        version: hello.version.clone(),
        engine: hello.engine.clone(),
        model: hello.model.clone(),
        fingerprint: hello.cache.as_ref().map(|c| c.fingerprint.to_string()),
        rates: link.rates(),
    }
}
