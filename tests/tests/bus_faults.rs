//! The bus, agents, workers and cables fail while requests run through two gateways: nothing that could be served is
//! lost, nothing is answered wrongly, and all mends itself. `make bench-bus-faults` plays every fault many times.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking; counts are shown"
)]

use pd_tests::http::{self, completion, metric};
use pd_tests::nats::{Nats, write_private};
use pd_tests::netns::Network;
use pd_tests::scene::prompt;
use pd_tests::sim_agents::{SimulatedAgent, describe_with};
use pd_tests::stack::{Gateway, Worker};
use pd_tests::{tiny, wait};
use shared::control::ClusterKey;
use shared::verdict::VerdictKind;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

const SECOND: Duration = Duration::from_secs(1);
const ANSWER_TOKENS: u32 = 6;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Two decoders, a prefill worker, three agents, two gateways; and a judge that never bridges.
struct Lab {
    network: Option<Network>,
    nats: Nats,
    key: ClusterKey,
    decoders: [Worker; 2],
    prefill: Worker,
    agents: Vec<SimulatedAgent>,
    gateways: [Gateway; 2],
    judge: Gateway,
    _judge_decode: Worker,
}

/// Places of the network.
const PLACES: [&str; 5] = ["g0", "g1", "d0", "d1", "p"];

impl Lab {
    async fn start(network: Option<Network>) -> Self {
        let nats = network.as_ref().map_or_else(Nats::start, |n| Nats::listening_on(&n.bus(), ""));
        let key_file = nats.dir().join("cluster.key");
        write_private(&key_file, &"k".repeat(64));
        let key = ClusterKey::from_file(&key_file).unwrap();
        let key_arg = ["--cluster-key-file", key_file.to_str().unwrap()];
        let model = tiny::model();
        let place = |p: &str| {
            network.as_ref().map_or((None, "127.0.0.1".to_owned()), |n| (Some(n.netns(p)), n.ip(p)))
        };
        let decoder = |i: usize| {
            let (netns, host) = place(["d0", "d1"][i]);
            let listen = format!("{host}:0");
            let extra = [
                "--block-tokens",
                "16",
                "--node",
                ["d0", "d1"][i],
                "--listen",
                &listen,
                "--bulk-listen",
                &listen,
            ];
            let extra = [&extra[..], &key_arg].concat();
            match netns {
                Some(netns) => Worker::decode_in(&netns, model, &extra),
                None => Worker::decode(model, &extra),
            }
        };
        let decoders = [decoder(0), decoder(1)];
        let (netns, host) = place("p");
        let listen = format!("{host}:0");
        let extra = [&["--listen", listen.as_str()][..], &key_arg].concat();
        let prefill = match netns {
            Some(netns) => Worker::prefill_in(&netns, model, &extra),
            None => Worker::prefill(model, &extra),
        };
        let gateways = [0, 1].map(|i| {
            let (netns, host) = place(["g0", "g1"][i]);
            let extra = [&["--node", ["g0", "g1"][i]][..], &key_arg].concat();
            Gateway::on_bus_in(netns.as_deref(), &host, model, &nats.url(), &extra)
        });
        let judge_decode = Worker::decode(model, &["--block-tokens", "16"]);
        let judge = Gateway::start(model, &judge_decode.addresses.control, None, &[]).await;
        let agents = Vec::new();
        let mut lab = Self {
            network,
            nats,
            key,
            decoders,
            prefill,
            agents,
            gateways,
            judge,
            _judge_decode: judge_decode,
        };
        for i in 0..3 {
            let agent = lab.agent(i).await;
            lab.agents.push(agent);
        }
        lab.recovered("the start").await;
        lab
    }

    fn worker(&self, i: usize) -> &Worker {
        if i < 2 { &self.decoders[i] } else { &self.prefill }
    }

    /// A new agent beside worker `i`.
    async fn agent(&self, i: usize) -> SimulatedAgent {
        let worker = describe_with(&self.worker(i).addresses.control, &self.key).await;
        SimulatedAgent::start(&self.nats.settings(), ["mac-0", "mac-1", "spark"][i], vec![worker]).await
    }

