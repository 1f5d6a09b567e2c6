//! Workers found on the bus: a real NATS server, real workers, simulated agents.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; measurements are shown"
)]

use pd_tests::fakes::{FakeDecode, FakePrefill, Play, Step};
use pd_tests::http::{self, Reply, completion, metric};
use pd_tests::nats::Nats;
use pd_tests::scene::prompt;
use pd_tests::sim_agents::{SimulatedAgent, describe};
use pd_tests::stack::{Gateway, Worker};
use pd_tests::{tiny, wait};
use shared::bus::{NodeState, WorkerBeat};
use shared::control::FinishReason;
use shared::verdict::VerdictKind;
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);
const BLOCKS: [&str; 2] = ["--block-tokens", "16"];

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

async fn ask(gateway: &Gateway, prompt: &str, headers: &[(&str, &str)]) -> Reply {
    http::post(&gateway.addr, "/v1/completions", headers, &completion(prompt, 8)).await
}

/// Waits until a machine is in some state; the time that took.
async fn until_state(gateway: &Gateway, node: &str, state: &str, limit: Duration) -> Duration {
    let begun = Instant::now();
    wait::until(&format!("{node} is {state}"), limit, || async {
        (gateway.node_state(node).await.as_deref() == Some(state)).then_some(())
    })
    .await;
    begun.elapsed()
}

async fn until_bridged(gateway: &Gateway) {
    wait::until("a bridge", 30 * SECOND, || async {
        let reply = ask(gateway, &prompt(60), &[http::BRIDGE]).await;
        (reply.status == 200 && reply.verdict().verdict == VerdictKind::Complete).then_some(())
    })
    .await;
}

/// Two machines, a decode worker on one and a prefill worker on the other, and a gateway that knows only the bus.
struct Lab {
    nats: Nats,
    mac: SimulatedAgent,
    spark: SimulatedAgent,
    decode: Worker,
    prefill: Worker,
    gateway: Gateway,
}

impl Lab {
    async fn start() -> Self {
        let nats = Nats::start();
        let gateway = Gateway::on_bus(tiny::model(), &nats.url(), &["--reconnect-wait-ms", "15000"]);
        let decode = Worker::decode(tiny::model(), &BLOCKS);
        let prefill = Worker::prefill(tiny::model(), &[]);
        let settings = nats.settings();
        let mac =
            SimulatedAgent::start(&settings, "mac", vec![describe(&decode.addresses.control).await]).await;
        let spark =
            SimulatedAgent::start(&settings, "spark", vec![describe(&prefill.addresses.control).await]).await;
        gateway.ready(true).await;
        Self { nats, mac, spark, decode, prefill, gateway }
    }

