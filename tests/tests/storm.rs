//! Random traffic against a real decode worker: control messages in any order with wild values, and mutilated
//! transfers. Afterwards it still answers as before and holds nothing.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; the seed and the counts are shown"
)]

use pd_tests::bulk::{Bulk, open_of, rows};
use pd_tests::decoder::{Decoder, fresh_id};
use pd_tests::stack::Worker;
use pd_tests::tiny;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use shared::control::{ClusterKey, ControlClient, DecodeRequest};
use shared::tokens::TokenIds;
use shared::wire::FrameKind;
use std::time::{Duration, Instant};

const PROMPT: u32 = 50;

fn time() -> Duration {
    let ms = std::env::var("PD_TEST_FUZZ_MS").ok().and_then(|v| v.parse().ok()).unwrap_or(3000);
    Duration::from_millis(ms)
}

fn rng() -> ChaCha8Rng {
    let seed = std::env::var("PD_TEST_FUZZ_SEED").ok().and_then(|v| v.parse().ok()).unwrap_or(1);
    eprintln!("seed {seed}");
    ChaCha8Rng::seed_from_u64(seed)
}

/// A decoder, an answer of it from before the storm, and the check that it gives it again.
struct Victim {
    worker: Worker,
    decoder: Decoder,
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

impl Victim {
    async fn new() -> Self {
        let worker = Worker::decode(tiny::model(), &["--block-tokens", "16", "--max-requests", "8"]);
        let decoder = worker.decoder().await;
        let prompt: Vec<u32> = (0..80).map(|i| 3 + i * 37 % 250).collect();
        let answer = decoder.native(&prompt, 12).await.ids;
        Self { worker, decoder, prompt, answer }
    }