    /// All is as it should be, by itself.
    async fn recovered(&self, after: &str) {
        for gateway in &self.gateways {
            wait::until(&format!("recovered from {after}"), 90 * SECOND, || async {
                let reply = http::send(&gateway.addr, "GET", "/metrics", &[], None)
                    .await
                    .ok()?
                    .finish()
                    .await
                    .ok()?;
                let metrics = String::from_utf8(reply.body.to_vec()).ok()?;
                let is = |name, labels, value| metric(&metrics, name, labels) == value;
                (is("pd_bridge_bus_connected", "", 1.0)
                    && is("pd_bridge_nodes", "state=\"alive\"", 3.0)
                    && is("pd_bridge_workers_connected", "", 3.0)
                    && is("pd_bridge_worker_pairs", "", 2.0))
                .then_some(())
            })
            .await;
            wait::until(&format!("bridging after {after}"), 60 * SECOND, || async {
                let body = completion(&prompt(60), 1);
                let reply = http::post(&gateway.addr, "/v1/completions", &[http::BRIDGE], &body).await;
                (reply.status == 200 && reply.verdict().verdict == VerdictKind::Complete).then_some(())
            })
            .await;
        }
    }
}

/// Requests through both gateways, all the time.
struct Traffic {
    stop: Arc<AtomicBool>,
    fault: Arc<Mutex<String>>,
    counts: Arc<Mutex<BTreeMap<String, u64>>>,
    lost: Arc<Mutex<Vec<String>>>,
    clients: Vec<JoinHandle<()>>,
}

impl Traffic {
    fn start(lab: &Lab) -> Self {
        let mut traffic = Self {
            stop: Arc::default(),
            fault: Arc::default(),
            counts: Arc::default(),
            lost: Arc::default(),
            clients: vec![],
        };
        for gateway in &lab.gateways {
            for _ in 0..2 {
                let client = traffic.client(gateway.addr.clone(), lab.judge.addr.clone());
                traffic.clients.push(tokio::spawn(client));
            }
        }
        traffic
    }

    fn client(&self, gateway: String, judge: String) -> impl Future<Output = ()> + Send + use<> {
        let (stop, fault, counts, lost) =
            (self.stop.clone(), self.fault.clone(), self.counts.clone(), self.lost.clone());
        async move {
            while !stop.load(Ordering::Relaxed) {
                let text = prompt(120);
                let body = completion(&text, ANSWER_TOKENS);
                let truth = http::post(&judge, "/v1/completions", &[http::NATIVE], &body).await.text();
                let begun = Instant::now();
                let during = fault.lock().unwrap().clone();
                let reply = http::post(&gateway, "/v1/completions", &[http::BRIDGE], &body).await;
                let verdict = reply.verdict();
                if reply.status != 200 {
                    let body = String::from_utf8_lossy(&reply.body).into_owned();
                    let line = format!("{during}: {} after {:?}: {body}", reply.status, begun.elapsed());
                    lost.lock().unwrap().push(line);
                    continue;
                }
                assert_eq!(reply.text(), truth, "{during}: wrong answer, {verdict:?}");
                assert!(verdict.is_consistent(), "{during}: {verdict:?}");
                if verdict.verdict == VerdictKind::Complete {
                    assert_eq!((verdict.cached_tokens, verdict.native_tokens), (119, 1), "{during}");
                    assert!(verdict.bridged_tokens > 0, "{during}: {verdict:?}");
                }
                *counts
                    .lock()
                    .unwrap()
                    .entry(format!("{during}: {}", verdict.verdict.as_str()))
                    .or_default() += 1;
                tokio::time::sleep(Duration::from_millis(150)).await;
            }
        }
    }

    fn during(&self, fault: &str) {
        *self.fault.lock().unwrap() = fault.to_owned();
    }