    async fn native_truth(&self, text: &str) -> String {
        let reply = ask(&self.gateway, text, &[http::NATIVE]).await;
        assert_eq!(reply.status, 200);
        reply.text()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_found_drained_moved_and_lost() {
    let mut lab = Lab::start().await;
    let text = prompt(200);
    let bridged = ask(&lab.gateway, &text, &[http::BRIDGE]).await;
    assert_eq!(bridged.verdict().verdict, VerdictKind::Complete);

    // What the gateway shows of it.
    let shown = lab.gateway.nodes().await;
    assert_eq!((&shown["discovery"], &shown["bus"]["connected"]), (&"nats".into(), &true.into()));
    let nodes = shown["nodes"].as_array().unwrap();
    assert_eq!(nodes.iter().map(|n| n["node"].as_str().unwrap()).collect::<Vec<_>>(), ["mac", "spark"]);
    let worker = &nodes[0]["workers"][0];
    assert_eq!((&worker["standing"], &worker["connected"]), (&"alive".into(), &true.into()), "{shown:#}");
    assert_eq!(
        worker["paired_with"][0],
        format!("spark/{}", nodes[1]["workers"][0]["name"].as_str().unwrap())
    );
    let metrics = lab.gateway.metrics().await;
    assert_eq!(metric(&metrics, "pd_bridge_nodes", "state=\"alive\""), 2.0);
    assert_eq!(metric(&metrics, "pd_bridge_node_up", "node=\"spark\""), 1.0);
    assert_eq!(metric(&metrics, "pd_bridge_bus_connected", ""), 1.0);

    // Draining the prefill worker's machine: at once no more bridges; and back.
    lab.spark.set_state(NodeState::Draining);
    until_state(&lab.gateway, "spark", "draining", 2 * SECOND).await;
    let reply = ask(&lab.gateway, &prompt(200), &[http::BRIDGE]).await;
    assert_eq!(
        (reply.verdict().verdict, reply.verdict().reason.as_deref()),
        (VerdictKind::Native, Some("no_prefill_worker"))
    );
    lab.spark.set_state(NodeState::Alive);
    until_bridged(&lab.gateway).await;

    // A wrong clock is shown and changes nothing.
    for ahead in [600_000i64, -600_000] {
        lab.mac.skew_clock(ahead);
        wait::until("the skew is seen", 2 * SECOND, || async {
            let shown = lab.gateway.nodes().await["nodes"][0]["clock_ahead_ms"].as_i64().unwrap();
            ((shown - ahead).abs() < 2000).then_some(())
        })
        .await;
        assert_eq!(lab.gateway.node_state("mac").await.as_deref(), Some("alive"));
        until_bridged(&lab.gateway).await;
    }
    lab.mac.skew_clock(0);

    // The decode worker dies and comes back elsewhere, with another model's fingerprint even (another cache type):
    // the request that was asked meanwhile is answered.
    lab.decode.kill();
    let asked = tokio::spawn({
        let addr = lab.gateway.addr.clone();
        let text = text.clone();
        async move { http::post(&addr, "/v1/completions", &[http::BRIDGE], &completion(&text, 8)).await }
    });
    let moved = Worker::decode(tiny::model(), &["--block-tokens", "16", "--cache-dtype", "f16"]);
    lab.mac.set_workers(vec![describe(&moved.addresses.control).await]);
    let reply = asked.await.unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(reply.text(), lab.native_truth(&text).await);
    lab.decode = moved;
    until_bridged(&lab.gateway).await;

    // The agent beside the prefill worker is killed, the worker is not: suspect, no more bridges; gone, and requests
    // are answered all the same.
    let node = lab.spark.node.to_string();
    let workers = lab.spark.current().workers;
    drop(lab.spark);
    let suspect = until_state(&lab.gateway, &node, "suspect", 12 * SECOND).await;
    assert!(suspect <= 11 * SECOND, "suspect after {suspect:?}");
    assert_eq!(ask(&lab.gateway, &prompt(200), &[http::BRIDGE]).await.verdict().verdict, VerdictKind::Native);
    let gone = suspect + until_state(&lab.gateway, &node, "gone", 6 * SECOND).await;
    assert!(gone <= 16 * SECOND, "gone after {gone:?}");
    assert_eq!(ask(&lab.gateway, &prompt(200), &[http::BRIDGE]).await.status, 200);
    assert_eq!(metric(&lab.gateway.metrics().await, "pd_bridge_node_up", "node=\"spark\""), 0.0);
    // A new agent: back at once.
    let begun = Instant::now();
    lab.spark = SimulatedAgent::start(&lab.nats.settings(), &node, workers).await;
    until_bridged(&lab.gateway).await;
    assert!(begun.elapsed() < 5 * SECOND, "{:?}", begun.elapsed());
    assert!(lab.prefill.process.memory_bytes("VmRSS").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_heartbeats_are_counted_and_hurt_nobody() {
    let lab = Lab::start().await;
    let bus = lab.nats.connect().await;
    let before = lab.gateway.process.memory_bytes("VmRSS").unwrap();
    let good = SimulatedAgent::start(&lab.nats.settings(), "third", vec![]).await;
    let mut evil = good.current();
    evil.sequence = 1_000_000;
    evil.workers = vec![lab.mac.current().workers[0].clone(); 1500];
    let many = evil.encode();
    evil.workers.truncate(1);
    evil.workers[0].control_addr = "not an address".into();
    evil.host = "x".repeat(200_000);
    let long = evil.encode();
    let messages: Vec<(String, Vec<u8>)> = vec![
        ("pd.v1.heartbeat.mac".into(), many.to_vec()),
        ("pd.v1.heartbeat.mac".into(), long.to_vec()),
        ("pd.v1.heartbeat.mac".into(), b"{".to_vec()),
        ("pd.v1.heartbeat.mac".into(), vec![b'['; 900_000]),
        ("pd.v1.heartbeat.mac".into(), vec![0xff; 1000]),
        ("pd.v1.heartbeat.UPPER".into(), long.to_vec()),
        ("pd.v1.heartbeat.x y".replace(' ', "*"), long.to_vec()),
    ];
    for _ in 0..20 {
        for (subject, message) in &messages {
            if !subject.contains('*') {
                bus.client.publish(subject.clone(), message.clone().into()).await.unwrap();
            }
        }
    }
    bus.client.flush().await.unwrap();
    wait::until("all are counted", 10 * SECOND, || async {
        let metrics = lab.gateway.metrics().await;
        (metric(&metrics, "pd_bridge_heartbeats_total", "result=\"malformed\"") >= 120.0).then_some(())
    })
    .await;
    assert_eq!(lab.gateway.node_state("mac").await.as_deref(), Some("alive"));
    assert_eq!(lab.gateway.nodes().await["nodes"].as_array().unwrap().len(), 3);
    until_bridged(&lab.gateway).await;
    let grown = lab.gateway.process.memory_bytes("VmRSS").unwrap().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_gateways_send_a_prefix_to_the_same_decoder() {
    let nats = Nats::start();
    let script = vec![Step::Started, Step::Tokens(vec![65]), Step::Finished(FinishReason::Length)];
    let (mut agents, mut decoders) = (vec![], vec![]);
    for i in 0..2 {
        let decoder = FakeDecode::named(["d0", "d1"][i], "127.0.0.1:0", tiny::model(), script.clone()).await;
        let workers = vec![describe(&decoder.server.addr).await];
        agents.push(SimulatedAgent::start(&nats.settings(), &format!("mac-{i}"), workers).await);
        decoders.push(decoder);
    }
    let gateways = ["gw-a", "gw-b"]
        .map(|id| Gateway::on_bus(tiny::model(), &nats.url(), &["--node", id, "--min-bridge-tokens", "64"]));
    for gateway in &gateways {
        gateway.ready(false).await;
        wait::until("both decoders", 10 * SECOND, || async {
            let metrics = gateway.metrics().await;
            (metric(&metrics, "pd_bridge_workers_connected", "role=\"decode\"") == 2.0).then_some(())
        })
        .await;
    }
    let mut homes = std::collections::BTreeMap::<String, u32>::new();
    for _ in 0..24 {
        // Prompts that share their first 256 tokens and differ after.
        let start = prompt(300);
        let mut decoder = None;
        for gateway in [&gateways[0], &gateways[1], &gateways[0]] {
            let reply = ask(gateway, &format!("{start}{}", prompt(20)), &[]).await;
            assert_eq!(reply.status, 200);
            let this = reply.verdict().decode.unwrap();
            assert_eq!(decoder.get_or_insert_with(|| this.clone()), &this, "a prefix has one home");
        }
        *homes.entry(decoder.unwrap()).or_default() += 1;
    }
    eprintln!("homes of 24 prefixes: {homes:?}");
    assert!(homes.len() == 2, "all prefixes on one decoder: {homes:?}");
}

/// CPU seconds that a process has used.
fn cpu_s(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    ticks / 100.0
}

async fn alive(gateway: &Gateway) -> f64 {
    metric(&gateway.metrics().await, "pd_bridge_nodes", "state=\"alive\"")
}

/// The bar is for 1,000 (`make bench-fleet`).
#[tokio::test(flavor = "multi_thread")]
async fn many_agents_on_one_bus_and_one_gateway() {
    let agents = usize::try_from(setting("PD_TEST_AGENTS", 200)).unwrap();
    let measured = Duration::from_secs(setting("PD_TEST_AGENTS_MEASURE_S", 10));
    let nats = Nats::start();
    // Every agent has a worker, at a loopback address of its own.
    let decode = FakeDecode::listening_on("0.0.0.0:0", tiny::model(), vec![]).await;
    let prefill = FakePrefill::listening_on("0.0.0.0:0", tiny::model(), Play::Hang).await;
    let port = |addr: &str| addr.rsplit_once(':').unwrap().1.to_owned();
    let models = [
        describe(&format!("127.0.0.1:{}", port(&decode.server.addr))).await,
        describe(&format!("127.0.0.1:{}", port(&prefill.server.addr))).await,
    ];
    let worker = |i: usize| {
        let model = &models[usize::from(i % 10 == 9)];
        let control_addr = format!("127.1.{}.{}:{}", i / 250, i % 250 + 1, port(&model.control_addr));
        WorkerBeat { control_addr, name: format!("w{i}"), ..model.clone() }
    };
    let gateway = Gateway::on_bus(tiny::model(), &nats.url(), &[]);
    wait::until("the gateway's port", 60 * SECOND, || async {
        http::send(&gateway.addr, "GET", "/healthz", &[], None).await.ok()
    })
    .await;
    let begun = Instant::now();
    let settings = nats.settings();
    let mut all = Vec::with_capacity(agents);
    for first in (0..agents).step_by(50) {
        let some = (first..agents.min(first + 50)).map(|i| {
            let (settings, worker) = (&settings, worker(i));
            async move { SimulatedAgent::start(settings, &format!("node-{i}"), vec![worker]).await }
        });
        all.extend(futures_util::future::join_all(some).await);
    }
    let started = Instant::now();
    wait::until("all are seen", 6 * SECOND, || async {
        (alive(&gateway).await == agents as f64).then_some(())
    })
    .await;
    let seen = started.elapsed();
    eprintln!("{agents} agents started in {:?}, all seen {seen:?} after the last", started - begun);
    let connected = |metrics: &str| {
        metric(metrics, "pd_bridge_workers_connected", "role=\"decode\"")
            + metric(metrics, "pd_bridge_workers_connected", "role=\"prefill\"")
    };
    wait::until("all workers are connected", 60 * SECOND, || async {
        (connected(&gateway.metrics().await) == agents as f64).then_some(())
    })
    .await;
    let pairs = metric(&gateway.metrics().await, "pd_bridge_worker_pairs", "");
    eprintln!("all connected {:?} after the last, {pairs} pairs", started.elapsed());
    tokio::time::sleep(5 * SECOND).await;

    let (before, from) = (cpu_s(gateway.process.pid()), Instant::now());
    tokio::time::sleep(measured).await;
    let share = (cpu_s(gateway.process.pid()) - before) / from.elapsed().as_secs_f64();
    let memory = gateway.process.memory_bytes("VmRSS").unwrap() >> 20;
    eprintln!("gateway: {:.1}% of a core over {measured:?}, {memory} MiB resident", 100.0 * share);
    assert!(share <= 0.05 || cfg!(debug_assertions), "{:.1}% of a core", 100.0 * share);

    let victim = all.swap_remove(agents / 2);
    let name = victim.node.to_string();
    let killed = Instant::now();
    drop(victim);
    until_state(&gateway, &name, "suspect", 11 * SECOND).await;
    let suspect = killed.elapsed();
    until_state(&gateway, &name, "gone", 16 * SECOND).await;
    let gone = killed.elapsed();
    eprintln!("one killed: suspect after {suspect:?}, gone after {gone:?}");
    assert!(suspect <= 11 * SECOND && gone <= 16 * SECOND);
    assert_eq!(alive(&gateway).await, (agents - 1) as f64);
}
