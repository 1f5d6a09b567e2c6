//! How many tokens a second one decode worker gives to 1, 2, 4, 8 and 16 requests at once, whether each gets what it
//! would get alone, and what a long prompt costs the others:
//!
//! ```text
//! cargo run --release -p decode-worker --example batch -- target/release/pd-decode MODEL [ROUNDS]
//! ```
#![allow(clippy::print_stdout, reason = "a command-line tool")]

use shared::control::{
    ClusterKey, ControlClient, DecodeEvent, DecodeRequest, EventStream, GenerateSpec, Incoming, Require,
    Sampling,
};
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

type Client = ControlClient<DecodeRequest, DecodeEvent>;
type Failure = Box<dyn std::error::Error + Send + Sync>;

const LIMIT: Duration = Duration::from_secs(600);
const CONCURRENT: [usize; 5] = [1, 2, 4, 8, 16];
const PROMPT_TOKENS: u32 = 40;
const ANSWER_TOKENS: u32 = 64;
const LONG_PROMPT_TOKENS: u32 = 1500;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let (Some(binary), Some(model)) = (args.next(), args.next()) else {
        return Err("usage: batch PD_DECODE MODEL [ROUNDS]".into());
    };
    let rounds: usize = args.next().map_or(Ok(5), |n| n.parse())?;
    let worker = Worker::start(&binary, &model)?;
    throughput(&worker, rounds).await?;
    long_prompt(&worker).await
}

/// A running `pd-decode`, which ends with its standard input.
struct Worker {
    process: Child,
    addr: String,
}

