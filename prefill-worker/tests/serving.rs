//! The whole worker against a scripted decoder: real sockets, real engine, tiny model.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use prefill_worker::engine::{Engine, EngineOptions};
use prefill_worker::server::{Parts, Server};
use shared::angles::SinCos;
use shared::control::{
    CacheIdentity, ClusterKey, ConnectionId, ControlClient, DecodeEvent, DecodeRequest, Handler, Hello,
    Incoming, KvRecipe, PROTOCOL_VERSION, PairSpec, PrefillEvent, PrefillReport, PrefillRequest, PrefillSpec,
    PrefillStats, Rates, Responder, Role, RopeRecipe, TransferOffer, WorkerErrorCode, serve,
};
use shared::hexbytes::Hex;
use shared::layout::{CacheLayout, Dtype, Part};
use shared::tokens::TokenIds;
use shared::transport::{FrameReceiver, FrameSender, TcpFrameReceiver, TcpFrameSender, accept};
use shared::weights::{TensorSource, kv_projection_digest};
use shared::wire::{Abort, AbortCode, Commit, FrameHeader, FrameKind, Open, TransferDigest, TransferReceipt};
use support::{Golden, decode, relative_error};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

type Client = ControlClient<PrefillRequest, PrefillEvent>;

const LIMIT: Duration = Duration::from_secs(20);
const BLOCK: u32 = 16;

/// A worker, a connected gateway, and the decoder's ports.
struct Scene {
    golden: Golden,
    layout: CacheLayout,
    client: Client,
    bulk: TcpListener,
    shutdown: CancellationToken,
    pair: PairSpec,
    paired: PrefillEvent,
}

/// Publishes projections like a decoder.
struct Projections(Golden);

impl Handler for Projections {
    type Request = DecodeRequest;
    type Event = DecodeEvent;

    fn hello(&self) -> Hello {
        hello(Role::Decode, &self.0)
    }

    async fn handle(&self, _: ConnectionId, request: DecodeRequest, responder: Responder<DecodeEvent>) {
        assert_eq!(request, DecodeRequest::GetProjections);
        for layer in 0..self.0.spec.n_layers {
            let load = |name: &str| {
                let tensor = self.0.load(&format!("model.layers.{layer}.self_attn.{name}")).unwrap();
                let bytes: Vec<u8> = tensor.to_f32().iter().flat_map(|x| x.to_le_bytes()).collect();
                (name.to_owned(), tensor.shape().to_vec(), bytes)
            };
            let tensors = ["k_proj.weight", "v_proj.weight"].map(load);
            let views = tensors.iter().map(|(name, shape, bytes)| {
                let f32 = safetensors::tensor::Dtype::F32;
                (name.clone(), safetensors::tensor::TensorView::new(f32, shape.clone(), bytes).unwrap())
            });
            assert!(responder.send_binary(&safetensors::serialize(views, None).unwrap()).await);
        }
        responder.send(&DecodeEvent::ProjectionsEnd).await;
    }

    async fn disconnected(&self, _: ConnectionId) {}
}

fn hello(role: Role, golden: &Golden) -> Hello {
    Hello {
        protocol: PROTOCOL_VERSION,
        role,
        node: "n".into(),
        version: "0".into(),
        engine: "test".into(),
        model: golden.spec.name.clone(),
        tokenizer_digest: Hex([3; 32]),
        vocab_size: golden.spec.vocab_size as u32,
        max_tokens: golden.spec.max_positions as u32,
        capacity_tokens: 0,
        rates: Rates::default(),
        cache: None,
    }
}

fn digests(golden: &Golden) -> Vec<[u8; 32]> {
    (0..golden.spec.n_layers).map(|layer| kv_projection_digest(golden, layer).unwrap()).collect()
}

