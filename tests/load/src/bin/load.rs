//! `pd-load`: one measurement of one gateway. Prints a report as JSON.

use clap::{Parser, Subcommand};
use pd_load::client::{Report, StreamPlan, Target, closed_loop, fixed_rate, streams};
use pd_load::process::Usage;
use pd_load::timecode::Words;
use shared::tokenizer::Tokenizer;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Loads a gateway and measures it.
#[derive(Parser)]
struct Args {
    /// Gateway, host:port
    #[arg(long)]
    addr: String,
    /// Model name to ask for
    #[arg(long)]
    model: String,
    /// Key to send
    #[arg(long)]
    api_key: Option<String>,
    /// Process whose CPU time and memory to measure, with its children
    #[arg(long)]
    pid: Option<u32>,
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Subcommand)]
enum Mode {
    /// Short whole answers at a fixed rate
    Rate {
        #[arg(long)]
        per_s: f64,
        #[arg(long)]
        seconds: f64,
        #[arg(long, default_value_t = 16)]
        tokens: u32,
    },
    /// As many short whole answers as there can be
    Max {
        #[arg(long, default_value_t = 32)]
        connections: u64,
        #[arg(long)]
        seconds: f64,
        #[arg(long, default_value_t = 16)]
        tokens: u32,
    },
    /// Event streams
    Streams {
        #[arg(long)]
        streams: u32,
        #[arg(long, default_value_t = 1)]
        rounds: u32,
        #[arg(long, default_value_t = 200)]
        tokens: u32,
        #[arg(long)]
        pace_us: u64,
        /// The source's model: its vocabulary tells when tokens were sent
        #[arg(long)]
        vocabulary: PathBuf,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let authorization = args.api_key.map(|key| format!("Bearer {key}"));
    let target = Target { addr: args.addr, model: args.model, authorization };
    let words = match &args.mode {
        Mode::Streams { vocabulary, .. } => Some(Arc::new(Words::of(&Tokenizer::open(vocabulary)?)?)),
        Mode::Rate { .. } | Mode::Max { .. } => None,
    };
    let of = |pid: Option<u32>| pid.map(Usage::of).unwrap_or_default();
    let (before, own) = (of(args.pid), Usage::of(std::process::id()));
    let peak = Arc::new(AtomicU64::new(0));
    let watch = args.pid.map(|pid| tokio::spawn(watch_memory(pid, peak.clone())));
    let mut report = match args.mode {
        Mode::Rate { per_s, seconds, tokens } => {
            fixed_rate(&target, per_s, Duration::from_secs_f64(seconds), tokens).await
        }
        Mode::Max { connections, seconds, tokens } => {
            closed_loop(&target, connections, Duration::from_secs_f64(seconds), tokens).await
        }
        Mode::Streams { streams: n, rounds, tokens, pace_us, .. } => {
            let plan = StreamPlan { streams: n, rounds, tokens, pace_us, stall: Duration::from_secs(60) };
            match words {
                Some(words) => streams(&target, words, plan).await,
                None => Report::default(),
            }
        }
    };
    report.memory_peak_bytes = peak.load(Ordering::Relaxed);
    report.used(before, of(args.pid));
    report.client_cpu_s = Usage::of(std::process::id()).cpu_s - own.cpu_s;
    if let Some(watch) = watch {
        watch.abort();
    }
    print(&report)
}

/// Keeps the largest memory seen, twice a second: reading it is not free for the process that is read.
async fn watch_memory(pid: u32, peak: Arc<AtomicU64>) {
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        peak.fetch_max(Usage::of(pid).memory_bytes, Ordering::Relaxed);
    }
}

#[allow(clippy::print_stdout, reason = "the report is what this program is for")]
fn print(report: &Report) -> Result<(), Box<dyn std::error::Error>> {
    println!("{}", serde_json::to_string(report)?);
    Ok(())
}
