//! Measures a running `pd-decode` over its control port:
//!
//! ```text
//! pd-decode --model MODEL --listen 127.0.0.1:8101 &
//! cargo run --release -p decode-worker --example probe -- 127.0.0.1:8101 [PROMPT_TOKENS]
//! ```
#![allow(clippy::print_stdout, reason = "a command-line tool")]

use decode_worker::block::ArrayOffsets;
use shared::control::{
    ClusterKey, ControlClient, DecodeEvent, DecodeReceipt, DecodeRequest, DecodeStats, EventStream,
    GenerateSpec, Hello, Incoming, Require, Sampling, TransferOffer,
};
use shared::hexbytes::Hex;
use shared::keys::tokens_digest;
use shared::layout::CacheLayout;
use shared::transport::{FrameReceiver as _, FrameSender as _, connect};
use shared::wire::{Commit, FrameHeader, FrameKind, Open, TransferDigest, parse_credit, payload_crc};
use std::time::{Duration, Instant};

type Client = ControlClient<DecodeRequest, DecodeEvent>;
type Failure = Box<dyn std::error::Error>;

const LIMIT: Duration = Duration::from_secs(600);
const ABORTED_REQUESTS: u32 = 200;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let addr = args.next().ok_or("usage: probe CONTROL_ADDR [PROMPT_TOKENS]")?;
    let prompt_tokens: u32 = args.next().map_or(Ok(1500), |n| n.parse())?;
    let (client, hello) = Client::connect(&addr, &ClusterKey::loopback(), LIMIT).await?;
    println!("{} on {}, hello rates {:?}", hello.model, hello.engine, hello.rates);

    let prompt = prompt(&hello, 1, prompt_tokens);
    let native = answer(&client, "native", &prompt, 32).await?;
    native.print("native");
    let warm = answer(&client, "warm", &prompt, 32).await?;
    warm.print("warm");
    println!("  same tokens: {}", native.ids == warm.ids);

    cancel_latency(&client, &hello).await?;
    ingest(&client, &hello, prompt_tokens).await?;
    aborted_requests(&addr, &hello).await
}

struct Answer {
    ids: Vec<u32>,
    receipt: DecodeReceipt,
    ttft_ms: f64,
    decode_ms: f64,
}

impl Answer {
    fn print(&self, name: &str) {
        let r = &self.receipt;
        let computed = f64::from(r.native_tokens) / r.prefill_ms * 1e3;
        let decode = (self.ids.len() - 1) as f64 / self.decode_ms * 1e3;
        println!(
            "{name}: {} prompt tokens, {} cached, ttft {:.1} ms (ingest {:.1}, prefill {:.1} = {computed:.1} tok/s), \
             {} tokens at {decode:.2} tok/s",
            r.prompt_tokens,
            r.cached_tokens,
            self.ttft_ms,
            r.ingest_ms,
            r.prefill_ms,
            self.ids.len(),
        );
    }
}

/// Distinct prompts for distinct seeds; no token is special.
fn prompt(hello: &Hello, seed: u32, n: u32) -> Vec<u32> {
    (0..n)
        .map(|i| {
            1000 + (seed.wrapping_mul(7919).wrapping_add(i.wrapping_mul(i) * 31)) % (hello.vocab_size - 1000)
        })
        .collect()
}

async fn prepare(client: &Client, id: &str, tokens: &[u32]) -> Result<u32, Failure> {
    let request =
        DecodeRequest::Prepare { request_id: id.into(), tokens: tokens.to_vec().into(), constraint: None };
    match client.call(&request, LIMIT).await? {
        DecodeEvent::Prepared { resident_tokens, .. } => Ok(resident_tokens),
        other => Err(format!("{other:?}").into()),
    }
}

async fn open(client: &Client, id: &str, end: u32) -> Result<TransferOffer, Failure> {
    let request = DecodeRequest::OpenTransfer {
        request_id: id.into(),
        token_start: 0,
        token_end: end,
        idle_timeout_ms: 60_000,
    };
    match client.call(&request, LIMIT).await? {
        DecodeEvent::Offer(offer) => Ok(offer),
        other => Err(format!("{other:?}").into()),
    }
}

async fn generate(
    client: &Client,
    id: &str,
    max_new_tokens: u32,
) -> Result<EventStream<DecodeEvent>, Failure> {
    let spec = GenerateSpec {
        request_id: id.into(),
        max_new_tokens,
        sampling: Sampling::greedy(),
        stop_token_ids: vec![],
        require: Require::Nothing,
        transfer_timeout_ms: 60_000,
        choices: 1,
        logprobs: None,
        prompt_logprobs: None,
        window: 0,
    };
    Ok(client.request(&DecodeRequest::Generate(spec)).await?)
}

