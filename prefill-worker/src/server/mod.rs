//! The control port's answers.

mod inbound;
mod outbox;
mod pairing;
mod request;
mod spans;
mod transfer;

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use shared::control::{
    CacheIdentity, ClusterKey, ConnectionId, Handler, Hello, PairSpec, PrefillEvent, PrefillRequest,
    PrefillSpec, PrefillStats, Rates, Responder, WorkerError, WorkerErrorCode,
};
use shared::hexbytes::Hex;
use shared::layout::CacheLayout;
use shared::settings::resident_memory_bytes;
use shared::weights::TensorSource;
use tokio_util::sync::CancellationToken;

use crate::engine::{Engine, Held};
use outbox::Gauge;
use request::Request;

/// Everything the server is made of.
pub struct Parts {
    /// Self-description; the speed is filled in at each connect.
    pub hello: Hello,
    /// The engine.
    pub engine: Engine,
    /// Digests of this model's own projections.
    pub own_projections: Vec<[u8; 32]>,
    /// This model's weights, to compare a decoder's with.
    pub source: Arc<dyn TensorSource>,
    /// Key of the fleet, to fetch projections with.
    pub cluster_key: ClusterKey,
    /// Requests accepted at once, the running one included.
    pub max_requests: usize,
    /// Folder of inspection files, if inspections are allowed.
    pub inspect_dir: Option<PathBuf>,
}

/// A prefill worker's side of the control port; clones share it.
#[derive(Clone)]
pub struct Server(Arc<Inner>);

struct Inner {
    parts: Parts,
    layouts: Mutex<HashMap<Hex<32>, Arc<CacheLayout>>>,
    requests: Mutex<HashMap<String, Running>>,
    gauge: Arc<Gauge>,
}

struct Running {
    connection: ConnectionId,
    cancel: CancellationToken,
    tokens: u32,
}

/// Takes a request off the books when it ends, however it ends.
struct Booked {
    server: Server,
    request_id: String,
    _held: Held,
}

impl Server {
    /// A server with no decoders yet.
    pub fn new(parts: Parts) -> Self {
        let (layouts, requests, gauge) = (Mutex::default(), Mutex::default(), Arc::default());
        Self(Arc::new(Inner { parts, layouts, requests, gauge }))
    }

    async fn pair(&self, spec: PairSpec) -> Result<u32, WorkerError> {
        let parts = &self.0.parts;
        let incompatible = |text: &str| Err(WorkerError::new(WorkerErrorCode::Incompatible, text));
        if spec.tokenizer_digest != parts.hello.tokenizer_digest {
            return incompatible("the decoder has another tokenizer");
        }
        let CacheIdentity { fingerprint, layout, .. } = spec.cache.clone();
        let foreign =
            pairing::pair(&parts.engine, &parts.own_projections, &parts.source, spec, &parts.cluster_key)
                .await?;
        let mut layouts = self.0.layouts.lock();
        layouts.insert(fingerprint, Arc::new(layout));
        layouts.retain(|known, _| parts.engine.is_paired(known));
        Ok(foreign)
    }

    /// Checks a request and puts it on the books.
    fn admit(&self, connection: ConnectionId, spec: PrefillSpec) -> Result<(Request, Booked), WorkerError> {
        let arrived = Instant::now();
        let refuse = |code, text: String| Err(WorkerError::new(code, text));
        let Inner { parts, layouts, requests, gauge } = &*self.0;
        let held = parts.engine.hold(&spec.fingerprint);
        let layout = layouts.lock().get(&spec.fingerprint).cloned();
        let (Some(held), Some(layout)) = (held, layout) else {
            return refuse(WorkerErrorCode::NotPaired, format!("decoder {} is not paired", spec.fingerprint));
        };
        let (start, end) = (spec.offer.token_start, spec.offer.token_end);
        if start >= end || end as usize > spec.tokens.len() || start % layout.block_tokens != 0 {
            let n = spec.tokens.len();
            return refuse(
                WorkerErrorCode::InvalidRequest,
                format!("cannot send {start}..{end} of {n} tokens"),
            );
        }
        if end > parts.hello.max_tokens {
            let max = parts.hello.max_tokens;
            return refuse(
                WorkerErrorCode::TooLong,
                format!("{end} tokens, this worker reads at most {max}"),
            );
        }
        if let Some(bad) = spec.tokens.iter().find(|&&token| token >= parts.hello.vocab_size) {
            return refuse(WorkerErrorCode::InvalidRequest, format!("token {bad} is not in the vocabulary"));
        }
        let mut requests = requests.lock();
        if requests.len() >= parts.max_requests {
            return refuse(WorkerErrorCode::Busy, format!("{} requests are waiting already", requests.len()));
        }
        if requests.contains_key(&spec.request_id) {
            return refuse(
                WorkerErrorCode::InvalidRequest,
                format!("request {} is running", spec.request_id),
            );
        }
        let cancel = CancellationToken::new();
        let request_id = spec.request_id.clone();
        requests.insert(request_id.clone(), Running { connection, cancel: cancel.clone(), tokens: end });
        let booked = Booked { server: self.clone(), request_id, _held: held };
        let (engine, gauge) = (parts.engine.clone(), gauge.clone());
        Ok((Request { spec, layout, engine, gauge, cancel, arrived }, booked))
    }

