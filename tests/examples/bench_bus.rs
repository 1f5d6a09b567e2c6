//! `make bench-bus`: how fast a command goes round, and how much memory much output takes.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::panic,
    reason = "a benchmark stops at the first failure and prints what it measured"
)]

use pd_tests::agents::{AgentScene, exec};
use pd_tests::process::memory_bytes;
use shared::bus::{Exit, Frame, Operator};
use std::time::{Duration, Instant};

const RUNS: usize = 1000;
const OUTPUT_BYTES: usize = 100_000_000;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let scene = AgentScene::start("unrestricted = true");
        let operator = scene.operator().await;
        round_trips(&scene, &operator).await;
        much_output(&scene, &operator).await;
    });
}

/// From the request to the end frame: sign, send, verify, write down, start a contained process, wait, answer.
async fn round_trips(scene: &AgentScene, operator: &Operator) {
    for _ in 0..20 {
        once(scene, operator).await;
    }
    let mut times = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        times.push(once(scene, operator).await.as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    println!("{RUNS} runs of `true` over loopback NATS, one after another, milliseconds");
    println!("  p50 {:.2}   p90 {:.2}   p99 {:.2}   max {:.2}", at(0.5), at(0.9), at(0.99), at(1.0));
    println!(
        "  bars: p50 at most 5, p99 at most 25: {}",
        if at(0.5) <= 5.0 && at(0.99) <= 25.0 { "met" } else { "MISSED" }
    );
}

async fn once(scene: &AgentScene, operator: &Operator) -> Duration {
    let start = Instant::now();
    let running = operator.start(&scene.node, exec(&["true"], Duration::from_secs(10))).await.unwrap();
    let (.., end) = running.collect().await.unwrap();
    assert_eq!(end.exit, Exit::Code { code: 0 });
    start.elapsed()
}

async fn much_output(scene: &AgentScene, operator: &Operator) {
    let bytes = OUTPUT_BYTES.to_string();
    let (agent, here) = (scene.agent.pid(), std::process::id());
    let resident = |pid: u32, field: &str| memory_bytes(pid, field).unwrap() as f64 / f64::from(1 << 20);
    let before = (resident(agent, "VmRSS"), resident(here, "VmRSS"));
    let start = Instant::now();
    let argv = ["head", "-c", &bytes, "/dev/zero"];
    let mut running = operator.start(&scene.node, exec(&argv, Duration::from_secs(300))).await.unwrap();
    let mut got = 0;
    loop {
        match running.next().await.unwrap() {
            Frame::Stdout(bytes) => got += bytes.len(),
            Frame::Stderr(bytes) => panic!("{}", String::from_utf8_lossy(&bytes)),
            Frame::End(end) => break assert_eq!(end.exit, Exit::Code { code: 0 }),
        }
    }
    let took = start.elapsed().as_secs_f64();
    assert_eq!(got, OUTPUT_BYTES);
    println!(
        "{} MB of output in {took:.2} s: {:.0} MB/s",
        OUTPUT_BYTES / 1_000_000,
        OUTPUT_BYTES as f64 / 1e6 / took
    );
    println!(
        "  resident MiB before and at the peak: agent {:.1} → {:.1}, operator {:.1} → {:.1}",
        before.0,
        resident(agent, "VmHWM"),
        before.1,
        resident(here, "VmHWM")
    );
}
