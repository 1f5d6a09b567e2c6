//! Parsers of outside bytes under mutation, for a bounded time, on the stable toolchain.
//!
//! Not guided by coverage: each target starts from a corpus of valid messages and mutates them (bit flips, splices,
//! truncation, repeated chunks, interesting numbers), with a seed that a failure names. `PD_TEST_FUZZ_MS` is the time
//! per target (default 3000), `PD_TEST_FUZZ_SEED` the seed (default 1). What must hold: no panic, no allocation that follows a
//! length in the input, and whatever is accepted survives a round trip.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; counts are shown"
)]

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shared::angles::SinCos;
use shared::control::{
    CacheIdentity, DecodeEvent, DecodeRequest, Envelope, GenerateSpec, Hello, KvRecipe, PairSpec,
    PrefillEvent, PrefillRequest, PrefillSpec, Rates, Require, Role, RopeRecipe, Sampling, TransferOffer,
    WorkerError, WorkerErrorCode,
};
use shared::hexbytes::Hex;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use shared::transport::{FrameReceiver as _, accept};
use shared::wire::{
    Abort, AbortCode, Commit, FrameHeader, FrameKind, HEADER_BYTES, Open, TransferReceipt, parse_credit,
};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt as _;

fn time() -> Duration {
    let ms = std::env::var("PD_TEST_FUZZ_MS").ok().and_then(|v| v.parse().ok()).unwrap_or(3000);
    Duration::from_millis(ms)
}

/// Mutated inputs until the time is up.
struct Fuzzer {
    seed: u64,
    rng: ChaCha8Rng,
    corpus: Vec<Vec<u8>>,
    end: Instant,
    runs: u64,
    accepted: u64,
}

impl Fuzzer {
    fn new(corpus: Vec<Vec<u8>>) -> Self {
        let seed = std::env::var("PD_TEST_FUZZ_SEED").ok().and_then(|v| v.parse().ok()).unwrap_or(1);
        eprintln!("seed {seed}");
        Self {
            seed,
            rng: ChaCha8Rng::seed_from_u64(seed),
            corpus,
            end: Instant::now() + time(),
            runs: 0,
            accepted: 0,
        }
    }

    /// The next input, or the end. What was accepted and is new joins the corpus, so mutations pile up.
    fn next(&mut self, last: Option<(Vec<u8>, bool)>) -> Option<Vec<u8>> {
        if let Some((input, accepted)) = last {
            self.runs += 1;
            self.accepted += u64::from(accepted);
            if accepted && self.corpus.len() < 4096 && self.rng.random_ratio(1, 8) {
                self.corpus.push(input);
            }
        }
        if Instant::now() > self.end {
            eprintln!("seed {}: {} inputs, {} accepted", self.seed, self.runs, self.accepted);
            assert!(self.runs > 100, "too slow to mean anything");
            assert!(self.accepted > 0, "only refusals: the corpus is not valid");
            return None;
        }
        let pick = self.rng.random_range(0..self.corpus.len());
        let mut input = self.corpus[pick].clone();
        for _ in 0..self.rng.random_range(0..4) {
            self.mutate(&mut input);
        }
        Some(input)
    }

    fn mutate(&mut self, x: &mut Vec<u8>) {
        let n = x.len().max(1);
        let at = self.rng.random_range(0..n).min(x.len());
        let len = self.rng.random_range(0..16.min(x.len() - at + 1));
        match self.rng.random_range(0..8) {
            0 if at < x.len() => x[at] ^= 1 << self.rng.random_range(0..8),
            1 if at < x.len() => x[at] = self.rng.random(),
            2 => x.truncate(at),
            3 => drop(x.drain(at..at + len)),
            4 => {
                let chunk = x[at..at + len].to_vec();
                let times = self.rng.random_range(1..64);
                x.splice(at..at, chunk.repeat(times));
            }
            5 => {
                let numbers =
                    [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, i64::MAX as u64, u64::MAX, 1 << 40];
                let bytes = numbers[self.rng.random_range(0..numbers.len())].to_le_bytes();
                let width = [1, 2, 4, 8][self.rng.random_range(0..4)].min(x.len() - at);
                x[at..at + width].copy_from_slice(&bytes[..width]);
            }
            6 => {
                let other = self.rng.random_range(0..self.corpus.len());
                let from = self.rng.random_range(0..self.corpus[other].len().max(1));
                x.truncate(at);
                x.extend_from_slice(&self.corpus[other][from.min(self.corpus[other].len())..]);
            }
            _ => {
                let words = [
                    "null",
                    "-1",
                    "1e999",
                    "\"\\ud800\"",
                    "[[[[[[",
                    "{\"type\":",
                    "\u{0}",
                    "\u{ff}",
                    "99999999999999999999",
                ];
                let word = words[self.rng.random_range(0..words.len())].as_bytes().to_vec();
                x.splice(at..at, word);
            }
        }
    }
}

