//! A decode worker without an engine, on pd-bridge's control protocol.

use crate::pace::{Pace, Script};
use crate::timecode::{Words, Writer, now_us};
use shared::angles::SinCos;
use shared::control::{
    CacheIdentity, ConnectionId, DecodeEvent, DecodeReceipt, DecodeRequest, DecodeStats, FinishReason,
    Handler, Hello, KvRecipe, PROTOCOL_VERSION, Rates, Responder, Role, RopeRecipe, Window,
};
use shared::hexbytes::Hex;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use shared::model::Model;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::sync::CancellationToken;

/// What the worker says.
#[derive(Debug, Clone)]
pub enum Voice {
    /// The time, at the pace that the request's seed asks for.
    Clock(Arc<Words>),
    /// A series of ids that the request's seed decides, see [`series`].
    Series {
        /// Ids that may occur.
        ids: std::ops::Range<u32>,
        /// Time between two tokens.
        pace_us: u64,
    },
}

/// The worker.
pub struct Worker {
    hello: Hello,
    voice: Voice,
    requests: Arc<Requests>,
    sent_tokens: Arc<AtomicU64>,
}

/// Requests that are neither answered nor cancelled.
#[derive(Default)]
struct Requests(Mutex<HashMap<String, Open>>);

/// One of them.
#[derive(Clone)]
struct Open {
    prompt_tokens: u32,
    /// Ends the answer.
    cancel: CancellationToken,
    /// How far the answer may run ahead of its reader; set when it begins.
    window: Option<Window>,
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Requests {
    fn begin(&self, request_id: &str, window: &Window) -> Option<Open> {
        let mut all = self.lock();
        let open = all.get_mut(request_id)?;
        open.window = Some(window.clone());
        Some(open.clone())
    }
}

impl Worker {
    /// A worker that says so of itself, and answers so.
    #[must_use]
    pub fn new(hello: Hello, voice: Voice) -> Self {
        Self { hello, voice, requests: Arc::default(), sent_tokens: Arc::default() }
    }

    /// Tokens handed to connections so far.
    #[must_use]
    pub fn sent_tokens(&self) -> u64 {
        self.sent_tokens.load(Ordering::Relaxed)
    }

    /// Requests neither finished nor cancelled.
    #[must_use]
    pub fn open_requests(&self) -> usize {
        self.requests.lock().len()
    }
}

impl Handler for Worker {
    type Request = DecodeRequest;
    type Event = DecodeEvent;

    fn hello(&self) -> Hello {
        self.hello.clone()
    }

    async fn handle(&self, _: ConnectionId, request: DecodeRequest, responder: Responder<DecodeEvent>) {
        match request {
            DecodeRequest::Prepare { request_id, tokens, .. } => {
                let prompt_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                let open = Open { prompt_tokens, cancel: CancellationToken::new(), window: None };
                self.requests.lock().insert(request_id, open);
                let prepared =
                    DecodeEvent::Prepared { resident_tokens: 0, queue: 0, rates: self.hello.rates };
                responder.send(&prepared).await;
            }
            DecodeRequest::Generate(spec) => {
                let window = Window::new(spec.window);
                let Some(Open { prompt_tokens, cancel, .. }) = self.requests.begin(&spec.request_id, &window)
                else {
                    return;
                };
                let pace_us = match self.voice {
                    Voice::Clock(_) => spec.sampling.seed,
                    Voice::Series { pace_us, .. } => pace_us,
                };
                let script = Script::new(spec.max_new_tokens, pace_us);
                let (voice, seed) = (self.voice.clone(), spec.sampling.seed);
                let sent_tokens = self.sent_tokens.clone();
                let speaker = Speaker { voice, seed, clock: Writer::default(), window, sent_tokens };
                let requests = self.requests.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        () = cancel.cancelled() => return,
                        () = answer(script, prompt_tokens, speaker, &responder) => {}
                    }
                    requests.lock().remove(&spec.request_id);
                });
            }
            DecodeRequest::Cancel { request_id } => {
                if let Some(open) = self.requests.lock().remove(&request_id) {
                    open.cancel.cancel();
                }
            }
            DecodeRequest::Read { request_id, events } => {
                if let Some(window) = self.requests.lock().get(&request_id).and_then(|o| o.window.as_ref()) {
                    window.give(events);
                }
            }
            DecodeRequest::GetStats => {
                responder.send(&DecodeEvent::Stats(DecodeStats::default())).await;
            }
            _ => {}
        }
    }

    async fn disconnected(&self, _: ConnectionId) {
        for (_, open) in self.requests.lock().drain() {
            open.cancel.cancel();
        }
    }
}

