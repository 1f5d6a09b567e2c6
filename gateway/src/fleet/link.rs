//! One live connection to a worker.

use super::load::Load;
use super::pairs::hash;
use super::seen::SeenBlocks;
use parking_lot::Mutex;
use shared::control::{
    ControlClient, DecodeEvent, DecodeRequest, Hello, PrefillEvent, PrefillRequest, Rates,
};
use shared::keys::BlockKey;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A connection to a decode worker.
pub(crate) type DecodeLink = Link<DecodeRequest, DecodeEvent>;
/// A connection to a prefill worker.
pub(crate) type PrefillLink = Link<PrefillRequest, PrefillEvent>;

/// A connected worker. A new connection is a new link.
pub(crate) struct Link<Req, Ev> {
    /// Requests go here.
    pub(crate) client: ControlClient<Req, Ev>,
    /// What the worker said of itself.
    pub(crate) hello: Hello,
    /// Where it was reached.
    pub(crate) addr: String,
    /// Different for every connection of this process.
    pub(crate) serial: u64,
    /// Hash of who it is, the same for every gateway.
    pub(crate) identity: u64,
    /// Decoders: the key before the first block.
    pub(crate) root: Option<BlockKey>,
    /// What this gateway and others have asked of it.
    pub(crate) load: Arc<Load>,
    /// Blocks that it has read (prefill) or holds (decode), as far as this gateway knows.
    pub(crate) seen: SeenBlocks,
    rates: Mutex<Rates>,
}

impl<Req, Ev> Link<Req, Ev> {
    pub(super) fn new(client: ControlClient<Req, Ev>, hello: Hello, addr: String) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let rates = Mutex::new(hello.rates);
        let identity = identity(&hello, &addr);
        let root = hello.cache.as_ref().map(|c| BlockKey::root(&c.fingerprint.0, &c.layout.digest()));
        Self {
            client,
            hello,
            addr,
            serial,
            identity,
            root,
            load: Arc::default(),
            seen: SeenBlocks::default(),
            rates,
        }
    }

    /// The latest speeds.
    pub(crate) fn rates(&self) -> Rates {
        *self.rates.lock()
    }

    /// Takes newly measured speeds; a zero keeps what was known.
    pub(crate) fn learn(&self, new: Rates) {
        let mut rates = self.rates.lock();
        if new.prefill_tokens_per_s > 0.0 {
            rates.prefill_tokens_per_s = new.prefill_tokens_per_s;
        }
        if new.decode_tokens_per_s > 0.0 {
            rates.decode_tokens_per_s = new.decode_tokens_per_s;
        }
    }
}

/// A decoder advertises one bulk address to everybody; a prefill worker is known by where it listens.
fn identity(hello: &Hello, addr: &str) -> u64 {
    match &hello.cache {
        Some(cache) => hash(&format!("{} {} {}", hello.node, cache.bulk_addr, cache.fingerprint)),
        None => hash(&format!("{} {addr}", hello.node)),
    }
}
