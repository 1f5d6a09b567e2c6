//! The bounded queue between the engine and the network.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shared::layout::CacheLayout;
use tokio::sync::mpsc;

use crate::ops::{Piece, Sink, SinkClosed};

/// Payload bytes that may wait to be sent. Together with what the receiver's credit allows to be under way this bounds a
/// transfer's memory, whatever the length of the prompt.
const WAITING_BYTES: u64 = 24 << 20;
/// Even the largest pieces may overlap with computing.
const MIN_WAITING_PIECES: u64 = 2;

/// Shorter transfers say more about buffers than about the link.
const MIN_MEASURED_BYTES: u64 = 1 << 20;
/// Weight of the newest transfer in the link's speed.
const LINK_WEIGHT: f64 = 0.3;

/// Bytes waiting, over all transfers of the process, and how fast they leave.
#[derive(Debug, Default)]
pub(super) struct Gauge {
    now: AtomicU64,
    peak: AtomicU64,
    /// Bits of an `f64`.
    link_bytes_per_s: AtomicU64,
}

/// The engine's end.
pub(super) struct Outbox {
    pieces: mpsc::Sender<Waiting>,
    gauge: Arc<Gauge>,
}

/// A piece in the queue; counted until it is dropped.
pub(super) struct Waiting {
    /// The piece.
    pub(super) piece: Piece,
    bytes: u64,
    gauge: Arc<Gauge>,
}

impl Outbox {
    /// A queue that is as long as the layout's pieces allow.
    pub(super) fn new(layout: &CacheLayout, gauge: Arc<Gauge>) -> (Self, mpsc::Receiver<Waiting>) {
        let layer_bytes =
            layout.layers.iter().map(|l| l.parts().iter().map(|&p| l.bytes_per_token(p)).sum::<u64>());
        let piece_bytes = layer_bytes.max().unwrap_or(1).max(1) * u64::from(layout.block_tokens);
        let length = (WAITING_BYTES / piece_bytes).max(MIN_WAITING_PIECES);
        let (pieces, queue) = mpsc::channel(usize::try_from(length).unwrap_or(usize::MAX));
        (Self { pieces, gauge }, queue)
    }
}

impl Sink for Outbox {
    fn deliver(&self, piece: Piece) -> Result<(), SinkClosed> {
        let bytes = (piece.keys.len() + piece.values.len()) as u64;
        self.gauge.add(bytes);
        let waiting = Waiting { piece, bytes, gauge: self.gauge.clone() };
        self.pieces.blocking_send(waiting).map_err(|_| SinkClosed)
    }
}

impl Gauge {
    /// The largest number of bytes that ever waited.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Speed of the latest transfers; 0 before the first.
    pub(super) fn link_bytes_per_s(&self) -> f64 {
        f64::from_bits(self.link_bytes_per_s.load(Ordering::Relaxed))
    }

    /// Notes a transfer: its payload, and the time in which some of it waited for the link or the receiver.
    pub(super) fn sent(&self, payload_bytes: u64, busy: Duration) {
        if payload_bytes < MIN_MEASURED_BYTES {
            return;
        }
        let newest = payload_bytes as f64 / busy.as_secs_f64().max(1e-6);
        let old = self.link_bytes_per_s();
        let value = if old == 0.0 { newest } else { old + LINK_WEIGHT * (newest - old) };
        // Two transfers that end at once: one of them counts.
        self.link_bytes_per_s.store(value.to_bits(), Ordering::Relaxed);
    }

    fn add(&self, bytes: u64) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.gauge.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use shared::layout::{Dtype, LayerCache};

    #[test]
    fn waiting_bytes_are_bounded_and_counted() {
        let layer = LayerCache::Full { n_kv_heads: 8, head_dim: 128, dtype: Dtype::F32 };
        let gauge = Arc::new(Gauge::default());
        let (outbox, mut queue) = Outbox::new(&CacheLayout::uniform(32, layer, 256), gauge.clone());
        let half = Bytes::from(vec![0; 1 << 20]);
        let piece = Piece { layer: 0, tokens: 0..256, keys: half.clone(), values: half };
        let engine = std::thread::spawn(move || (0..100).try_for_each(|_| outbox.deliver(piece.clone())));
        let mut got = 0;
        while queue.blocking_recv().is_some() {
            got += 1;
        }
        engine.join().unwrap().unwrap();
        assert_eq!(got, 100);
        // The queue, the piece that the engine is holding out, and the one just taken.
        assert!(gauge.peak_bytes() <= WAITING_BYTES + (4 << 20), "{}", gauge.peak_bytes());
        assert_eq!(gauge.now.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_link_is_measured_by_transfers_that_fill_it() {
        let gauge = Gauge::default();
        gauge.sent(1000, Duration::from_millis(1));
        assert_eq!(gauge.link_bytes_per_s(), 0.0);
        gauge.sent(10 << 20, Duration::from_secs(1));
        gauge.sent(20 << 20, Duration::from_secs(1));
        assert!((gauge.link_bytes_per_s() / f64::from(13 << 20) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_closed_queue_is_told_to_the_engine() {
        let layer = LayerCache::Full { n_kv_heads: 1, head_dim: 1, dtype: Dtype::F32 };
        let (outbox, queue) = Outbox::new(&CacheLayout::uniform(1, layer, 256), Arc::default());
        drop(queue);
        let piece = Piece { layer: 0, tokens: 0..1, keys: Bytes::new(), values: Bytes::new() };
        assert_eq!(outbox.deliver(piece), Err(SinkClosed));
    }
}