/// The voice of one answer.
struct Speaker {
    voice: Voice,
    seed: u64,
    clock: Writer,
    window: Window,
    sent_tokens: Arc<AtomicU64>,
}

impl Speaker {
    fn say(&mut self, position: u32) -> u32 {
        match &self.voice {
            Voice::Clock(words) => words.word(self.clock.next(now_us())).0,
            Voice::Series { ids, .. } => series(self.seed, position, ids),
        }
    }
}

/// Id number `position` of the series of a seed: two series differ almost everywhere, and a shifted one differs from
/// itself.
#[must_use]
pub fn series(seed: u64, position: u32, ids: &std::ops::Range<u32>) -> u32 {
    // SplitMix64: well mixed from any counter.
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(u64::from(position) << 32 | 1);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let span = u64::from(ids.end - ids.start);
    ids.start + u32::try_from((x ^ (x >> 31)) % span).unwrap_or(0)
}

async fn answer(script: Script, prompt: u32, mut speaker: Speaker, responder: &Responder<DecodeEvent>) {
    let mut pace = Pace::start(script);
    let start = now_us();
    let mut position = 0;
    while pace.next().await {
        // A decoder says that the prompt is in when it has the first token.
        if position == 0 {
            responder.send(&DecodeEvent::Started(Box::new(receipt(prompt)))).await;
        }
        speaker.window.take().await;
        let mut ids = vec![speaker.say(position)];
        position += 1;
        // Tokens that exist go together, as a decode worker's do.
        while script.pace_us == 0 && pace.next().await {
            ids.push(speaker.say(position));
            position += 1;
        }
        speaker.sent_tokens.fetch_add(ids.len() as u64, Ordering::Relaxed);
        responder.send(&DecodeEvent::Token { choice: 0, ids, logprobs: Vec::new() }).await;
    }
    let decode_ms = (now_us() - start) as f64 / 1000.0;
    let (reason, completion_tokens) = (FinishReason::Length, script.tokens);
    responder.send(&DecodeEvent::Finished { choice: 0, reason, completion_tokens, decode_ms }).await;
}

/// Everything computed by the decoder itself.
fn receipt(prompt_tokens: u32) -> DecodeReceipt {
    DecodeReceipt {
        prompt_tokens,
        cached_tokens: 0,
        bridged_tokens: 0,
        native_tokens: prompt_tokens,
        blocks: 0,
        payload_bytes: 0,
        digest: None,
        transfer_failure: None,
        queue_ms: 0.0,
        wait_ms: 0.0,
        ingest_ms: 0.0,
        prefill_ms: 0.0,
    }
}

/// What a decode worker with this model says of itself. The cache it publishes is nobody's.
#[must_use]
pub fn hello(model: &Model) -> Hello {
    let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let layer = LayerCache::Full { n_kv_heads: 2, head_dim: 16, dtype: Dtype::F32 };
    let cache = CacheIdentity {
        fingerprint: Hex([9; 32]),
        layout: CacheLayout::uniform(1, layer, 256),
        recipe: KvRecipe {
            rope: RopeRecipe { inv_freq: vec![1.0; 8], sin_cos: SinCos::default() },
            projection_digests: vec![Hex([0; 32])],
            summation_runs: vec![],
        },
        bulk_addr: "127.0.0.1:9".to_owned(),
    };
    Hello {
        protocol: PROTOCOL_VERSION,
        role: Role::Decode,
        node: "script".to_owned(),
        version: "0".to_owned(),
        engine: "script".to_owned(),
        model: model.spec.name.clone(),
        tokenizer_digest: Hex(model.digests().tokenizer),
        vocab_size: small(model.spec.vocab_size),
        max_tokens: small(model.spec.max_positions),
        capacity_tokens: 0,
        rates: Rates::default(),
        cache: Some(cache),
    }
}