/// `worker`'s model serves; the decoder has `golden`'s projections.
async fn scene_with(worker: Golden, dtype: Dtype, max_requests: usize) -> Scene {
    let golden = Golden::open("tiny_plain");
    let source = Arc::new(worker.clone());
    let own_projections = digests(&worker);
    let options = EngineOptions {
        prefix_cache_bytes: 64 << 20,
        own_projections: own_projections.clone(),
        max_decoders: 2,
        inv_freq: golden.inv_freq.clone(),
    };
    let description = hello(Role::Prefill, &golden);
    let load =
        move |_: &_| Ok::<_, std::io::Error>((Box::new(worker.forward(32)) as Box<_>, "cpu".to_owned()));
    let (engine, _) = Engine::start(golden.spec.clone(), options, load).await.unwrap();
    let parts = Parts {
        hello: description,
        engine,
        own_projections,
        source,
        cluster_key: ClusterKey::loopback(),
        max_requests,
        inspect_dir: None,
    };
    let shutdown = CancellationToken::new();
    let listen = || async { TcpListener::bind("127.0.0.1:0").await.unwrap() };
    let (control, decoder, bulk) = (listen().await, listen().await, listen().await);
    let (addr, decoder_addr) = (control.local_addr().unwrap(), decoder.local_addr().unwrap());
    let key = ClusterKey::loopback();
    tokio::spawn(serve(control, key.clone(), Arc::new(Server::new(parts)), shutdown.clone()));
    tokio::spawn(serve(decoder, key.clone(), Arc::new(Projections(golden.clone())), shutdown.clone()));
    let (client, _) = Client::connect(&addr.to_string(), &key, LIMIT).await.unwrap();
    let layout = golden.layout(dtype, BLOCK);
    let cache = CacheIdentity {
        fingerprint: Hex([7; 32]),
        layout: layout.clone(),
        recipe: KvRecipe {
            rope: RopeRecipe { inv_freq: golden.inv_freq.clone(), sin_cos: SinCos::default() },
            projection_digests: digests(&golden).into_iter().map(Hex).collect(),
            summation_runs: vec![],
        },
        bulk_addr: bulk.local_addr().unwrap().to_string(),
    };
    let pair = PairSpec { cache, tokenizer_digest: Hex([3; 32]), control_addr: decoder_addr.to_string() };
    let paired = client.call(&PrefillRequest::Pair(pair.clone()), LIMIT).await.unwrap();
    Scene { golden, layout, client, bulk, shutdown, pair, paired }
}

async fn scene(dtype: Dtype) -> Scene {
    scene_with(Golden::open("tiny_plain"), dtype, 8).await
}

impl Scene {
    fn spec(&self, id: &str, tokens: &[u32], start: u32, end: u32) -> PrefillSpec {
        PrefillSpec {
            request_id: id.into(),
            tokens: TokenIds::from(tokens.to_vec()),
            fingerprint: Hex([7; 32]),
            offer: TransferOffer {
                transfer_id: Hex([5; 16]),
                ticket: Hex([6; 16]),
                bulk_addr: self.bulk.local_addr().unwrap().to_string(),
                token_start: start,
                token_end: end,
            },
            deadline_ms: 20_000,
        }
    }

    async fn prefill(&self, spec: PrefillSpec) -> Result<PrefillReport, WorkerErrorCode> {
        let mut events = self.client.request(&PrefillRequest::Prefill(spec)).await.unwrap();
        loop {
            match tokio::time::timeout(LIMIT, events.next()).await.unwrap().unwrap() {
                Incoming::Event(PrefillEvent::Progress { .. }) => {}
                Incoming::Event(PrefillEvent::Done(report)) => return Ok(report),
                Incoming::Event(PrefillEvent::Error(error)) => return Err(error.code),
                other => panic!("{other:?}"),
            }
        }
    }

    async fn stats(&self) -> PrefillStats {
        match self.client.call(&PrefillRequest::GetStats, LIMIT).await.unwrap() {
            PrefillEvent::Stats(stats) => stats,
            other => panic!("{other:?}"),
        }
    }

    /// Compares what arrived of `start..end` with mlx-lm's cache.
    fn check(&self, received: &Received, start: u32, end: u32, tolerance: f64) {
        let (spec, total) = (&self.golden.spec, self.golden.tokens.len());
        let d = spec.head_dim;
        let shared::layout::LayerCache::Full { dtype, .. } = self.layout.layers[0] else { panic!() };
        for (header, payload) in &received.frames {
            header.check_data(&self.layout, start, end).unwrap();
            let what = if header.part == Part::K as u16 { "k" } else { "v" };
            let golden = self.golden.recorded(usize::from(header.layer), what);
            let (first, n) = (header.token_start as usize, header.token_count as usize);
            let wanted: Vec<f32> = (0..spec.n_kv_heads)
                .flat_map(|head| &golden[(head * total + first) * d..(head * total + first + n) * d])
                .copied()
                .collect();
            let error = relative_error(&decode(payload, dtype), &wanted);
            assert!(error < tolerance, "{header:?}: {error:e}");
        }
        let rows: u64 = received.frames.iter().map(|(header, _)| u64::from(header.token_count)).sum();
        assert_eq!(rows, u64::from(end - start) * self.layout.n_arrays() as u64);
    }
}

#[derive(Default)]
struct Received {
    open: Option<Open>,
    frames: Vec<(FrameHeader, Vec<u8>)>,
    commit: Option<Commit>,
    abort: Option<Abort>,
}

