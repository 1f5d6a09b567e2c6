//! Introduces a decoder to a prefill worker, again after every reconnect of either.

use super::link::{DecodeLink, PrefillLink};
use super::node::Watch;
use super::trust::Trust;
use parking_lot::Mutex;
use shared::control::{
    ControlError, DecodeEvent, DecodeRequest, PairSpec, PrefillEvent, PrefillReport, PrefillRequest,
};
use shared::wire::AbortCode;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Pairing may fetch every layer's projections over a slow link.
const PAIR_TIMEOUT: Duration = Duration::from_secs(300);
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Weight of a new measurement of the link.
const EWMA_WEIGHT: f64 = 0.5;
/// Shorter transfers say too little of the link: latency and buffers dominate them.
const LEAST_MEASURE_S: f64 = 0.25;

/// One decoder and one prefill worker.
pub(crate) struct Pairing {
    paired: Mutex<Option<Paired>>,
    /// Told of every change.
    changed: watch::Sender<()>,
    link_bytes_per_s: Mutex<f64>,
    trust: Mutex<Trust>,
}

/// Two connections that can bridge.
struct Paired {
    decode_serial: u64,
    prefill: Arc<PrefillLink>,
}

impl Pairing {
    pub(super) fn start(
        decode: Watch<DecodeRequest, DecodeEvent>,
        prefill: Watch<PrefillRequest, PrefillEvent>,
        changed: watch::Sender<()>,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let (link_bytes_per_s, trust) = (Mutex::new(0.0), Mutex::default());
        let pairing = Arc::new(Self { paired: Mutex::new(None), changed, link_bytes_per_s, trust });
        let task = pairing.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = task.keep_paired(decode, prefill) => {}
            }
            task.set(None);
        });
        pairing
    }

    /// The prefill worker's link, if it is paired with this very connection of the decoder.
    pub(super) fn prefill_for(&self, decoder: &DecodeLink) -> Option<Arc<PrefillLink>> {
        let paired = self.paired.lock();
        let paired = paired.as_ref().filter(|p| p.decode_serial == decoder.serial)?;
        Some(paired.prefill.clone()).filter(|l| !l.client.is_closed())
    }

    /// Whether the two can bridge.
    pub(super) fn is_live(&self) -> bool {
        self.paired.lock().as_ref().is_some_and(|p| !p.prefill.client.is_closed())
    }

    fn set(&self, paired: Option<Paired>) {
        let mut place = self.paired.lock();
        let changes = place.is_some() || paired.is_some();
        *place = paired;
        drop(place);
        if changes {
            self.changed.send_replace(());
        }
    }

    /// Introduces the two again, after the prefill worker has forgotten the decoder.
    ///
    /// # Errors
    /// The worker's refusal, or that the two are no longer connected.
    pub(crate) async fn renew(
        &self,
        decoder: &DecodeLink,
        prefill: &PrefillLink,
    ) -> Result<(), ControlError> {
        tracing::warn!(prefill = %prefill.hello.node, decode = %decoder.hello.node, "forgotten, pairing again");
        introduce(decoder, prefill).await
    }

    /// Bytes per second that transfers between the two reached; 0 when unknown.
    pub(crate) fn link_bytes_per_s(&self) -> f64 {
        *self.link_bytes_per_s.lock()
    }

    /// Whether transfers between the two have failed so often that other ways are better for now.
    pub(crate) fn is_resting(&self) -> bool {
        self.trust.lock().is_resting(Instant::now())
    }

    /// A request is about to try a transfer.
    pub(crate) fn tried(&self) {
        self.trust.lock().tried(Instant::now());
    }

    /// Learns from a transfer that came to nothing.
    pub(crate) fn failed(&self, code: AbortCode) {
        let rest = self.trust.lock().failed(code, Instant::now());
        if let (Some(rest), Some(paired)) = (rest, &*self.paired.lock()) {
            let (prefill, rest_s) = (&paired.prefill.hello.node, rest.as_secs());
            tracing::warn!(%prefill, %code, rest_s, "its transfers fail again and again: no bridges for a while");
        }
    }

    /// Learns from a finished transfer.
    pub(crate) fn learn(&self, report: &PrefillReport) {
        self.trust.lock().succeeded();
        let mut rate = self.link_bytes_per_s.lock();
        *rate = learned(*rate, report);
    }

    async fn keep_paired(
        &self,
        mut decode: Watch<DecodeRequest, DecodeEvent>,
        mut prefill: Watch<PrefillRequest, PrefillEvent>,
    ) {
        loop {
            let d = decode.borrow_and_update().link.clone();
            let p = prefill.borrow_and_update().link.clone();
            let introduce = async {
                let (Some(d), Some(p)) = (d, p) else { return std::future::pending().await };
                loop {
                    match introduce(&d, &p).await {
                        Ok(()) => {
                            // What failed between the connections before says nothing of these.
                            self.trust.lock().succeeded();
                            self.set(Some(Paired { decode_serial: d.serial, prefill: p }));
                            break;
                        }
                        Err(error) => {
                            tracing::warn!(prefill = %p.hello.node, decode = %d.hello.node, %error, "not paired");
                            tokio::time::sleep(RETRY_DELAY).await;
                        }
                    }
                }
                std::future::pending::<()>().await;
            };
            let ended = tokio::select! {
                () = introduce => false,
                changed = decode.changed() => changed.is_err(),
                changed = prefill.changed() => changed.is_err(),
            };
            self.set(None);
            if ended {
                return;
            }
        }
    }
}