impl Worker {
    fn start(binary: &str, model: &str) -> Result<Self, Failure> {
        let mut process = Command::new(binary)
            .args(["--model", model, "--exit-with-stdin", "--max-requests", "64"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        let addresses: serde_json::Value = serde_json::from_str(&line)?;
        let addr = addresses["control"].as_str().ok_or("no control address")?.to_owned();
        Ok(Self { process, addr })
    }

    async fn client(&self) -> Result<Client, Failure> {
        Ok(Client::connect(&self.addr, &ClusterKey::loopback(), LIMIT).await?.0)
    }

    /// Processor seconds used so far; 0 where the system does not tell.
    fn cpu_s(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default();
        let ticks = after_name.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<f64>().ok());
        ticks.sum::<f64>() / 100.0
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// One answer and when its tokens came.
struct Answer {
    ids: Vec<u32>,
    at: Vec<Instant>,
}

async fn start(
    client: &Client,
    id: &str,
    prompt: Vec<u32>,
    n: u32,
) -> Result<EventStream<DecodeEvent>, Failure> {
    let request = DecodeRequest::Prepare { request_id: id.into(), tokens: prompt.into(), constraint: None };
    match client.call(&request, LIMIT).await? {
        DecodeEvent::Prepared { .. } => {}
        other => return Err(format!("{other:?}").into()),
    }
    let spec = GenerateSpec {
        request_id: id.into(),
        max_new_tokens: n,
        sampling: Sampling::greedy(),
        stop_token_ids: vec![],
        require: Require::Nothing,
        transfer_timeout_ms: 1000,
        choices: 1,
        logprobs: None,
        prompt_logprobs: None,
        window: 0,
    };
    Ok(client.request(&DecodeRequest::Generate(spec)).await?)
}

async fn collect(mut events: EventStream<DecodeEvent>) -> Result<Answer, Failure> {
    let mut answer = Answer { ids: Vec::new(), at: Vec::new() };
    loop {
        match events.next().await {
            Some(Incoming::Event(DecodeEvent::Token { ids, .. })) => {
                answer.at.extend(ids.iter().map(|_| Instant::now()));
                answer.ids.extend(ids);
            }
            Some(Incoming::Event(DecodeEvent::Finished { .. })) => return Ok(answer),
            Some(Incoming::Event(DecodeEvent::Error(error))) => return Err(error.into()),
            Some(_) => {}
            None => return Err("the worker closed the connection".into()),
        }
    }
}

/// Different prompts for different seeds; no token is special.
fn prompt(seed: u32, n: u32) -> Vec<u32> {
    (0..n)
        .map(|i| {
            1000 + seed.wrapping_mul(7919).wrapping_add(i.wrapping_mul(i.wrapping_add(seed)).wrapping_mul(31))
                % 48_000
        })
        .collect()
}

async fn together(
    worker: &Worker,
    client: &Client,
    n: usize,
    tokens: u32,
) -> Result<(Vec<Answer>, f64), Failure> {
    let mut readers = Vec::new();
    for i in 0..n {
        let events = start(client, &format!("r{i}"), prompt(i as u32, PROMPT_TOKENS), tokens).await?;
        readers.push(tokio::spawn(collect(events)));
    }
    let cpu = worker.cpu_s();
    let mut answers = Vec::new();
    for reader in readers {
        answers.push(reader.await??);
    }
    Ok((answers, worker.cpu_s() - cpu))
}

/// Tokens per second while all answers are being written.
fn steady(answers: &[Answer]) -> f64 {
    let first = answers.iter().filter_map(|a| a.at.first()).max();
    let last = answers.iter().filter_map(|a| a.at.last()).min();
    let (Some(&first), Some(&last)) = (first, last) else { return 0.0 };
    let tokens = answers.iter().flat_map(|a| &a.at).filter(|&&at| at > first && at <= last).count();
    tokens as f64 / last.duration_since(first).as_secs_f64().max(1e-9)
}

async fn throughput(worker: &Worker, rounds: usize) -> Result<(), Failure> {
    let client = worker.client().await?;
    let mut alone = Vec::new();
    for i in 0..CONCURRENT[CONCURRENT.len() - 1] {
        let events = start(&client, "alone", prompt(i as u32, PROMPT_TOKENS), ANSWER_TOKENS).await?;
        alone.push(collect(events).await?.ids);
    }
    let mut speeds = vec![Vec::new(); CONCURRENT.len()];
    let mut costs = speeds.clone();
    let mut different = 0;
    for _ in 0..rounds {
        for (slot, &n) in CONCURRENT.iter().enumerate() {
            let (answers, cpu_s) = together(worker, &client, n, ANSWER_TOKENS).await?;
            speeds[slot].push(steady(&answers));
            let tokens: usize = answers.iter().map(|a| a.ids.len()).sum();
            costs[slot].push(cpu_s * 1e3 / tokens as f64);
            different += answers.iter().zip(&alone).filter(|(a, ids)| a.ids != **ids).count();
        }
    }
    println!("concurrent  tokens/s (median of {rounds}, least to most)   ratio   processor ms per token");
    let base = median(&mut speeds[0].clone());
    for (slot, n) in CONCURRENT.iter().enumerate() {
        let speed = median(&mut speeds[slot]);
        let (least, most) = (speeds[slot][0], speeds[slot][rounds - 1]);
        let cost = median(&mut costs[slot]);
        println!("{n:>10}  {speed:>8.1}  ({least:.1} to {most:.1}) {:>22.2}   {cost:>8.1}", speed / base);
    }
    let answers = rounds * CONCURRENT.iter().sum::<usize>();
    println!("{different} of {answers} answers differ from the same prompt's answer alone (greedy)");
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Gaps between tokens within a time, in milliseconds, sorted.
fn gaps(answers: &[Answer], from: Instant, to: Instant) -> Vec<f64> {
    let pairs = answers.iter().flat_map(|a| a.at.windows(2));
    let mut gaps: Vec<f64> = pairs
        .filter(|w| w[1] > from && w[0] < to)
        .map(|w| w[1].duration_since(w[0]).as_secs_f64() * 1e3)
        .collect();
    gaps.sort_by(f64::total_cmp);
    gaps
}

fn share(sorted: &[f64], part: f64) -> f64 {
    sorted
        .get(((sorted.len() as f64 * part) as usize).min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or(0.0)
}

/// Seven answers under way, then a long prompt joins.
async fn long_prompt(worker: &Worker) -> Result<(), Failure> {
    let client = worker.client().await?;
    let mut readers = Vec::new();
    for i in 0..7 {
        let events = start(&client, &format!("w{i}"), prompt(i, PROMPT_TOKENS), 400).await?;
        readers.push(tokio::spawn(collect(events)));
    }
    tokio::time::sleep(Duration::from_secs(6)).await;
    let joined = Instant::now();
    let seed = 100_000 + std::process::id();
    let mut events = start(&client, "long", prompt(seed, LONG_PROMPT_TOKENS), 1).await?;
    let mut chunks = Vec::new();
    loop {
        match events.next().await {
            Some(Incoming::Event(DecodeEvent::Progress { done_tokens, .. })) => chunks.push(done_tokens),
            Some(Incoming::Event(DecodeEvent::Started(_))) => break,
            Some(Incoming::Event(_)) => {}
            other => return Err(format!("{other:?}").into()),
        }
    }
    let started = Instant::now();
    client.notify(&DecodeRequest::Cancel { request_id: "long".into() });
    let mut answers = Vec::new();
    for reader in readers {
        answers.push(reader.await??);
    }
    let largest = chunks.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
    println!(
        "a prompt of {LONG_PROMPT_TOKENS} tokens joins 7 answers: read in {} chunks of at most {largest} in {:.1} s",
        chunks.len(),
        started.duration_since(joined).as_secs_f64()
    );
    let first = answers.iter().filter_map(|a| a.at.first()).max().copied().unwrap_or(joined);
    for (when, from, to) in [("before", first, joined), ("meanwhile", joined, started)] {
        let gaps = gaps(&answers, from, to);
        println!(
            "  between tokens {when}: p50 {:.0} ms, p99 {:.0} ms, longest {:.0} ms ({} gaps)",
            share(&gaps, 0.5),
            share(&gaps, 0.99),
            share(&gaps, 1.0),
            gaps.len()
        );
    }
    Ok(())
}
