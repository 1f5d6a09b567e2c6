//! A decode and a prefill worker that follow a script instead of running a model.

use parking_lot::Mutex;
use shared::angles::SinCos;
use shared::control::{
    CacheIdentity, ClusterKey, ConnectionId, DecodeEvent, DecodeReceipt, DecodeRequest, DecodeStats,
    FinishReason, GenerateSpec, Handler, Hello, KvRecipe, PROTOCOL_VERSION, PrefillEvent, PrefillReport,
    PrefillRequest, PrefillStats, Rates, Require, Responder, Role, RopeRecipe, TransferOffer, WorkerError,
    WorkerErrorCode,
};
use shared::hexbytes::Hex;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use shared::wire::Abort;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

#[derive(Clone)]
pub(super) struct Script {
    /// End of the workers' names.
    pub(super) name: &'static str,
    /// What the decoder says, one token message per piece.
    pub(super) pieces: Vec<String>,
    /// Say it again and again.
    pub(super) endless: bool,
    pub(super) token_delay: Duration,
    /// `None`: no prefill worker.
    pub(super) prefill: Option<PrefillScript>,
    /// When connections are lost.
    pub(super) lose_at: LoseAt,
    /// How often the connection is lost.
    pub(super) lose_connection: u32,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum LoseAt {
    Prepare,
    Generate,
    /// After the first piece of the answer.
    Answer,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum PrefillScript {
    Works,
    Fails,
    Hangs,
    /// Has forgotten every decoder until it is introduced a second time.
    Forgets,
    /// Sends everything, never says so, and is lost after the decoder's second token.
    LostLate,
}

impl Script {
    pub(super) fn saying(pieces: &[&str]) -> Self {
        Self {
            name: "",
            pieces: pieces.iter().map(|p| (*p).to_owned()).collect(),
            endless: false,
            token_delay: Duration::from_millis(1),
            prefill: Some(PrefillScript::Works),
            lose_at: LoseAt::Generate,
            lose_connection: 0,
        }
    }
}

/// State of a transfer.
#[derive(Clone)]
enum Transfer {
    None,
    Open,
    Committed,
    Aborted(Abort),
}

struct Request {
    tokens: u32,
    transfer: watch::Sender<Transfer>,
    cancel: CancellationToken,
}

/// Both workers and what they have seen.
pub(super) struct Workers {
    script: Script,
    requests: Mutex<HashMap<String, Request>>,
    lost: Mutex<u32>,
    /// Cancels on either worker.
    cancelled: watch::Sender<usize>,
    prefills: watch::Sender<usize>,
    introductions: Mutex<usize>,
    running_prefills: Mutex<HashMap<String, ()>>,
    decode: Mutex<(String, CancellationToken)>,
    prefill: Mutex<Option<String>>,
    prefill_shutdown: CancellationToken,
}

struct Decode(Arc<Workers>);
struct Prefill(Arc<Workers>);

impl Workers {
    pub(super) async fn start(script: Script) -> Arc<Self> {
        let workers = Arc::new(Self {
            script,
            requests: Mutex::default(),
            lost: Mutex::new(0),
            cancelled: watch::channel(0).0,
            prefills: watch::channel(0).0,
            introductions: Mutex::new(0),
            running_prefills: Mutex::default(),
            decode: Mutex::default(),
            prefill: Mutex::new(None),
            prefill_shutdown: CancellationToken::new(),
        });
        workers.listen_decode("127.0.0.1:0").await;
        if workers.script.prefill.is_some() {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            *workers.prefill.lock() = Some(listener.local_addr().unwrap().to_string());
            let handler = Arc::new(Prefill(workers.clone()));
            tokio::spawn(shared::control::serve(
                listener,
                ClusterKey::loopback(),
                handler,
                workers.prefill_shutdown.clone(),
            ));
        }
        workers
    }

    async fn listen_decode(self: &Arc<Self>, addr: &str) {
        let listener = TcpListener::bind(addr).await.unwrap();
        let shutdown = CancellationToken::new();
        *self.decode.lock() = (listener.local_addr().unwrap().to_string(), shutdown.clone());
        tokio::spawn(shared::control::serve(
            listener,
            ClusterKey::loopback(),
            Arc::new(Decode(self.clone())),
            shutdown,
        ));
    }

    pub(super) fn decode_addr(&self) -> String {
        self.decode.lock().0.clone()
    }

    pub(super) fn prefill_addr(&self) -> Option<String> {
        self.prefill.lock().clone()
    }

    /// Waits for that many cancels, after which nothing may be held.
    pub(super) async fn all_released(&self, cancels: usize) {
        let mut cancelled = self.cancelled.subscribe();
        let enough = cancelled.wait_for(|n| *n >= cancels);
        tokio::time::timeout(Duration::from_secs(5), enough).await.expect("cancels").unwrap();
        assert!(self.requests.lock().is_empty() && self.running_prefills.lock().is_empty());
    }

    pub(super) async fn prefill_started(&self, count: usize) {
        let mut prefills = self.prefills.subscribe();
        let enough = prefills.wait_for(|n| *n >= count);
        tokio::time::timeout(Duration::from_secs(5), enough).await.expect("prefills").unwrap();
    }

    fn hello(&self, role: Role) -> Hello {
        let model = super::model::byte_level();
        let digest = shared::tokenizer::Tokenizer::open(model.path()).unwrap().digest();
        let layer = LayerCache::Full { n_kv_heads: 2, head_dim: 16, dtype: Dtype::F16 };
        let cache = CacheIdentity {
            fingerprint: Hex([1; 32]),
            layout: CacheLayout::uniform(2, layer, 16),
            recipe: KvRecipe {
                rope: RopeRecipe { inv_freq: vec![1.0; 8], sin_cos: SinCos::default() },
                projection_digests: vec![Hex([0; 32]); 2],
                summation_runs: vec![],
            },
            bulk_addr: "127.0.0.1:1".into(),
        };
        Hello {
            protocol: PROTOCOL_VERSION,
            role,
            node: format!("{role:?}{}", self.script.name),
            version: "0".into(),
            engine: "script".into(),
            model: "m".into(),
            tokenizer_digest: Hex(digest),
            vocab_size: 257,
            max_tokens: 2048,
            capacity_tokens: 0,
            rates: Rates::default(),
            cache: (role == Role::Decode).then_some(cache),
        }
    }

    /// Ends the connection, if the script says so; the worker listens again a little later.
    fn lose(self: &Arc<Self>, at: LoseAt) -> bool {
        let lose = at == self.script.lose_at && {
            let mut lost = self.lost.lock();
            *lost += 1;
            *lost <= self.script.lose_connection
        };
        if lose {
            let (addr, shutdown) = self.decode.lock().clone();
            shutdown.cancel();
            let workers = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(100)).await;
                workers.listen_decode(&addr).await;
            });
        }
        lose
    }

    async fn generate(self: Arc<Self>, spec: GenerateSpec, out: Responder<DecodeEvent>) {
        let Some((tokens, mut transfer, cancel)) = self
            .requests
            .lock()
            .get(&spec.request_id)
            .map(|r| (r.tokens, r.transfer.subscribe(), r.cancel.clone()))
        else {
            return;
        };
        let answer = async {
            let state = transfer.wait_for(|t| !matches!(t, Transfer::Open)).await.unwrap().clone();
            let bridged = if matches!(state, Transfer::Committed) { tokens - 1 } else { 0 };
            if bridged == 0 && spec.require != Require::Nothing {
                out.send(&DecodeEvent::Error(WorkerError::new(WorkerErrorCode::BridgeRequired, "no bridge")))
                    .await;
                return;
            }
            let failure = if let Transfer::Aborted(abort) = state { Some(abort) } else { None };
            out.send(&DecodeEvent::Started(Box::new(receipt(tokens, bridged, failure)))).await;
            let (mut sent, mut messages) = (0, 0);
            'all: loop {
                for piece in &self.script.pieces {
                    tokio::time::sleep(self.script.token_delay).await;
                    let ids: Vec<u32> = piece.bytes().map(u32::from).collect();
                    sent += u32::try_from(ids.len()).unwrap();
                    out.send(&DecodeEvent::Token { choice: 0, ids, logprobs: Vec::new() }).await;
                    messages += 1;
                    if messages == 1 && self.lose(LoseAt::Answer) {
                        return;
                    }
                    if messages == 2 && self.script.prefill == Some(PrefillScript::LostLate) {
                        self.prefill_shutdown.cancel();
                    }
                    if sent >= spec.max_new_tokens {
                        break 'all;
                    }
                }
                if !self.script.endless {
                    break;
                }
            }
            let reason = if sent >= spec.max_new_tokens { FinishReason::Length } else { FinishReason::Stop };
            out.send(&DecodeEvent::Finished { choice: 0, reason, completion_tokens: sent, decode_ms: 1.0 })
                .await;
        };
        tokio::select! {
            () = answer => {}
            () = cancel.cancelled() => {}
        }
        self.requests.lock().remove(&spec.request_id);
    }
}

