//! A decode worker with the test engine, and a gateway's moves against it.

use super::super::*;
use crate::engine::testing::{BLOCK_TOKENS, TestEngine, VOCAB, layout};
use crate::ingest::{Expected, serve_bulk};
use shared::angles::SinCos;
use shared::control::{
    CacheIdentity, ClusterKey, ControlClient, DecodeReceipt, EventStream, FinishReason, GenerateSpec,
    Incoming, KvRecipe, PROTOCOL_VERSION, Rates, Require, Role, RopeRecipe, Sampling, TransferOffer, serve,
};
use shared::hexbytes::Hex;
use shared::tokenizer::Tokenizer;
use shared::transport::{FrameReceiver, FrameSender, connect};
use shared::weights::{HostTensor, TensorFormat, TensorInfo, WeightsError};
use shared::wire::{Commit, FrameHeader, FrameKind, Open, TransferDigest, payload_crc};
use tokio::net::TcpListener;

pub(super) type Client = ControlClient<DecodeRequest, DecodeEvent>;

pub(super) const LIMIT: Duration = Duration::from_secs(10);
pub(super) const MAX_TOKENS: u32 = 400;
pub(super) const SLOW: Duration = Duration::from_millis(3);

/// Tokens 0… are these, one letter each; then comes the one that ends an answer.
const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz0123456789";
const END: u32 = 36;

fn tokenizer() -> Tokenizer {
    let vocab: serde_json::Map<_, _> =
        (0_u32..).zip(LETTERS.chars()).map(|(i, c)| (c.into(), i.into())).collect();
    let bytes = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false});
    let definition = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{"id": END, "content": "<|end|>", "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false}],
        "pre_tokenizer": bytes, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(definition.to_string().as_bytes()).unwrap()
}

/// The text of tokens.
pub(super) fn letters(ids: &[u32]) -> String {
    ids.iter().map(|&id| LETTERS.chars().nth(id as usize).unwrap()).collect()
}

struct OneMatrix;

impl TensorSource for OneMatrix {
    fn names(&self) -> Vec<String> {
        vec![]
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let known = name.ends_with("weight") || name.contains(".1.self_attn.k_proj.bias");
        known.then(|| TensorInfo { shape: vec![1, 2], format: TensorFormat::F32 })
    }

    fn load(&self, _: &str) -> Result<HostTensor, WeightsError> {
        Ok(HostTensor::F32 { shape: vec![1, 2], data: vec![1.0, 2.0] })
    }
}

pub(super) struct Bench {
    addr: String,
    bulk: std::net::SocketAddr,
    pub(super) decoder: Decoder,
    pub(super) dir: tempfile::TempDir,
    _shutdown: tokio_util::sync::DropGuard,
}

pub(super) async fn bench(pass: Duration) -> Bench {
    let engine = TestEngine { pass, ..TestEngine::default() };
    let (handle, ()) = EngineHandle::start(u64::MAX, move || Ok((engine, ()))).await.unwrap();
    let control = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, bulk) = (control.local_addr().unwrap().to_string(), listener.local_addr().unwrap());
    let fingerprint = Hex([1; 32]);
    let expected =
        Expected { fingerprint, layout: Arc::new(layout()), layout_digest: Hex(layout().digest()) };
    let transfers = Transfers::new(expected, bulk.to_string());
    let dir = tempfile::tempdir().unwrap();
    let parts = Parts {
        hello: Hello {
            protocol: PROTOCOL_VERSION,
            role: Role::Decode,
            node: "n".into(),
            version: "0".into(),
            engine: "test".into(),
            model: "m".into(),
            tokenizer_digest: Hex([0; 32]),
            vocab_size: VOCAB,
            max_tokens: MAX_TOKENS,
            capacity_tokens: 0,
            rates: Rates::default(),
            cache: Some(CacheIdentity {
                fingerprint,
                layout: layout(),
                recipe: KvRecipe {
                    rope: RopeRecipe { inv_freq: vec![], sin_cos: SinCos::default() },
                    projection_digests: vec![],
                    summation_runs: vec![],
                },
                bulk_addr: bulk.to_string(),
            }),
        },
        engine: handle,
        store: PrefixStore::new(100 * 16),
        transfers: transfers.clone(),
        constraints: Some(Compiler::new(&tokenizer(), VOCAB as usize, &[END]).unwrap()),
        source: Arc::new(OneMatrix),
        max_requests: 5,
        inspect_dir: Some(dir.path().to_owned()),
        n_layers: 2,
        block_tokens: BLOCK_TOKENS,
        bytes_per_token: 16,
    };
    let decoder = Decoder::new(parts, BlockKey::root(&fingerprint.0, &layout().digest()));
    let shutdown = CancellationToken::new();
    tokio::spawn(serve_bulk(listener, transfers, shutdown.clone()));
    tokio::spawn(serve(control, ClusterKey::loopback(), Arc::new(decoder.clone()), shutdown.clone()));
    Bench { addr, bulk, decoder, dir, _shutdown: shutdown.drop_guard() }
}

impl Bench {
    pub(super) async fn client(&self) -> Client {
        Client::connect(&self.addr, &ClusterKey::loopback(), LIMIT).await.unwrap().0
    }