fn header(kind: FrameKind, payload: &[u8]) -> Vec<u8> {
    let h = FrameHeader::control(kind, Hex([5; 16]), 0, payload);
    [&h.encode()[..], payload].concat()
}

fn layout() -> CacheLayout {
    CacheLayout::uniform(3, LayerCache::Full { n_kv_heads: 2, head_dim: 8, dtype: Dtype::F16 }, 16)
}

fn data_frame(start: u32, count: u32) -> Vec<u8> {
    let payload = vec![7; count as usize * 2 * 8 * 2];
    let mut h = FrameHeader::control(FrameKind::Data, Hex([5; 16]), 0, &payload);
    (h.layer, h.part, h.token_start, h.token_count) = (1, 1, start, count);
    [&h.encode()[..], &payload].concat()
}

fn bodies() -> [Vec<u8>; 4] {
    let open = Open {
        ticket: Hex([1; 16]),
        fingerprint: Hex([2; 32]),
        layout_digest: Hex([3; 32]),
        tokens_digest: Hex([4; 32]),
        token_start: 0,
        token_end: 99,
    };
    let commit = Commit {
        token_start: 0,
        token_end: 99,
        frames: 7,
        payload_bytes: 1,
        digest: Hex([1; 32]),
        short_reason: Some("timeout".to_owned()),
    };
    let receipt = TransferReceipt { token_end: 1, frames: 2, payload_bytes: 3, digest: Hex([9; 32]) };
    let abort = Abort::new(AbortCode::Checksum, "é \"quoted\"");
    [
        serde_json::to_vec(&open).unwrap(),
        serde_json::to_vec(&commit).unwrap(),
        serde_json::to_vec(&receipt).unwrap(),
        serde_json::to_vec(&abort).unwrap(),
    ]
}

#[test]
fn frame_headers() {
    let mut fuzz =
        Fuzzer::new(vec![data_frame(0, 16), data_frame(32, 5), header(FrameKind::Open, &bodies()[0])]);
    let layout = layout();
    let mut last = None;
    while let Some(input) = fuzz.next(last.take()) {
        let mut bytes = [0; HEADER_BYTES];
        let n = input.len().min(HEADER_BYTES);
        bytes[..n].copy_from_slice(&input[..n]);
        let decoded = FrameHeader::decode(&bytes);
        if let Ok(h) = &decoded {
            assert_eq!(h.encode(), bytes, "seed {}", fuzz.seed);
            if let Ok(part) = h.check_data(&layout, 0, 64) {
                // What passes may be allocated: it is bounded by one block of one array.
                let most = layout.layers[usize::from(h.layer)].bytes_per_token(part)
                    * u64::from(layout.block_tokens);
                assert!(h.payload_bytes <= most && h.token_start + h.token_count <= 64, "{h:?}");
            }
            if let Ok(n) = h.check_body() {
                assert!(n <= shared::wire::MAX_BODY_BYTES);
            }
        }
        last = Some((input, decoded.is_ok()));
    }
}

/// The receiver of a real connection, fed with noise: it ends with an error or with the stream, never hangs or panics.
#[tokio::test]
async fn frame_streams() {
    let whole: Vec<u8> =
        [header(FrameKind::Open, &bodies()[0]), data_frame(0, 16), header(FrameKind::Commit, &bodies()[1])]
            .concat();
    let mut fuzz = Fuzzer::new(vec![whole, data_frame(0, 1), header(FrameKind::Credit, &8u64.to_le_bytes())]);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let mut last = None;
    while let Some(input) = fuzz.next(last.take()) {
        let writing = async {
            let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
            let _ = stream.write_all(&input).await;
            let _ = stream.shutdown().await;
            stream
        };
        let reading = async {
            let (_tx, mut rx, _) = accept(&listener).await.unwrap();
            let mut frames = 0;
            while let Ok(Some(h)) = rx.header().await {
                let bound = match h.check_data(&layout(), 0, 64) {
                    Ok(_) => h.payload_bytes as usize,
                    Err(_) => match h.check_body() {
                        Ok(n) => n,
                        Err(_) => break,
                    },
                };
                if h.kind == FrameKind::Credit && bound == 8 {
                    assert_eq!(parse_credit(&[0; 8]), Some(0));
                }
                let mut payload = vec![0; bound];
                if rx.payload(&h, &mut payload).await.is_err() {
                    break;
                }
                frames += 1;
            }
            frames
        };
        let both = async { tokio::join!(writing, reading) };
        let (_, frames) = tokio::time::timeout(Duration::from_secs(5), both)
            .await
            .unwrap_or_else(|_| panic!("hangs; seed {}, input {}", fuzz.seed, hex::encode(&input)));
        last = Some((input.clone(), frames > 0));
    }
}