impl Handler for Decode {
    type Request = DecodeRequest;
    type Event = DecodeEvent;

    fn hello(&self) -> Hello {
        self.0.hello(Role::Decode)
    }

    async fn handle(&self, _: ConnectionId, request: DecodeRequest, out: Responder<DecodeEvent>) {
        match request {
            DecodeRequest::Prepare { request_id, tokens, .. } => {
                if self.0.lose(LoseAt::Prepare) {
                    return;
                }
                let (transfer, _) = watch::channel(Transfer::None);
                let tokens = u32::try_from(tokens.len()).unwrap();
                let request = Request { tokens, transfer, cancel: CancellationToken::new() };
                self.0.requests.lock().insert(request_id, request);
                out.send(&DecodeEvent::Prepared { resident_tokens: 0, queue: 0, rates: Rates::default() })
                    .await;
            }
            DecodeRequest::OpenTransfer { request_id, token_start, token_end, .. } => {
                self.0.requests.lock()[&request_id].transfer.send_replace(Transfer::Open);
                let offer = TransferOffer {
                    transfer_id: Hex::random(),
                    ticket: Hex::random(),
                    bulk_addr: "127.0.0.1:1".into(),
                    token_start,
                    token_end,
                };
                out.send(&DecodeEvent::Offer(offer)).await;
            }
            DecodeRequest::AbortTransfer { request_id, abort } => {
                if let Some(r) = self.0.requests.lock().get(&request_id) {
                    r.transfer.send_replace(Transfer::Aborted(abort));
                }
            }
            DecodeRequest::Generate(spec) => {
                if !self.0.lose(LoseAt::Generate) {
                    tokio::spawn(self.0.clone().generate(spec, out));
                }
            }
            DecodeRequest::Cancel { request_id } => {
                if let Some(request) = self.0.requests.lock().remove(&request_id) {
                    request.cancel.cancel();
                }
                self.0.cancelled.send_modify(|n| *n += 1);
            }
            DecodeRequest::GetStats => {
                let requests = u32::try_from(self.0.requests.lock().len()).unwrap();
                out.send(&DecodeEvent::Stats(DecodeStats { requests, ..DecodeStats::default() })).await;
            }
            other => panic!("not in the script: {other:?}"),
        }
    }