    fn stats(&self) -> PrefillStats {
        let Inner { parts, requests, gauge, .. } = &*self.0;
        let requests = requests.lock();
        PrefillStats {
            requests: requests.len() as u32,
            queued_tokens: requests.values().map(|r| u64::from(r.tokens)).sum(),
            prefix_cache_bytes: parts.engine.prefix_cache_bytes() as u64,
            // Restoring copies a block, so that running requests hold none.
            prefix_cache_pinned_blocks: 0,
            send_buffer_peak_bytes: gauge.peak_bytes(),
            resident_memory_bytes: resident_memory_bytes(),
            rates: self.rates(),
            link_bytes_per_s: gauge.link_bytes_per_s(),
        }
    }

    fn rates(&self) -> Rates {
        Rates { prefill_tokens_per_s: self.0.parts.engine.prefill_tokens_per_s(), ..Rates::default() }
    }

    async fn reconstruct(&self, fingerprint: Hex<32>, input: &str, output: &str) -> Result<(), WorkerError> {
        let invalid = |text: String| WorkerError::new(WorkerErrorCode::InvalidRequest, text);
        let dir = self.0.parts.inspect_dir.as_deref();
        let dir =
            dir.ok_or_else(|| invalid("this worker was started without an inspection folder".into()))?;
        let inside =
            |name: &str| inside(dir, name).ok_or_else(|| invalid(format!("`{name}` is no file name")));
        self.0.parts.engine.reconstruct(fingerprint, inside(input)?, inside(output)?).await
    }
}

impl Handler for Server {
    type Request = PrefillRequest;
    type Event = PrefillEvent;

    fn hello(&self) -> Hello {
        let parts = &self.0.parts;
        Hello { rates: self.rates(), ..parts.hello.clone() }
    }

    async fn handle(
        &self,
        connection: ConnectionId,
        request: PrefillRequest,
        responder: Responder<PrefillEvent>,
    ) {
        match request {
            PrefillRequest::Pair(spec) => {
                let server = self.clone();
                tokio::spawn(async move {
                    let paired = server.pair(spec).await;
                    responder
                        .send(&event(paired, |foreign_layers| PrefillEvent::Paired { foreign_layers }))
                        .await;
                });
            }
            PrefillRequest::Prefill(spec) => match self.admit(connection, spec) {
                Ok((request, booked)) => {
                    let responder = spans::traced(responder);
                    tokio::spawn(async move {
                        request.run(booked, &responder).await;
                    });
                }
                Err(error) => {
                    responder.send(&PrefillEvent::Error(error)).await;
                }
            },
            PrefillRequest::Cancel { request_id } => {
                if let Some(running) = self.0.requests.lock().get(&request_id) {
                    running.cancel.cancel();
                }
            }
            PrefillRequest::GetStats => {
                responder.send(&PrefillEvent::Stats(self.stats())).await;
            }
            PrefillRequest::Reconstruct { fingerprint, input_file, output_file } => {
                let server = self.clone();
                tokio::spawn(async move {
                    let made = server.reconstruct(fingerprint, &input_file, &output_file).await;
                    responder.send(&event(made, |()| PrefillEvent::Reconstructed)).await;
                });
            }
            other => tracing::warn!(?other, "a request of a newer protocol was ignored"),
        }
    }

    async fn disconnected(&self, connection: ConnectionId) {
        for running in self.0.requests.lock().values().filter(|r| r.connection == connection) {
            running.cancel.cancel();
        }
    }
}

impl Drop for Booked {
    fn drop(&mut self) {
        self.server.0.requests.lock().remove(&self.request_id);
    }
}

fn event<T>(result: Result<T, WorkerError>, good: impl FnOnce(T) -> PrefillEvent) -> PrefillEvent {
    result.map_or_else(PrefillEvent::Error, good)
}

/// A file directly inside a folder.
fn inside(dir: &Path, name: &str) -> Option<PathBuf> {
    let mut parts = Path::new(name).components();
    let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    plain.then(|| dir.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inspection_files_stay_in_their_folder() {
        let dir = Path::new("/tmp/x");
        assert_eq!(inside(dir, "a.safetensors"), Some(dir.join("a.safetensors")));
        for bad in ["", "..", "../a", "/etc/passwd", "a/b", "."] {
            assert_eq!(inside(dir, bad), None, "{bad}");
        }
    }
}