struct Peer {
    tx: TcpFrameSender,
    rx: TcpFrameReceiver,
    seq: u64,
}

impl Peer {
    async fn accept(bulk: &TcpListener) -> Self {
        let (tx, rx, _) = accept(bulk).await.unwrap();
        Self { tx, rx, seq: 0 }
    }

    async fn say(&mut self, kind: FrameKind, body: &[u8]) {
        self.tx.send(&FrameHeader::control(kind, Hex([5; 16]), self.seq, body), body).await.unwrap();
        self.seq += 1;
    }

    async fn credit(&mut self, bytes: u64) {
        self.say(FrameKind::Credit, &bytes.to_le_bytes()).await;
    }

    /// Grants `credit` at first and then as much as arrives; answers the commit.
    async fn receive(&mut self, credit: u64) -> Received {
        let mut received = Received::default();
        let mut digest = TransferDigest::default();
        while let Ok(Some(header)) = self.rx.header().await {
            let mut body = vec![0; header.payload_bytes as usize];
            self.rx.payload(&header, &mut body).await.unwrap();
            match header.kind {
                FrameKind::Open => {
                    received.open = Some(serde_json::from_slice(&body).unwrap());
                    self.credit(credit).await;
                }
                FrameKind::Data => {
                    let part = Part::try_from(header.part).unwrap();
                    digest.add(header.layer, part, header.token_start, header.token_count, &body);
                    self.credit(header.payload_bytes).await;
                    received.frames.push((header, body));
                }
                FrameKind::Commit => {
                    let commit: Commit = serde_json::from_slice(&body).unwrap();
                    assert_eq!(commit.digest, Hex(digest.finish()));
                    let receipt = TransferReceipt {
                        token_end: commit.token_end,
                        frames: digest.frames(),
                        payload_bytes: digest.payload_bytes(),
                        digest: commit.digest,
                    };
                    received.commit = Some(commit);
                    self.say(FrameKind::Receipt, &serde_json::to_vec(&receipt).unwrap()).await;
                }
                FrameKind::Abort => received.abort = Some(serde_json::from_slice(&body).unwrap()),
                other => panic!("{other:?}"),
            }
        }
        received
    }
}

async fn receive(scene: &Scene, credit: u64) -> Received {
    Peer::accept(&scene.bulk).await.receive(credit).await
}

#[tokio::test]
async fn the_decoder_gets_exactly_its_cache() {
    for (dtype, tolerance) in [(Dtype::F32, 3e-6), (Dtype::F16, 5e-4), (Dtype::Bf16, 4e-3)] {
        let scene = scene(dtype).await;
        let end = scene.golden.tokens.len() as u32 - 1;
        // Credit for hardly more than one frame at a time.
        let credit = 2 * u64::from(BLOCK) * scene.layout.layers[0].bytes_per_token(Part::K);
        let spec = scene.spec("a", &scene.golden.tokens, 0, end);
        let (report, received) = tokio::join!(scene.prefill(spec), receive(&scene, credit));
        let report = report.unwrap();
        scene.check(&received, 0, end, tolerance);
        assert_eq!((report.computed_tokens, report.token_end), (end, end));
        assert_eq!(report.payload_bytes, u64::from(end) * scene.layout.bytes_per_token());
        let (open, commit) = (received.open.unwrap(), received.commit.unwrap());
        assert_eq!((open.token_start, open.token_end, open.ticket), (0, end, Hex([6; 16])));
        assert_eq!((commit.token_end, commit.short_reason, report.digest), (end, None, commit.digest));
        assert_eq!(scene.stats().await.requests, 0);
        scene.shutdown.cancel();
    }
}

#[tokio::test]
async fn other_projections_are_fetched_and_used() {
    let scene = scene_with(Golden::open("tiny_plain").with_other_projections(0.1), Dtype::F32, 8).await;
    assert_eq!(scene.paired, PrefillEvent::Paired { foreign_layers: 1 });
    let end = scene.golden.tokens.len() as u32;
    let spec = scene.spec("a", &scene.golden.tokens, 0, end);
    let (report, received) = tokio::join!(scene.prefill(spec), receive(&scene, 1 << 20));
    report.unwrap();
    scene.check(&received, 0, end, 3e-6);
}

#[tokio::test]
async fn another_model_of_the_same_shape_is_refused() {
    let scene = scene_with(Golden::open("tiny_plain").with_other_projections(5.0), Dtype::F32, 8).await;
    let PrefillEvent::Error(error) = &scene.paired else { panic!("{:?}", scene.paired) };
    assert_eq!(error.code, WorkerErrorCode::Incompatible);
    assert!(error.message.contains("layer 2"), "{error}");
    let spec = scene.spec("a", &scene.golden.tokens, 0, 80);
    assert_eq!(scene.prefill(spec).await.unwrap_err(), WorkerErrorCode::NotPaired);
}