/// Accepted text gives a value that gives the same value again.
fn stable<T: DeserializeOwned + Serialize>(input: &[u8], seed: u64) -> bool {
    let Ok(value) = serde_json::from_slice::<T>(input) else { return false };
    let text = serde_json::to_vec(&value).unwrap();
    let again: T = serde_json::from_slice(&text).unwrap_or_else(|e| {
        panic!("seed {seed}: own output is refused: {e}: {}", String::from_utf8_lossy(&text))
    });
    assert_eq!(serde_json::to_vec(&again).unwrap(), text, "seed {seed}");
    true
}

#[test]
fn frame_bodies() {
    let mut fuzz = Fuzzer::new(bodies().to_vec());
    let mut last = None;
    while let Some(input) = fuzz.next(last.take()) {
        let s = fuzz.seed;
        let ok = [
            stable::<Open>(&input, s),
            stable::<Commit>(&input, s),
            stable::<TransferReceipt>(&input, s),
            stable::<Abort>(&input, s),
        ];
        last = Some((input, ok.contains(&true)));
    }
}

fn json<T: Serialize>(body: T) -> Vec<u8> {
    serde_json::to_vec(&Envelope {
        id: 7,
        body,
        trace: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned()),
    })
    .unwrap()
}

fn decoder_hello() -> Hello {
    Hello {
        protocol: 1,
        role: Role::Decode,
        node: "mac".into(),
        version: "0.1".into(),
        engine: "mlx".into(),
        model: "m".into(),
        tokenizer_digest: Hex([1; 32]),
        vocab_size: 9,
        max_tokens: 9,
        capacity_tokens: 0,
        rates: Rates { prefill_tokens_per_s: 1.5, decode_tokens_per_s: 0.0 },
        cache: Some(CacheIdentity {
            fingerprint: Hex([2; 32]),
            layout: layout(),
            recipe: KvRecipe {
                rope: RopeRecipe { inv_freq: vec![1.0, 0.5], sin_cos: SinCos::CephesFused },
                projection_digests: vec![Hex([3; 32])],
                summation_runs: vec![288, 288],
            },
            bulk_addr: "10.0.0.1:5".into(),
        }),
    }
}

