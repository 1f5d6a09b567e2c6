//! Introduces a decoder to a prefill worker, again after every reconnect of either.

use super::link::{DecodeLink, PrefillLink};
use super::node::Watch;
use parking_lot::Mutex;
use shared::control::{
    ControlError, DecodeEvent, DecodeRequest, PairSpec, PrefillEvent, PrefillReport, PrefillRequest,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Pairing may fetch every layer's projections over a slow link.
const PAIR_TIMEOUT: Duration = Duration::from_secs(300);
const RETRY_DELAY: Duration = Duration::from_secs(5);
/// Weight of a new measurement of the link.
const EWMA_WEIGHT: f64 = 0.5;

/// One decoder and one prefill worker.
pub(crate) struct Pairing {
    paired: watch::Sender<Option<Paired>>,
    link_bytes_per_s: Mutex<f64>,
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
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let (paired, _) = watch::channel(None);
        let pairing = Arc::new(Self { paired, link_bytes_per_s: Mutex::new(0.0) });
        let task = pairing.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = task.keep_paired(decode, prefill) => {}
            }
            task.paired.send_replace(None);
        });
        pairing
    }

    /// The prefill worker's link, if it is paired with this very connection of the decoder.
    pub(super) fn prefill_for(&self, decoder: &DecodeLink) -> Option<Arc<PrefillLink>> {
        let paired = self.paired.borrow();
        let paired = paired.as_ref().filter(|p| p.decode_serial == decoder.serial)?;
        Some(paired.prefill.clone()).filter(|l| !l.client.is_closed())
    }

    /// Waits until the two are paired.
    pub(super) async fn paired_with(&self, decoder: &DecodeLink) {
        let mut paired = self.paired.subscribe();
        let is_it = |p: &Option<Paired>| p.as_ref().is_some_and(|p| p.decode_serial == decoder.serial);
        if paired.wait_for(is_it).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether the two can bridge.
    pub(super) fn is_paired(&self) -> bool {
        self.paired.borrow().is_some()
    }

    /// Bytes per second that transfers between the two reached; 0 when unknown.
    pub(crate) fn link_bytes_per_s(&self) -> f64 {
        *self.link_bytes_per_s.lock()
    }

    /// Learns from a finished transfer. Sending overlaps computing, so this is what was reached, a lower
    /// bound of what the link can do; where it is too low, computing was the bottleneck anyway.
    pub(crate) fn learn(&self, report: &PrefillReport) {
        let seconds = (report.prefill_ms + report.transfer_ms) / 1000.0;
        if seconds > 0.0 && report.payload_bytes > 0 {
            let new = report.payload_bytes as f64 / seconds;
            let mut rate = self.link_bytes_per_s.lock();
            *rate = if *rate > 0.0 { *rate + EWMA_WEIGHT * (new - *rate) } else { new };
        }
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
                            self.paired.send_replace(Some(Paired { decode_serial: d.serial, prefill: p }));
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
            self.paired.send_replace(None);
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

/// The decoder's control address as the prefill worker sees it. A gateway beside the decoder knows it by a
/// loopback address; the host that the decoder advertises for its frames is then the one to use.
fn control_addr(known_as: &str, bulk_addr: &str) -> String {
    let known: Option<SocketAddr> = known_as.parse().ok();
    match (known, bulk_addr.rsplit_once(':')) {
        (Some(known), Some((host, _))) if known.ip().is_loopback() => format!("{host}:{}", known.port()),
        _ => known_as.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_address_is_replaced_by_the_advertised_host() {
        assert_eq!(control_addr("127.0.0.1:7001", "10.0.0.5:7002"), "10.0.0.5:7001");
        assert_eq!(control_addr("10.0.0.9:7001", "10.0.0.5:7002"), "10.0.0.9:7001");
        assert_eq!(control_addr("mac.local:7001", "10.0.0.5:7002"), "mac.local:7001");
    }
}
