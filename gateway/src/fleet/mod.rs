//! The workers this gateway drives: who is there, connections, pairing, live rates and load.

mod candidates;
mod link;
mod load;
mod members;
mod node;
mod pairing;
mod pairs;
mod seen;
mod slot;
mod trust;
mod view;

pub(crate) use candidates::Candidate;
pub(crate) use link::{DecodeLink, PrefillLink};
pub(crate) use load::LoadShare;
pub(crate) use members::{Change, Discovery, Member, Reported, Standing, both, fixed, supervised};
pub(crate) use pairing::Pairing;
pub(crate) use view::WorkerView;

use crate::metrics::Metrics;
use node::Node;
use pairs::Pairs;
use parking_lot::RwLock;
use shared::control::{ClusterKey, DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, Role};
use slot::Slot;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Pause after something changed, in which more changes are gathered.
const SETTLE: Duration = Duration::from_millis(20);
/// The same for more than [`MANY`] prefill workers.
const SETTLE_MANY: Duration = Duration::from_millis(250);
const MANY: usize = 64;
/// How often lost workers are looked at.
const SWEEP_INTERVAL: Duration = Duration::from_secs(30);
/// A worker that neither its machine nor we have reached for this long has left.
const FORGET_LOST: Duration = Duration::from_secs(600);

type DecodeSlot = Slot<DecodeRequest, DecodeEvent>;
type PrefillSlot = Slot<PrefillRequest, PrefillEvent>;

/// All workers.
pub(crate) struct Fleet {
    workers: RwLock<Workers>,
    /// One per decoder and prefill worker that shall bridge.
    pairs: RwLock<Pairs>,
    /// Told whenever a member, a connection or a pairing has come or gone.
    changed: watch::Sender<()>,
    /// A decoder was connected that is no longer a member.
    had_decoder: AtomicBool,
    key: ClusterKey,
    tokenizer_digest: [u8; 32],
    shutdown: CancellationToken,
}

/// Members by name.
#[derive(Default)]
struct Workers {
    decoders: BTreeMap<String, Arc<DecodeSlot>>,
    prefills: BTreeMap<String, Arc<PrefillSlot>>,
}

impl Fleet {
    /// Connects to whoever `discovery` names, now and later, until `shutdown`.
    pub(crate) fn start(
        mut discovery: Discovery,
        key: &ClusterKey,
        tokenizer_digest: [u8; 32],
        shutdown: &CancellationToken,
    ) -> Arc<Self> {
        let fleet = Arc::new(Self {
            workers: RwLock::default(),
            pairs: RwLock::default(),
            changed: watch::channel(()).0,
            had_decoder: AtomicBool::new(false),
            key: key.clone(),
            tokenizer_digest,
            shutdown: shutdown.clone(),
        });
        while let Ok(change) = discovery.try_recv() {
            fleet.apply(change);
        }
        fleet.pair_up();
        tokio::spawn(fleet.clone().follow(discovery));
        tokio::spawn(load::poll(fleet.clone()));
        fleet
    }

    /// Waits for a decoder that takes new requests; forever if none comes.
    pub(crate) async fn any_decoder(&self) -> Option<Arc<DecodeLink>> {
        self.when(|| self.decoder()).await
    }

    /// A decoder that takes new requests, the least loaded of the best.
    pub(crate) fn decoder(&self) -> Option<Arc<DecodeLink>> {
        let workers = self.workers.read();
        let usable = workers.decoders.values().filter_map(|slot| slot.usable());
        usable.min_by_key(|(tier, link)| (*tier, link.load.requests())).map(|(_, link)| link)
    }

    /// All connected decoders, also those that take nothing new.
    pub(crate) fn decoders(&self) -> Vec<Arc<DecodeLink>> {
        self.workers.read().decoders.values().filter_map(|slot| slot.node.link()).collect()
    }

    /// Waits until some decoder and some prefill worker could bridge.
    pub(crate) async fn bridge_within(&self, limit: Duration) -> bool {
        if self.pairs.read().is_empty() {
            return false;
        }
        let paired = self.when(|| self.pairs.read().iter().any(|p| p.is_live()).then_some(()));
        tokio::time::timeout(limit, paired).await.is_ok()
    }

    /// Whether a request would find a decoder.
    pub(crate) fn is_ready(&self) -> bool {
        self.workers.read().decoders.values().any(|slot| slot.usable().is_some())
    }