#[test]
fn control_messages() {
    let id = || "r".to_owned();
    let offer = TransferOffer {
        transfer_id: Hex([1; 16]),
        ticket: Hex([2; 16]),
        bulk_addr: "h:1".into(),
        token_start: 0,
        token_end: 9,
    };
    let generate = GenerateSpec {
        request_id: id(),
        max_new_tokens: 5,
        sampling: Sampling { temperature: 0.5, top_p: 0.9, top_k: 40, seed: u64::MAX, ..Sampling::default() },
        stop_token_ids: vec![2],
        require: Require::Complete,
        transfer_timeout_ms: 1,
        choices: 1,
        logprobs: None,
        prompt_logprobs: None,
        window: 0,
    };
    let hello = decoder_hello();
    let pair = PairSpec {
        cache: hello.cache.clone().unwrap(),
        tokenizer_digest: Hex([1; 32]),
        control_addr: "h:1".into(),
    };
    let prefill = PrefillSpec {
        request_id: id(),
        tokens: vec![1, 2, 3].into(),
        fingerprint: Hex([1; 32]),
        offer: offer.clone(),
        deadline_ms: 5,
    };
    let error = WorkerError::new(WorkerErrorCode::Busy, "é");
    let corpus = vec![
        json(DecodeRequest::Prepare { request_id: id(), tokens: vec![1, 2].into(), constraint: None }),
        json(DecodeRequest::OpenTransfer {
            request_id: id(),
            token_start: 0,
            token_end: 5,
            idle_timeout_ms: 9,
        }),
        json(DecodeRequest::AbortTransfer { request_id: id(), abort: Abort::new(AbortCode::Timeout, "x") }),
        json(DecodeRequest::Generate(generate)),
        json(DecodeRequest::GetStats),
        json(DecodeEvent::Offer(offer)),
        json(DecodeEvent::Token { choice: 0, ids: vec![1, 2], logprobs: vec![] }),
        json(DecodeEvent::Error(error.clone())),
        json(PrefillRequest::Pair(pair)),
        json(PrefillRequest::Prefill(prefill)),
        json(PrefillEvent::Error(error)),
        json(PrefillEvent::Progress { done_tokens: 1, total_tokens: 2 }),
        json(hello),
    ];
    let mut fuzz = Fuzzer::new(corpus);
    let mut last = None;
    while let Some(input) = fuzz.next(last.take()) {
        let s = fuzz.seed;
        let ok = [
            stable::<Envelope<DecodeRequest>>(&input, s),
            stable::<Envelope<DecodeEvent>>(&input, s),
            stable::<Envelope<PrefillRequest>>(&input, s),
            stable::<Envelope<PrefillEvent>>(&input, s),
            stable::<Envelope<Hello>>(&input, s),
        ];
        if let Ok(Envelope { body: PrefillRequest::Pair(pair), .. }) = serde_json::from_slice(&input)
            && pair.cache.layout.validate().is_ok()
        {
            // A layout that passed the check can be computed with.
            let layout = &pair.cache.layout;
            assert!(layout.bytes_per_block() >= layout.bytes_per_token());
            let _ = layout.digest();
        }
        last = Some((input, ok.contains(&true)));
    }
}

/// Model files are outside bytes too: headers of GGUF and safetensors.
#[test]
fn model_files() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = dir.path().join("tiny");
    pd_tests::tiny::write(&tiny, pd_tests::tiny::NARROW, 7);
    let weights = tiny.join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    let gguf = dir.path().join("m.gguf");
    let mut fuzz = Fuzzer::new(vec![whole[..6000].to_vec(), small_gguf()]);
    let mut last = None;
    while let Some(input) = fuzz.next(last.take()) {
        let is_gguf = input.starts_with(b"GG");
        let opened = if is_gguf {
            std::fs::write(&gguf, &input).unwrap();
            // It lacks a model, so it is never accepted; what counts is how it is refused.
            let error = shared::model::Model::open(&gguf).err().unwrap().to_string();
            !error.contains("not a GGUF")
        } else {
            let bytes = [&input[..], whole.get(input.len()..).unwrap_or_default()].concat();
            std::fs::write(&weights, bytes).unwrap();
            shared::model::Model::open(&tiny).is_ok()
        };
        last = Some((input, opened));
    }
}

/// A GGUF header with a value of each kind and one tensor.
fn small_gguf() -> Vec<u8> {
    let mut x = b"GGUF".to_vec();
    let text = |x: &mut Vec<u8>, s: &str| {
        x.extend((s.len() as u64).to_le_bytes());
        x.extend(s.as_bytes());
    };
    x.extend(3u32.to_le_bytes());
    x.extend(1u64.to_le_bytes());
    x.extend(4u64.to_le_bytes());
    text(&mut x, "general.architecture");
    x.extend(8u32.to_le_bytes());
    text(&mut x, "llama");
    text(&mut x, "llama.block_count");
    x.extend(4u32.to_le_bytes());
    x.extend(1u32.to_le_bytes());
    text(&mut x, "tokenizer.ggml.tokens");
    x.extend(9u32.to_le_bytes());
    x.extend(8u32.to_le_bytes());
    x.extend(2u64.to_le_bytes());
    text(&mut x, "a");
    text(&mut x, "b");
    text(&mut x, "llama.rope.freq_base");
    x.extend(6u32.to_le_bytes());
    x.extend(10_000f32.to_le_bytes());
    text(&mut x, "token_embd.weight");
    x.extend(2u32.to_le_bytes());
    x.extend(32u64.to_le_bytes());
    x.extend(2u64.to_le_bytes());
    x.extend(8u32.to_le_bytes());
    x.extend(0u64.to_le_bytes());
    x.resize(x.len().next_multiple_of(32) + 68, 0);
    x
}