#[tokio::test]
async fn a_longer_prompt_reuses_blocks_and_sends_only_what_is_asked() {
    let golden = Golden::open("tiny_plain");
    let scene = scene(Dtype::F32).await;
    let long: Vec<u32> = golden.tokens.iter().cycle().take(400).copied().collect();
    let spec = scene.spec("a", &long[..300], 0, 300);
    let (first, received) = tokio::join!(scene.prefill(spec), receive(&scene, 1 << 30));
    assert_eq!(first.unwrap().reused_tokens, 0);
    let before: Vec<_> = received.frames.into_iter().filter(|(h, _)| h.token_start == 16).collect();
    // The second prompt extends the first; its decoder lacks everything from position 16 on.
    let spec = scene.spec("b", &long, 16, 400);
    let (second, received) = tokio::join!(scene.prefill(spec), receive(&scene, 1 << 30));
    let second = second.unwrap();
    assert_eq!((second.reused_tokens, second.computed_tokens), (256, 144));
    assert_eq!(second.payload_bytes, 384 * scene.layout.bytes_per_token());
    let again: Vec<_> = received.frames.into_iter().filter(|(h, _)| h.token_start == 16).collect();
    assert_eq!(before.len(), again.len());
    for ((_, a), (_, b)) in before.iter().zip(&again) {
        assert_eq!(a, b, "restored rows are not the computed ones");
    }
    // Another prompt with the same start but nothing in common later takes nothing.
    let spec = scene.spec("c", &long[1..300], 0, 299);
    let (third, _) = tokio::join!(scene.prefill(spec), receive(&scene, 1 << 30));
    assert_eq!(third.unwrap().reused_tokens, 0);
}

#[tokio::test]
async fn cancelling_reaches_the_decoder_and_frees_the_request() {
    let scene = scene(Dtype::F32).await;
    let spec = scene.spec("a", &scene.golden.tokens, 0, 80);
    let stuck = async {
        let mut peer = Peer::accept(&scene.bulk).await;
        // Only one byte of credit: nothing can be sent.
        let received = peer.receive(1);
        let cancel = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            scene.client.notify(&PrefillRequest::Cancel { request_id: "a".into() });
        };
        tokio::join!(received, cancel).0
    };
    let (result, received) = tokio::join!(scene.prefill(spec), stuck);
    assert_eq!(result.unwrap_err(), WorkerErrorCode::Cancelled);
    assert_eq!(received.abort.unwrap().code, AbortCode::Cancelled);
    assert!(received.commit.is_none());
    assert_eq!(scene.stats().await.requests, 0);
    // The engine is free again.
    let spec = scene.spec("b", &scene.golden.tokens, 0, 80);
    let (result, _) = tokio::join!(scene.prefill(spec), receive(&scene, 1 << 20));
    result.unwrap();
}

#[tokio::test]
async fn the_deadline_ends_a_request_whose_receiver_is_stuck() {
    let scene = scene(Dtype::F32).await;
    let spec = PrefillSpec { deadline_ms: 400, ..scene.spec("a", &scene.golden.tokens, 0, 80) };
    let (result, received) = tokio::join!(scene.prefill(spec), receive(&scene, 1));
    assert_eq!(result.unwrap_err(), WorkerErrorCode::Timeout);
    assert_eq!(received.abort.unwrap().code, AbortCode::Timeout);
}

#[tokio::test]
async fn a_receivers_abort_is_reported_at_once() {
    let scene = scene(Dtype::F32).await;
    let spec = scene.spec("a", &scene.golden.tokens, 0, 80);
    let refuse = async {
        let mut peer = Peer::accept(&scene.bulk).await;
        let abort = Abort::new(AbortCode::OverBudget, "no room");
        peer.say(FrameKind::Abort, &serde_json::to_vec(&abort).unwrap()).await;
        peer.receive(0).await
    };
    let (result, received) = tokio::join!(scene.prefill(spec), refuse);
    assert_eq!(result.unwrap_err(), WorkerErrorCode::TransferFailed);
    assert!(received.commit.is_none());
}