    async fn is_unharmed(&mut self) {
        assert!(self.worker.process.wait(Duration::ZERO).is_none(), "it ended");
        self.decoder.settled().await;
        assert_eq!(self.decoder.native(&self.prompt, 12).await.ids, self.answer);
        assert!(!self.worker.process.log().contains("panicked"), "{}", self.worker.process.log_tail());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn control_messages_in_any_order_with_any_values() {
    let mut victim = Victim::new().await;
    let (mut rng, end, mut sent, mut connections) = (rng(), Instant::now() + time(), 0, 0);
    while Instant::now() < end {
        let (addr, key) = (&victim.worker.addresses.control, ClusterKey::loopback());
        let connected = ControlClient::<Value, Value>::connect(addr, &key, Duration::from_secs(10)).await;
        let (client, _) = connected.unwrap();
        connections += 1;
        for _ in 0..rng.random_range(1..40) {
            client.notify(&message(&mut rng));
            sent += 1;
        }
        tokio::time::sleep(Duration::from_millis(rng.random_range(0..30))).await;
    }
    eprintln!("{sent} messages on {connections} connections");
    victim.is_unharmed().await;
}

/// A request that is well-formed more often than not, about one of few names.
fn message(rng: &mut ChaCha8Rng) -> Value {
    let id = ["a", "b", "c", ""][rng.random_range(0..4)];
    let prompt: Vec<u32> = (0..rng.random_range(0..120)).map(|_| rng.random_range(0..259)).collect();
    let small = |rng: &mut ChaCha8Rng| rng.random_range(0..9) * 16;
    let mut message = match rng.random_range(0..8) {
        0 | 1 => json!({"type": "prepare", "request_id": id, "tokens": TokenIds::from(prompt)}),
        2 => {
            json!({"type": "open_transfer", "request_id": id, "token_start": small(rng), "token_end": small(rng),
                    "idle_timeout_ms": rng.random_range(0..200)})
        }
        3 => {
            json!({"type": "abort_transfer", "request_id": id, "abort": {"code": "timeout", "message": "x"}})
        }
        4 | 5 => json!({"type": "generate", "request_id": id, "max_new_tokens": rng.random_range(0..40),
                    "sampling": {"temperature": rng.random_range(0..3), "top_p": 0.5, "top_k": 3, "seed": 1},
                    "stop_token_ids": [2], "require": "nothing", "transfer_timeout_ms": rng.random_range(0..300)}),
        6 => json!({"type": "cancel", "request_id": id}),
        _ => json!({"type": "get_stats"}),
    };
    if rng.random_ratio(1, 6) {
        let fields: Vec<String> = message.as_object().unwrap().keys().cloned().collect();
        let field = &fields[rng.random_range(0..fields.len())];
        let wild = [
            json!(null),
            json!(-1),
            json!(u32::MAX),
            json!(u64::MAX),
            json!(1e308),
            json!("\u{0}"),
            json!([[]]),
            json!("AAAA"),
            json!({"temperature": -5, "top_p": 9, "top_k": 4294967295u32, "seed": 0}),
            json!("/////w=="),
        ];
        message[field] = wild[rng.random_range(0..wild.len())].clone();
    }
    message
}

#[tokio::test(flavor = "multi_thread")]
async fn mutilated_transfers() {
    let mut victim = Victim::new().await;
    let cache = victim.decoder.hello.cache.clone().unwrap();
    let (mut rng, end, mut confirmed, mut refused) = (rng(), Instant::now() + time(), 0, 0);
    while Instant::now() < end {
        let prompt: Vec<u32> = (0..PROMPT).map(|_| rng.random_range(3..259)).collect();
        let id = fresh_id("storm");
        victim.decoder.prepare(&id, &prompt).await.unwrap();
        let offer = victim.decoder.offer(&id, 0..PROMPT - 1, 300).await.unwrap();
        // The bytes of an honest transfer, written to a socket that keeps them instead of sending them.
        let mut bulk = Bulk::connect(&offer).await;
        bulk.record();
        bulk.control(FrameKind::Open, &open_of(&offer, &cache, &prompt)).await;
        for r in rows(&cache.layout, 0..PROMPT - 1) {
            bulk.data(&r).await;
        }
        let commit = bulk.commit_of(0, PROMPT - 1);
        bulk.control(FrameKind::Commit, &commit).await;
        let mut bytes = bulk.recorded();
        for _ in 0..rng.random_range(0..3) {
            mutilate(&mut rng, &mut bytes);
        }
        bulk.raw(&bytes).await;
        if rng.random() {
            bulk.close().await;
        }
        // A mutilated open frame can be waited for as long as a connection may be without a ticket (10 s).
        let reply = bulk.reply(Duration::from_secs(15)).await;
        match (&reply.receipt, reply.abort.is_some() || reply.closed) {
            (Some(receipt), _) => {
                // What was confirmed is what was meant, to the bit.
                assert_eq!((receipt.token_end, receipt.digest), (PROMPT - 1, commit.digest));
                confirmed += 1;
            }
            (None, true) => refused += 1,
            (None, false) => panic!("no end"),
        }
        victim.decoder.notify(&DecodeRequest::Cancel { request_id: id });
    }
    eprintln!("{confirmed} confirmed, {refused} refused");
    assert!(confirmed > 0 && refused > 0, "{confirmed} {refused}");
    victim.is_unharmed().await;
}

fn mutilate(rng: &mut ChaCha8Rng, bytes: &mut Vec<u8>) {
    let at = rng.random_range(0..bytes.len());
    let len = rng.random_range(0..200).min(bytes.len() - at);
    match rng.random_range(0..6) {
        0 => bytes[at] ^= 1 << rng.random_range(0..8),
        1 => bytes.truncate(at.max(1)),
        2 => drop(bytes.drain(at..at + len.min(bytes.len() - 1))),
        3 => {
            let piece = bytes[at..at + len].to_vec();
            bytes.splice(at..at, piece);
        }
        4 => {
            // A header field of some frame.
            let frames: Vec<usize> =
                bytes.windows(4).enumerate().filter(|(_, w)| *w == b"PDBR").map(|(i, _)| i).collect();
            let Some(frame) = frames.get(rng.random_range(0..frames.len().max(1))) else { return };
            let field = frame + rng.random_range(0..56);
            if let Some(byte) = bytes.get_mut(field) {
                *byte = rng.random();
            }
        }
        _ => bytes.iter_mut().skip(at).take(len).for_each(|b| *b = 0xff),
    }
}