    /// Waits until nothing is held any more.
    pub(super) async fn assert_free(&self) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let s = self.decoder.core.stats();
            let held = u64::from(s.requests + s.transfers)
                + s.store_references
                + s.reserved_bytes
                + s.sequence_bytes;
            if held == 0 {
                return;
            }
            assert!(Instant::now() < deadline, "still held: {s:?}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Sends tokens `start..end` of a prompt, up to and including the commit.
    pub(super) async fn send(&self, offer: &TransferOffer, prompt: &[u32], end: u32) {
        let (mut tx, mut rx) = connect(self.bulk, LIMIT).await.unwrap();
        let open = Open {
            ticket: offer.ticket,
            fingerprint: Hex([1; 32]),
            layout_digest: Hex(layout().digest()),
            tokens_digest: Hex(tokens_digest(prompt)),
            token_start: offer.token_start,
            token_end: offer.token_end,
        };
        let body = serde_json::to_vec(&open).unwrap();
        tx.send(&FrameHeader::control(FrameKind::Open, offer.transfer_id, 0, &body), &body).await.unwrap();
        let (mut seq, mut digest, mut at) = (1, TransferDigest::default(), offer.token_start);
        while at < end {
            let count = (BLOCK_TOKENS as u32 - at % BLOCK_TOKENS as u32).min(end - at);
            let rows = &prompt[at as usize..(at + count) as usize];
            let payload: Vec<u8> = rows.iter().flat_map(|t| t.to_le_bytes()).collect();
            for (layer, part) in layout().arrays() {
                let header = FrameHeader {
                    kind: FrameKind::Data,
                    layer,
                    part: part as u16,
                    token_start: at,
                    token_count: count,
                    crc32c: payload_crc(&payload),
                    ..FrameHeader::control(FrameKind::Data, offer.transfer_id, seq, &payload)
                };
                digest.add(layer, part, at, count, &payload);
                tx.send(&header, &payload).await.unwrap();
                seq += 1;
            }
            at += count;
        }
        let commit = Commit {
            token_start: offer.token_start,
            token_end: end,
            frames: digest.frames(),
            payload_bytes: digest.payload_bytes(),
            digest: Hex(digest.finish()),
            short_reason: (end < offer.token_end).then(|| "out of time".to_owned()),
        };
        let body = serde_json::to_vec(&commit).unwrap();
        tx.send(&FrameHeader::control(FrameKind::Commit, offer.transfer_id, seq, &body), &body)
            .await
            .unwrap();
        // Read until the receiver has closed, so that its receipt was written.
        while let Ok(Some(header)) = rx.header().await {
            let mut body = vec![0; header.payload_bytes as usize];
            rx.payload(&header, &mut body).await.unwrap();
        }
    }
}

pub(super) async fn prepare(client: &Client, id: &str, tokens: &[u32]) -> Result<u32, WorkerError> {
    announce(client, id, tokens, None).await
}

pub(super) async fn constrained(
    client: &Client,
    id: &str,
    tokens: &[u32],
    constraint: Constraint,
) -> Result<u32, WorkerError> {
    announce(client, id, tokens, Some(constraint)).await
}

async fn announce(
    client: &Client,
    id: &str,
    tokens: &[u32],
    constraint: Option<Constraint>,
) -> Result<u32, WorkerError> {
    let request =
        DecodeRequest::Prepare { request_id: id.into(), tokens: tokens.to_vec().into(), constraint };
    match client.call(&request, LIMIT).await.unwrap() {
        DecodeEvent::Prepared { resident_tokens, .. } => Ok(resident_tokens),
        DecodeEvent::Error(error) => Err(error),
        other => panic!("{other:?}"),
    }
}

pub(super) async fn open(
    client: &Client,
    id: &str,
    start: u32,
    end: u32,
) -> Result<TransferOffer, WorkerError> {
    let request = DecodeRequest::OpenTransfer {
        request_id: id.into(),
        token_start: start,
        token_end: end,
        idle_timeout_ms: 5000,
    };
    match client.call(&request, LIMIT).await.unwrap() {
        DecodeEvent::Offer(offer) => Ok(offer),
        DecodeEvent::Error(error) => Err(error),
        other => panic!("{other:?}"),
    }
}

pub(super) fn spec(id: &str, max_new_tokens: u32) -> GenerateSpec {
    GenerateSpec {
        request_id: id.into(),
        max_new_tokens,
        sampling: Sampling::greedy(),
        stop_token_ids: vec![],
        require: Require::Nothing,
        transfer_timeout_ms: 5000,
        choices: 1,
        logprobs: None,
        prompt_logprobs: None,
        window: 0,
    }
}

pub(super) async fn generate(client: &Client, spec: GenerateSpec) -> EventStream<DecodeEvent> {
    client.request(&DecodeRequest::Generate(spec)).await.unwrap()
}

pub(super) type Answer = Result<(DecodeReceipt, Vec<u32>, FinishReason), WorkerError>;

pub(super) async fn collect(mut events: EventStream<DecodeEvent>) -> Answer {
    let (mut receipt, mut ids) = (None, Vec::new());
    loop {
        match events.next().await {
            Some(Incoming::Event(DecodeEvent::Started(r))) => receipt = Some(*r),
            Some(Incoming::Event(DecodeEvent::Token { ids: new, .. })) => {
                assert!(receipt.is_some(), "a token before the receipt");
                ids.extend(new);
            }
            Some(Incoming::Event(DecodeEvent::Finished { reason, completion_tokens, .. })) => {
                assert_eq!(completion_tokens as usize, ids.len());
                return Ok((receipt.unwrap(), ids, reason));
            }
            Some(Incoming::Event(DecodeEvent::Error(error))) => return Err(error),
            Some(Incoming::Event(DecodeEvent::Progress { .. })) => {}
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn prompt(n: u32) -> Vec<u32> {
    (0..n).map(|i| i * 7 % VOCAB).collect()
}