#[tokio::test]
async fn a_connection_that_breaks_before_credit_is_tried_once_more() {
    let scene = scene(Dtype::F32).await;
    let spec = scene.spec("a", &scene.golden.tokens, 0, 80);
    let flaky = async {
        drop(Peer::accept(&scene.bulk).await);
        receive(&scene, 1 << 20).await
    };
    let (result, received) = tokio::join!(scene.prefill(spec), flaky);
    assert_eq!(result.unwrap().token_end, 80);
    assert!(received.commit.is_some());
    let spec = scene.spec("b", &scene.golden.tokens, 0, 80);
    let broken = async {
        drop(Peer::accept(&scene.bulk).await);
        drop(Peer::accept(&scene.bulk).await);
    };
    assert_eq!(tokio::join!(scene.prefill(spec), broken).0.unwrap_err(), WorkerErrorCode::TransferFailed);
}

#[tokio::test]
async fn losing_the_gateway_cancels_its_requests() {
    let scene = scene(Dtype::F32).await;
    let spec = scene.spec("a", &scene.golden.tokens, 0, 80);
    let events = scene.client.request(&PrefillRequest::Prefill(spec)).await.unwrap();
    let mut peer = Peer::accept(&scene.bulk).await;
    drop((events, scene.client));
    let received = tokio::time::timeout(LIMIT, peer.receive(1)).await.unwrap();
    assert!(received.commit.is_none());
}

#[tokio::test]
async fn senseless_requests_are_refused() {
    let scene = scene_with(Golden::open("tiny_plain"), Dtype::F32, 1).await;
    let tokens = scene.golden.tokens.clone();
    let refused = |spec| async { scene.prefill(spec).await.unwrap_err() };
    assert_eq!(refused(scene.spec("a", &tokens, 16, 16)).await, WorkerErrorCode::InvalidRequest);
    assert_eq!(refused(scene.spec("a", &tokens, 3, 20)).await, WorkerErrorCode::InvalidRequest);
    assert_eq!(refused(scene.spec("a", &tokens, 0, 84)).await, WorkerErrorCode::InvalidRequest);
    assert_eq!(refused(scene.spec("a", &[1, 64], 0, 2)).await, WorkerErrorCode::InvalidRequest);
    assert_eq!(refused(scene.spec("a", &[0; 600], 0, 600)).await, WorkerErrorCode::TooLong);
    let stranger = PrefillSpec { fingerprint: Hex([9; 32]), ..scene.spec("a", &tokens, 0, 16) };
    assert_eq!(refused(stranger).await, WorkerErrorCode::NotPaired);
    // One request is running (its receiver grants nothing), so that a second one is too many.
    let running =
        scene.client.request(&PrefillRequest::Prefill(scene.spec("a", &tokens, 0, 16))).await.unwrap();
    let _peer = Peer::accept(&scene.bulk).await;
    assert_eq!(refused(scene.spec("b", &tokens, 0, 16)).await, WorkerErrorCode::Busy);
    drop(running);
}

#[tokio::test]
async fn one_decoder_too_many_pushes_out_the_longest_unused_that_is_idle() {
    let scene = scene(Dtype::F32).await;
    let pair = async |fingerprint: u8| {
        let mut spec = scene.pair.clone();
        spec.cache.fingerprint = Hex([fingerprint; 32]);
        let paired = scene.client.call(&PrefillRequest::Pair(spec), LIMIT).await.unwrap();
        assert_eq!(paired, PrefillEvent::Paired { foreign_layers: 0 });
    };
    let spec = |id: &str, fingerprint: u8| PrefillSpec {
        fingerprint: Hex([fingerprint; 32]),
        ..scene.spec(id, &scene.golden.tokens, 0, 80)
    };
    let serves = async |fingerprint: u8| {
        let spec = spec(&format!("of {fingerprint}"), fingerprint);
        tokio::join!(scene.prefill(spec), receive(&scene, 1 << 20)).0.unwrap();
    };
    let is_unknown = async |fingerprint: u8| {
        assert_eq!(scene.prefill(spec("x", fingerprint)).await.unwrap_err(), WorkerErrorCode::NotPaired);
    };
    // Room for two: 7 is paired already, 8 is used last.
    pair(8).await;
    serves(7).await;
    serves(8).await;
    pair(9).await;
    is_unknown(7).await;
    serves(9).await;
    pair(7).await;
    serves(7).await;
    is_unknown(8).await;
    // 9 is the longest unused, but a request needs it (its receiver grants nothing).
    let running = scene.client.request(&PrefillRequest::Prefill(spec("held", 9))).await.unwrap();
    let mut peer = Peer::accept(&scene.bulk).await;
    pair(8).await;
    is_unknown(7).await;
    scene.client.notify(&PrefillRequest::Cancel { request_id: "held".into() });
    peer.receive(1).await;
    drop(running);
    serves(9).await;
}
