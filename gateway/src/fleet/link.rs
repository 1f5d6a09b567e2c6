//! One live connection to a worker.

use super::seen::SeenBlocks;
use parking_lot::Mutex;
use shared::control::{
    ControlClient, DecodeEvent, DecodeRequest, Hello, PrefillEvent, PrefillRequest, Rates,
};
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
    /// What this gateway has asked of it.
    pub(crate) load: Arc<Load>,
    /// Prefill workers: what they have read.
    pub(crate) seen: SeenBlocks,
    rates: Mutex<Rates>,
}

impl<Req, Ev> Link<Req, Ev> {
    pub(super) fn new(client: ControlClient<Req, Ev>, hello: Hello, addr: String) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let rates = Mutex::new(hello.rates);
        Self { client, hello, addr, serial, load: Arc::default(), seen: SeenBlocks::default(), rates }
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

/// Requests and prompt tokens that a worker has been asked for and that are not done.
#[derive(Debug, Default)]
pub(crate) struct Load {
    requests: AtomicU64,
    tokens: AtomicU64,
}

impl Load {
    /// Requests not done.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Prompt tokens not done.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// Counts a request until the answer is dropped.
    pub(crate) fn take(self: &Arc<Self>, tokens: u32) -> LoadShare {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.tokens.fetch_add(u64::from(tokens), Ordering::Relaxed);
        LoadShare { load: self.clone(), tokens }
    }
}

/// One request's part of a worker's load.
#[derive(Debug)]
pub(crate) struct LoadShare {
    load: Arc<Load>,
    tokens: u32,
}

impl Drop for LoadShare {
    fn drop(&mut self) {
        self.load.requests.fetch_sub(1, Ordering::Relaxed);
        self.load.tokens.fetch_sub(u64::from(self.tokens), Ordering::Relaxed);
    }
}