    /// Brings the gauges up to date.
    pub(crate) fn observe(&self, metrics: &Metrics) {
        let (prefills, decoders) = self.connected();
        let pairs = self.pairs.read().iter().filter(|p| p.is_live()).count();
        metrics.fleet(prefills as usize, decoders as usize, pairs);
    }

    /// Waits until `check` gives a value, looking again after every change.
    async fn when<T>(&self, check: impl Fn() -> Option<T>) -> Option<T> {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if let Some(found) = check() {
                return Some(found);
            }
            // The sender lives as long as this fleet.
            changed.changed().await.ok()?;
        }
    }

    /// Whether a decoder was ever connected.
    fn had_decoder(&self) -> bool {
        self.had_decoder.load(Ordering::Relaxed)
            || self.workers.read().decoders.values().any(|slot| slot.node.was_connected())
    }

    async fn follow(self: Arc<Self>, mut discovery: Discovery) {
        let mut changed = self.changed.subscribe();
        let mut open = true;
        let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                change = discovery.recv(), if open => match change {
                    Some(change) => {
                        self.apply(change);
                        while let Ok(change) = discovery.try_recv() {
                            self.apply(change);
                        }
                    }
                    None => open = false,
                },
                _ = sweep.tick() => self.forget_lost(),
                _ = changed.changed() => {
                    let many = self.workers.read().prefills.len() > MANY;
                    tokio::time::sleep(if many { SETTLE_MANY } else { SETTLE }).await;
                    changed.borrow_and_update();
                    self.pair_up();
                }
            }
        }
    }

    fn apply(&self, change: Change) {
        let mut workers = self.workers.write();
        let changed = match change {
            Change::Present(member) if member.role == Role::Decode => {
                match workers.decoders.get(&member.id) {
                    Some(slot) => slot.update(member),
                    None => {
                        tracing::info!(role = ?member.role, id = member.id, addr = ?member.addr, "worker joins");
                        let slot = Slot::new(member.clone(), &self.shutdown, |addr, stop| {
                            self.node(Role::Decode, addr, stop)
                        });
                        workers.decoders.insert(member.id, Arc::new(slot)).is_none()
                    }
                }
            }
            Change::Present(member) => match workers.prefills.get(&member.id) {
                Some(slot) => slot.update(member),
                None => {
                    tracing::info!(role = ?member.role, id = member.id, addr = ?member.addr, "worker joins");
                    let slot = Slot::new(member.clone(), &self.shutdown, |addr, stop| {
                        self.node(Role::Prefill, addr, stop)
                    });
                    workers.prefills.insert(member.id, Arc::new(slot)).is_none()
                }
            },
            Change::Absent(Role::Decode, id) => workers.decoders.remove(&id).is_some_and(|slot| {
                tracing::info!(role = ?Role::Decode, id, "worker leaves");
                self.had_decoder.fetch_or(slot.node.was_connected(), Ordering::Relaxed);
                true
            }),
            Change::Absent(Role::Prefill, id) => {
                tracing::info!(role = ?Role::Prefill, id, "worker leaves");
                workers.prefills.remove(&id).is_some()
            }
        };
        drop(workers);
        if changed {
            self.changed.send_replace(());
        }
    }

    /// Workers whose machine is gone stay as long as they can be reached.
    fn forget_lost(&self) {
        let mut workers = self.workers.write();
        let before = workers.decoders.len() + workers.prefills.len();
        workers.decoders.retain(|_, slot| !slot.is_lost_for(FORGET_LOST));
        workers.prefills.retain(|_, slot| !slot.is_lost_for(FORGET_LOST));
        let forgotten = before - workers.decoders.len() - workers.prefills.len();
        drop(workers);
        if forgotten > 0 {
            self.had_decoder.store(true, Ordering::Relaxed);
            tracing::info!(forgotten, "workers of machines that are gone leave");
            self.changed.send_replace(());
        }
    }

    fn node<Req, Ev>(
        &self,
        role: Role,
        addr: watch::Receiver<Option<String>>,
        stop: CancellationToken,
    ) -> Arc<Node<Req, Ev>>
    where
        Req: serde::Serialize + Send + Sync + 'static,
        Ev: serde::de::DeserializeOwned + Send + 'static,
    {
        Node::start(role, addr, self.key.clone(), self.tokenizer_digest, self.changed.clone(), stop)
    }

    /// Starts and ends pairings as the members want it.
    fn pair_up(&self) {
        let workers = self.workers.read();
        self.pairs.write().follow(&workers, &self.changed, &self.shutdown);
    }
}