async fn answer(client: &Client, id: &str, tokens: &[u32], max_new_tokens: u32) -> Result<Answer, Failure> {
    prepare(client, id, tokens).await?;
    let start = Instant::now();
    let events = generate(client, id, max_new_tokens).await?;
    collect(events, start).await
}

async fn collect(mut events: EventStream<DecodeEvent>, start: Instant) -> Result<Answer, Failure> {
    let (mut ids, mut receipt, mut ttft_ms) = (Vec::new(), None, 0.0);
    loop {
        match events.next().await {
            Some(Incoming::Event(DecodeEvent::Started(r))) => receipt = Some(*r),
            Some(Incoming::Event(DecodeEvent::Token { ids: new, .. })) => {
                if ids.is_empty() {
                    ttft_ms = start.elapsed().as_secs_f64() * 1e3;
                }
                ids.extend(new);
            }
            Some(Incoming::Event(DecodeEvent::Finished { decode_ms, .. })) => {
                let receipt = receipt.ok_or("no receipt")?;
                return Ok(Answer { ids, receipt, ttft_ms, decode_ms });
            }
            Some(Incoming::Event(DecodeEvent::Progress { .. })) => {}
            other => return Err(format!("{other:?}").into()),
        }
    }
}

async fn stats(client: &Client) -> Result<DecodeStats, Failure> {
    match client.call(&DecodeRequest::GetStats, LIMIT).await? {
        DecodeEvent::Stats(stats) => Ok(stats),
        other => Err(format!("{other:?}").into()),
    }
}