    async fn disconnected(&self, _: ConnectionId) {
        for (_, request) in self.0.requests.lock().drain() {
            request.cancel.cancel();
        }
    }
}

impl Handler for Prefill {
    type Request = PrefillRequest;
    type Event = PrefillEvent;

    fn hello(&self) -> Hello {
        self.0.hello(Role::Prefill)
    }

    async fn handle(&self, _: ConnectionId, request: PrefillRequest, out: Responder<PrefillEvent>) {
        match request {
            PrefillRequest::Pair(_) => {
                *self.0.introductions.lock() += 1;
                out.send(&PrefillEvent::Paired { foreign_layers: 0 }).await;
            }
            PrefillRequest::Prefill(spec) => {
                self.0.running_prefills.lock().insert(spec.request_id.clone(), ());
                self.0.prefills.send_modify(|n| *n += 1);
                let total_tokens = u32::try_from(spec.tokens.len()).unwrap();
                if self.0.script.prefill != Some(PrefillScript::Forgets) {
                    out.send(&PrefillEvent::Progress { done_tokens: total_tokens / 2, total_tokens }).await;
                }
                match self.0.script.prefill {
                    Some(PrefillScript::Forgets) if *self.0.introductions.lock() < 2 => {
                        let error = WorkerError::new(WorkerErrorCode::NotPaired, "who is that?");
                        out.send(&PrefillEvent::Error(error)).await;
                    }
                    Some(PrefillScript::Works | PrefillScript::Forgets) => {
                        if let Some(r) = self.0.requests.lock().get(&spec.request_id) {
                            r.transfer.send_replace(Transfer::Committed);
                        }
                        out.send(&PrefillEvent::Done(report(total_tokens))).await;
                    }
                    Some(PrefillScript::Fails) => {
                        let error = WorkerError::new(WorkerErrorCode::Engine, "out of luck");
                        out.send(&PrefillEvent::Error(error)).await;
                    }
                    Some(PrefillScript::LostLate) => {
                        if let Some(r) = self.0.requests.lock().get(&spec.request_id) {
                            r.transfer.send_replace(Transfer::Committed);
                        }
                        return;
                    }
                    Some(PrefillScript::Hangs) | None => return,
                }
                self.0.running_prefills.lock().remove(&spec.request_id);
            }
            PrefillRequest::Cancel { request_id } => {
                self.0.running_prefills.lock().remove(&request_id);
                self.0.cancelled.send_modify(|n| *n += 1);
            }
            PrefillRequest::GetStats => {
                out.send(&PrefillEvent::Stats(PrefillStats::default())).await;
            }
            other => panic!("not in the script: {other:?}"),
        }
    }

    async fn disconnected(&self, _: ConnectionId) {
        self.0.running_prefills.lock().clear();
    }
}

fn receipt(tokens: u32, bridged: u32, transfer_failure: Option<Abort>) -> DecodeReceipt {
    DecodeReceipt {
        prompt_tokens: tokens,
        cached_tokens: bridged,
        bridged_tokens: bridged,
        native_tokens: tokens - bridged,
        blocks: 0,
        payload_bytes: u64::from(bridged) * 256,
        digest: None,
        transfer_failure,
        queue_ms: 0.0,
        wait_ms: 0.0,
        ingest_ms: 0.0,
        prefill_ms: 1.0,
    }
}

fn report(tokens: u32) -> PrefillReport {
    PrefillReport {
        computed_tokens: tokens,
        reused_tokens: 0,
        queue_ms: 0.0,
        prefill_ms: 1.0,
        transfer_ms: 0.1,
        payload_bytes: 1,
        token_end: tokens - 1,
        digest: Hex([0; 32]),
        rates: Rates::default(),
    }
}