    /// Ends the traffic; answers the requests that were lost.
    async fn end(self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.await.unwrap();
        }
        for (what, count) in self.counts.lock().unwrap().iter() {
            eprintln!("{count:5} × {what}");
        }
        let lost = self.lost.lock().unwrap().clone();
        lost.iter().for_each(|line| eprintln!("LOST {line}"));
        lost
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_the_bus_agents_or_workers_fail() {
    let rounds = setting("PD_TEST_BUS_FAULT_ROUNDS", 1);
    let down = Duration::from_secs(setting("PD_TEST_NATS_DOWN_S", 12));
    let mut lab = Lab::start(None).await;
    let traffic = Traffic::start(&lab);
    for round in 0..rounds {
        let i = usize::try_from(round % 2).unwrap();

        traffic.during("bus down");
        lab.nats.kill();
        tokio::time::sleep(down).await;
        for gateway in &lab.gateways {
            let shown = gateway.nodes().await;
            assert_eq!(shown["bus"]["connected"], false);
            for node in shown["nodes"].as_array().unwrap() {
                assert_eq!(node["state"], "alive", "nobody ages without the bus: {node:#}");
            }
        }
        lab.nats.restart();
        lab.recovered("bus down").await;

        traffic.during("agent killed");
        let victim = lab.agents.swap_remove(i);
        let (name, killed) = (victim.node.to_string(), Instant::now());
        drop(victim);
        for (state, limit) in [("suspect", 11), ("gone", 16)] {
            wait::until(&format!("{name} is {state}"), 20 * SECOND, || async {
                (lab.gateways[0].node_state(&name).await.as_deref() == Some(state)).then_some(())
            })
            .await;
            assert!(killed.elapsed() <= limit * SECOND, "{state} after {:?}", killed.elapsed());
        }
        let agent = lab.agent(["mac-0", "mac-1", "spark"].iter().position(|n| *n == name).unwrap()).await;
        lab.agents.push(agent);
        let last = lab.agents.len() - 1;
        lab.agents.swap(i, last);
        lab.recovered("agent killed").await;

        for (what, victim) in [("decode worker killed", i), ("prefill worker killed", 2)] {
            traffic.during(what);
            // A supervisor starts it again, and the agent tells where.
            let worker = if victim < 2 { &mut lab.decoders[victim] } else { &mut lab.prefill };
            worker.kill();
            tokio::time::sleep(SECOND).await;
            tokio::task::block_in_place(|| worker.restart());
            let addr = lab.worker(victim).addresses.control.clone();
            let agent =
                lab.agents.iter().find(|a| a.node.as_str() == ["mac-0", "mac-1", "spark"][victim]).unwrap();
            agent.set_workers(vec![describe_with(&addr, &lab.key).await]);
            lab.recovered(what).await;
        }

        traffic.during("clocks 10 minutes off");
        for (agent, ahead) in lab.agents.iter().zip([600_000, -600_000, 600_000]) {
            agent.skew_clock(ahead);
        }
        tokio::time::sleep(3 * SECOND).await;
        lab.recovered("wrong clocks").await;
        lab.agents.iter().for_each(|agent| agent.skew_clock(0));

        traffic.during("nothing");
        eprintln!("round {round} done");
    }
    let lost = traffic.end().await;
    assert!(lost.is_empty(), "{lost:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_a_cable_is_cut() {
    let network = match Network::new(&PLACES) {
        Ok(network) => network,
        Err(why) => {
            eprintln!("not run, this machine has no network namespaces for it: {why}");
            return;
        }
    };
    let rounds = setting("PD_TEST_BUS_FAULT_ROUNDS", 1);
    let lab = Lab::start(Some(network)).await;
    let network = lab.network.as_ref().unwrap();
    let traffic = Traffic::start(&lab);
    for round in 0..rounds {
        for (a, b) in [("g0", "d0"), ("g0", "bus"), ("g1", "p"), ("d1", "p")] {
            let what = format!("{a} cut from {b}");
            traffic.during(&what);
            if b == "bus" {
                network.cut_bus(a)
            } else {
                network.cut(a, b)
            }
            // Longer than it takes anyone to notice.
            tokio::time::sleep(18 * SECOND).await;
            if b == "bus" {
                network.mend_bus(a)
            } else {
                network.mend(a, b)
            }
            lab.recovered(&what).await;
        }
        traffic.during("nothing");
        eprintln!("round {round} done");
    }
    let lost = traffic.end().await;
    assert!(lost.is_empty(), "{lost:#?}");
}