/// Time until nothing is held any more.
async fn until_free(client: &Client) -> Result<Duration, Failure> {
    let start = Instant::now();
    loop {
        let s = stats(client).await?;
        if u64::from(s.requests + s.transfers) + s.store_references + s.reserved_bytes + s.sequence_bytes == 0
        {
            return Ok(start.elapsed());
        }
        if start.elapsed() > Duration::from_secs(60) {
            return Err(format!("still held: {s:?}").into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn cancel_latency(client: &Client, hello: &Hello) -> Result<(), Failure> {
    for (what, n, after) in [("decode", 40, 5), ("prefill", 1500, 0)] {
        let mut worst = Duration::ZERO;
        for round in 0..3 {
            prepare(client, "cancel", &prompt(hello, 50 + round, n)).await?;
            let mut events = generate(client, "cancel", 4000).await?;
            let (mut tokens, mut chunks) = (0, 0);
            while tokens < after || (after == 0 && chunks < 1) {
                match events.next().await {
                    Some(Incoming::Event(DecodeEvent::Token { ids, .. })) => tokens += ids.len(),
                    Some(Incoming::Event(DecodeEvent::Progress { .. })) => chunks += 1,
                    Some(_) => {}
                    None => return Err("closed".into()),
                }
            }
            client.notify(&DecodeRequest::Cancel { request_id: "cancel".into() });
            worst = worst.max(until_free(client).await?);
        }
        println!("cancel during {what}: everything free after at most {:.1} ms", worst.as_secs_f64() * 1e3);
    }
    Ok(())
}

/// Sends tokens `0..end` of zeros; without a commit when `commit` is false.
async fn send(
    hello: &Hello,
    offer: &TransferOffer,
    tokens: &[u32],
    end: u32,
    commit: bool,
) -> Result<u64, Failure> {
    let cache = hello.cache.as_ref().ok_or("no cache identity")?;
    let layout: &CacheLayout = &cache.layout;
    let (mut tx, mut rx) = connect(offer.bulk_addr.as_str(), LIMIT).await?;
    let open = Open {
        ticket: offer.ticket,
        fingerprint: cache.fingerprint,
        layout_digest: Hex(layout.digest()),
        tokens_digest: Hex(tokens_digest(tokens)),
        token_start: offer.token_start,
        token_end: offer.token_end,
    };
    let body = serde_json::to_vec(&open)?;
    tx.send(&FrameHeader::control(FrameKind::Open, offer.transfer_id, 0, &body), &body).await?;
    let (mut seq, mut digest, mut credit, mut at) = (1, TransferDigest::default(), 0_u64, 0);
    while at < end {
        let count = layout.block_tokens.min(end - at);
        for (layer, part) in layout.arrays() {
            let bytes = layout.layers[usize::from(layer)].bytes_per_token(part) * u64::from(count);
            while credit < bytes {
                let header = rx.header().await?.ok_or("closed")?;
                let mut payload = vec![0; header.payload_bytes as usize];
                rx.payload(&header, &mut payload).await?;
                credit += parse_credit(&payload).ok_or("not a credit")?;
            }
            credit -= bytes;
            let payload = vec![0; bytes as usize];
            let header = FrameHeader {
                layer,
                part: part as u16,
                token_start: at,
                token_count: count,
                crc32c: payload_crc(&payload),
                ..FrameHeader::control(FrameKind::Data, offer.transfer_id, seq, &payload)
            };
            digest.add(layer, part, at, count, &payload);
            tx.send(&header, &payload).await?;
            seq += 1;
        }
        at += count;
    }
    if commit {
        let commit = Commit {
            token_start: 0,
            token_end: end,
            frames: digest.frames(),
            payload_bytes: digest.payload_bytes(),
            digest: Hex(digest.finish()),
            short_reason: None,
        };
        let body = serde_json::to_vec(&commit)?;
        tx.send(&FrameHeader::control(FrameKind::Commit, offer.transfer_id, seq, &body), &body).await?;
        while let Some(header) = rx.header().await? {
            let mut payload = vec![0; header.payload_bytes as usize];
            rx.payload(&header, &mut payload).await?;
            if header.kind == FrameKind::Abort {
                return Err(String::from_utf8_lossy(&payload).into_owned().into());
            }
        }
    }
    Ok(digest.payload_bytes())
}

async fn ingest(client: &Client, hello: &Hello, n: u32) -> Result<(), Failure> {
    let cache = hello.cache.as_ref().ok_or("no cache identity")?;
    let arrays = ArrayOffsets::new(&cache.layout).n_arrays();
    let tokens = prompt(hello, 99, n);
    let before = stats(client).await?;
    prepare(client, "ingest", &tokens).await?;
    let offer = open(client, "ingest", n - 1).await?;
    let started = Instant::now();
    let events = generate(client, "ingest", 4).await?;
    let bytes = send(hello, &offer, &tokens, n - 1, true).await?;
    let took = started.elapsed();
    let answer = collect(events, started).await?;
    answer.print("bridged (zeros)");
    let after = stats(client).await?;
    let grown = after.resident_memory_bytes.saturating_sub(before.resident_memory_bytes) >> 20;
    println!(
        "transfer: {arrays} arrays, {:.1} MB in {:.0} ms = {:.2} GB/s with both ends on this machine; resident +{grown} MiB for {} MiB stored",
        bytes as f64 / 1e6,
        took.as_secs_f64() * 1e3,
        bytes as f64 / took.as_secs_f64() / 1e9,
        (after.store_bytes - before.store_bytes) >> 20,
    );
    Ok(())
}

/// Requests that die at every stage, by cancel and by a lost connection.
async fn aborted_requests(addr: &str, hello: &Hello) -> Result<(), Failure> {
    let (client, _) = Client::connect(addr, &ClusterKey::loopback(), LIMIT).await?;
    until_free(&client).await?;
    let before = stats(&client).await?;
    let started = Instant::now();
    for i in 0..ABORTED_REQUESTS {
        let tokens = prompt(hello, 1000 + i, 700);
        let own = if i % 2 == 0 {
            client.clone()
        } else {
            Client::connect(addr, &ClusterKey::loopback(), LIMIT).await?.0
        };
        let id = format!("aborted-{i}");
        prepare(&own, &id, &tokens).await?;
        let stage = i / 2 % 5;
        let mut events = None;
        if stage >= 1 {
            let offer = open(&own, &id, 699).await?;
            if stage >= 2 {
                events = Some(generate(&own, &id, 100).await?);
            }
            if stage >= 3 {
                send(hello, &offer, &tokens, 256, stage == 4).await?;
            }
        }
        if i % 2 == 0 {
            own.notify(&DecodeRequest::Cancel { request_id: id });
        }
        drop((own, events));
    }
    let free = until_free(&client).await?;
    let after = stats(&client).await?;
    println!(
        "{ABORTED_REQUESTS} aborted requests in {:.1} s, all free {:.1} ms after the last; resident {} -> {} MiB, store {} -> {} MiB ({} -> {} blocks)",
        started.elapsed().as_secs_f64(),
        free.as_secs_f64() * 1e3,
        before.resident_memory_bytes >> 20,
        after.resident_memory_bytes >> 20,
        before.store_bytes >> 20,
        after.store_bytes >> 20,
        before.store_blocks,
        after.store_blocks,
    );
    Ok(())
}
