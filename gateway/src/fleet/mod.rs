//! The workers this gateway drives: connections, pairing, live rates.

mod link;
mod node;
mod pairing;
mod seen;

pub(crate) use link::{DecodeLink, LoadShare, PrefillLink};
pub(crate) use pairing::Pairing;

use crate::metrics::Metrics;
use node::Node;
use shared::control::{ClusterKey, DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, Role};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Where a worker listens; `None` while it is not running. A supervisor changes it, a file fixes it.
pub(crate) type Address = watch::Receiver<Option<String>>;

/// All workers.
pub(crate) struct Fleet {
    decoders: Vec<Arc<Node<DecodeRequest, DecodeEvent>>>,
    prefills: Vec<Arc<Node<PrefillRequest, PrefillEvent>>>,
    /// One per decoder and prefill worker.
    pairings: Vec<Arc<Pairing>>,
}

impl Fleet {
    /// Starts one task per worker and one per pair; they end with `shutdown`.
    pub(crate) fn start(
        decode: Vec<Address>,
        prefill: Vec<Address>,
        key: &ClusterKey,
        tokenizer_digest: [u8; 32],
        shutdown: &CancellationToken,
    ) -> Arc<Self> {
        let decoders: Vec<_> = decode
            .into_iter()
            .map(|addr| Node::start(Role::Decode, addr, key.clone(), tokenizer_digest, shutdown.clone()))
            .collect();
        let prefills: Vec<_> = prefill
            .into_iter()
            .map(|addr| Node::start(Role::Prefill, addr, key.clone(), tokenizer_digest, shutdown.clone()))
            .collect();
        let pairings = decoders
            .iter()
            .flat_map(|d| {
                prefills.iter().map(move |p| Pairing::start(d.watch(), p.watch(), shutdown.clone()))
            })
            .collect();
        Arc::new(Self { decoders, prefills, pairings })
    }

    /// The least loaded connected decoder.
    pub(crate) fn decoder(&self) -> Option<Arc<DecodeLink>> {
        self.decoders.iter().filter_map(|n| n.link()).min_by_key(|l| l.load.requests())
    }

    /// A decoder, waiting for one that was there before and is coming back; `None` at once if none ever was.
    pub(crate) async fn decoder_within(&self, limit: Duration) -> Option<Arc<DecodeLink>> {
        if let Some(link) = self.decoder() {
            return Some(link);
        }
        if !self.decoders.iter().any(|n| n.was_connected()) {
            return None;
        }
        tokio::time::timeout(limit, self.any_decoder()).await.ok()?
    }

    /// Waits until any decoder is connected.
    pub(crate) async fn any_decoder(&self) -> Option<Arc<DecodeLink>> {
        if self.decoders.is_empty() {
            return std::future::pending().await;
        }
        let waiting = self.decoders.iter().map(|n| Box::pin(n.connected()));
        futures_util::future::select_all(waiting).await.0
    }

    /// The least loaded prefill worker that is paired with this decoder.
    pub(crate) fn prefill_for(&self, decoder: &DecodeLink) -> Option<(Arc<PrefillLink>, Arc<Pairing>)> {
        self.pairings
            .iter()
            .filter_map(|pairing| Some((pairing.prefill_for(decoder)?, pairing.clone())))
            .min_by_key(|(link, _)| link.load.tokens())
    }

    /// Like [`Self::prefill_for`], waiting for one to pair.
    pub(crate) async fn prefill_within(&self, decoder: &DecodeLink, limit: Duration) -> bool {
        if self.pairings.is_empty() {
            return false;
        }
        let waiting = self.pairings.iter().map(|p| Box::pin(p.paired_with(decoder)));
        tokio::time::timeout(limit, futures_util::future::select_all(waiting)).await.is_ok()
    }

    /// Whether a request would find a decoder.
    pub(crate) fn is_ready(&self) -> bool {
        self.decoders.iter().any(|n| n.link().is_some())
    }

    /// Brings the gauges up to date.
    pub(crate) fn observe(&self, metrics: &Metrics) {
        metrics.fleet(
            self.prefills.iter().filter(|n| n.link().is_some()).count(),
            self.decoders.iter().filter(|n| n.link().is_some()).count(),
            self.pairings.iter().filter(|p| p.is_paired()).count(),
        );
    }
}

/// An address that never changes.
pub(crate) fn fixed_address(addr: String) -> Address {
    watch::channel(Some(addr)).1
}