async fn introduce(decode: &DecodeLink, prefill: &PrefillLink) -> Result<(), ControlError> {
    let Some(cache) = decode.hello.cache.clone() else {
        return Err(ControlError::Unexpected("the decoder publishes no cache layout".to_owned()));
    };
    if decode.hello.vocab_size != prefill.hello.vocab_size {
        let (d, p) = (decode.hello.vocab_size, prefill.hello.vocab_size);
        return Err(ControlError::Unexpected(format!("vocabularies of {d} and {p} tokens")));
    }
    let control_addr = control_addr(&decode.addr, &cache.bulk_addr);
    let spec = PairSpec { cache, tokenizer_digest: decode.hello.tokenizer_digest, control_addr };
    match prefill.client.call(&PrefillRequest::Pair(spec), PAIR_TIMEOUT).await? {
        PrefillEvent::Paired { foreign_layers } => {
            tracing::info!(prefill = %prefill.hello.node, decode = %decode.hello.node, foreign_layers, "paired");
            Ok(())
        }
        PrefillEvent::Error(error) => Err(ControlError::Unexpected(error.message)),
        other => Err(ControlError::Unexpected(format!("{other:?}"))),
    }
}

/// The link's rate in bytes per second (0: unknown) after a transfer, from what was known before.
///
/// Sending overlaps computing, so what a transfer reached is a lower bound of what the link can do. Only where
/// most of the time was spent sending, after the last layer, was the link the bottleneck and the rate its own.
fn learned(known: f64, report: &PrefillReport) -> f64 {
    let seconds = (report.prefill_ms + report.transfer_ms) / 1000.0;
    if seconds <= 0.0 || report.payload_bytes == 0 {
        return known;
    }
    let new = report.payload_bytes as f64 / seconds;
    let is_measure = seconds >= LEAST_MEASURE_S;
    let is_link_bound = report.transfer_ms > report.prefill_ms;
    match (known > 0.0, is_measure) {
        (false, false) => known,
        (false, true) => new,
        (true, true) if is_link_bound => known + EWMA_WEIGHT * (new - known),
        (true, _) => known.max(new),
    }
}

/// The decoder's control address as the prefill worker sees it. A gateway beside the decoder knows it by a
/// loopback address; the host that the decoder advertises for its frames is then the one to use.
fn control_addr(known_as: &str, bulk_addr: &str) -> String {
    let advertised = bulk_addr.rsplit_once(':');
    match (known_as.rsplit_once(':'), advertised) {
        (Some((known, port)), Some((host, _))) if is_loopback(known, known_as) => format!("{host}:{port}"),
        _ => known_as.to_owned(),
    }
}

fn is_loopback(host: &str, addr: &str) -> bool {
    host.eq_ignore_ascii_case("localhost")
        || addr.parse::<SocketAddr>().is_ok_and(|addr| addr.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::control::Rates;
    use shared::hexbytes::Hex;

    #[test]
    fn a_loopback_address_is_replaced_by_the_advertised_host() {
        assert_eq!(control_addr("127.0.0.1:7001", "10.0.0.5:7002"), "10.0.0.5:7001");
        assert_eq!(control_addr("[::1]:7001", "10.0.0.5:7002"), "10.0.0.5:7001");
        assert_eq!(control_addr("localhost:7001", "10.0.0.5:7002"), "10.0.0.5:7001");
        assert_eq!(control_addr("10.0.0.9:7001", "10.0.0.5:7002"), "10.0.0.9:7001");
        assert_eq!(control_addr("mac.local:7001", "10.0.0.5:7002"), "mac.local:7001");
    }

    #[test]
    fn only_a_transfer_bound_by_the_link_lowers_its_rate() {
        let report = |prefill_ms, transfer_ms, payload_bytes| PrefillReport {
            computed_tokens: 1,
            reused_tokens: 0,
            queue_ms: 0.0,
            prefill_ms,
            transfer_ms,
            payload_bytes,
            token_end: 1,
            digest: Hex([0; 32]),
            rates: Rates::default(),
        };
        let close = |a: f64, b: f64| (a - b).abs() < 1e-6 * b.abs().max(1.0);
        // Bound by the link: 1000 bytes in 1 s.
        assert!(close(learned(3000.0, &report(400.0, 600.0, 1000)), 2000.0));
        // Bound by computing: a lower bound.
        assert!(close(learned(3000.0, &report(900.0, 100.0, 1000)), 3000.0));
        assert!(close(learned(3000.0, &report(900.0, 100.0, 5000)), 5000.0));
        // Too short to lower the rate or to be the first one.
        assert!(close(learned(3000.0, &report(1.0, 99.0, 1)), 3000.0));
        assert!(close(learned(0.0, &report(1.0, 99.0, 1)), 0.0));
        assert!(close(learned(0.0, &report(900.0, 100.0, 1000)), 1000.0));
        assert!(close(learned(7.0, &report(0.0, 0.0, 1000)), 7.0));
    }
}
