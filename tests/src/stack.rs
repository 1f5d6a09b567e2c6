//! Workers and a gateway on free ports of this machine, each a real process.

use crate::decoder::Decoder;
use crate::http;
use crate::process::{Addresses, Process};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A worker process that can be killed and started again at the same addresses.
#[derive(Debug)]
pub struct Worker {
    program: &'static str,
    args: Vec<String>,
    netns: Option<String>,
    /// The process; a dead one after [`Worker::kill`].
    pub process: Process,
    /// Where it listens.
    pub addresses: Addresses,
}

/// A gateway process.
#[derive(Debug)]
pub struct Gateway {
    /// The process.
    pub process: Process,
    /// `host:port` of the front door.
    pub addr: String,
}

/// All three.
#[derive(Debug)]
pub struct Stack {
    /// The front door. Ends first.
    pub gateway: Gateway,
    /// Its prefill worker.
    pub prefill: Worker,
    /// Its decode worker.
    pub decode: Worker,
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|s| (*s).to_owned()).collect()
}

fn model_arg(model: &Path) -> [String; 2] {
    ["--model".to_owned(), model.to_string_lossy().into_owned()]
}

impl Worker {
    /// Starts a decode worker and waits until it listens.
    #[must_use]
    pub fn decode(model: &Path, extra: &[&str]) -> Self {
        Self::start("pd-decode", model, extra)
    }

    /// Starts a prefill worker on the CPU and waits until it listens.
    #[must_use]
    pub fn prefill(model: &Path, extra: &[&str]) -> Self {
        Self::start("pd-prefill", model, &[&["--backend", "cpu"], extra].concat())
    }

    /// Starts a decode worker inside a network namespace.
    #[must_use]
    pub fn decode_in(netns: &str, model: &Path, extra: &[&str]) -> Self {
        Self::start_in(Some(netns), "pd-decode", model, extra)
    }

    /// Starts a prefill worker on the CPU inside a network namespace.
    #[must_use]
    pub fn prefill_in(netns: &str, model: &Path, extra: &[&str]) -> Self {
        Self::start_in(Some(netns), "pd-prefill", model, &[&["--backend", "cpu"], extra].concat())
    }

    fn start(program: &'static str, model: &Path, extra: &[&str]) -> Self {
        Self::start_in(None, program, model, extra)
    }

    fn start_in(netns: Option<&str>, program: &'static str, model: &Path, extra: &[&str]) -> Self {
        let args = [&model_arg(model)[..], &strings(&["--exit-with-stdin"]), &strings(extra)].concat();
        let process = Process::start_in(netns, program, &args);
        let addresses = process.addresses();
        Self { program, args, netns: netns.map(str::to_owned), process, addresses }
    }

    /// Kills it, as a power cut would.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Kills it if need be and starts it again where it was.
    pub fn restart(&mut self) {
        self.kill();
        // Where it was, instead of where it was told to look for a port.
        let is_place = |i: usize| ["--listen", "--bulk-listen"].contains(&self.args[i].as_str());
        let kept = (0..self.args.len()).filter(|i| !(is_place(*i) || *i > 0 && is_place(i - 1)));
        let mut args: Vec<String> = kept.map(|i| self.args[i].clone()).collect();
        args.extend(strings(&["--listen", &self.addresses.control]));
        if let Some(bulk) = &self.addresses.bulk {
            args.extend(strings(&["--bulk-listen", bulk]));
        }
        self.process = Process::start_in(self.netns.as_deref(), self.program, &args);
        let _ = self.process.addresses();
    }

    /// Connects to the control port of a decode worker.
    pub async fn decoder(&self) -> Decoder {
        Decoder::connect(&self.addresses.control).await
    }
}

impl Gateway {
    /// Starts a gateway over workers that listen already; `prefill` may be absent. Waits until requests would succeed.
    pub async fn start(model: &Path, decode: &str, prefill: Option<&str>, extra: &[&str]) -> Self {
        let gateway = Self::start_unready(model, decode, prefill, extra);
        gateway.ready(prefill.is_some()).await;
        gateway
    }

    /// Starts a gateway and waits for nothing but its port.
    #[must_use]
    pub fn start_unready(model: &Path, decode: &str, prefill: Option<&str>, extra: &[&str]) -> Self {
        let port = free_port();
        let addr = format!("127.0.0.1:{port}");
        let mut args = strings(&["gateway", "--listen", &addr, "--decode", decode]);
        if let Some(prefill) = prefill {
            args.extend(strings(&["--prefill", prefill]));
        }
        args.extend(model_arg(model));
        args.extend(strings(extra));
        Self { process: Process::start("pd-bridge", &args), addr }
    }

    /// Starts a gateway that finds its workers on the bus, and waits for nothing but its port.
    #[must_use]
    pub fn on_bus(model: &Path, nats: &str, extra: &[&str]) -> Self {
        Self::on_bus_in(None, "127.0.0.1", model, nats, extra)
    }

    /// The same at some address inside a network namespace.
    #[must_use]
    pub fn on_bus_in(netns: Option<&str>, host: &str, model: &Path, nats: &str, extra: &[&str]) -> Self {
        let addr = format!("{host}:{}", free_port());
        let mut args = strings(&["gateway", "--listen", &addr, "--nats", nats]);
        args.extend(model_arg(model));
        args.extend(strings(extra));
        Self { process: Process::start_in(netns, "pd-bridge", &args), addr }
    }

    /// `/v1/bridge/nodes`.
    pub async fn nodes(&self) -> serde_json::Value {
        http::get(&self.addr, "/v1/bridge/nodes").await.json()
    }

    /// The state of one machine; `None` if it is unknown or the gateway does not answer.
    pub async fn node_state(&self, node: &str) -> Option<String> {
        let reply =
            http::send(&self.addr, "GET", "/v1/bridge/nodes", &[], None).await.ok()?.finish().await.ok()?;
        let nodes = reply.json()["nodes"].as_array()?.clone();
        let found = nodes.into_iter().find(|n| n["node"] == node)?;
        Some(found["state"].as_str()?.to_owned())
    }

    /// Waits until the gateway says that it is ready and, where there is a prefill worker, that it is paired.
    pub async fn ready(&self, with_prefill: bool) {
        let start = Instant::now();
        loop {
            if let Ok(response) = http::send(&self.addr, "GET", "/readyz", &[], None).await
                && response.status == 200
                && (!with_prefill || self.is_paired().await)
            {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(120), "not ready:\n{}", self.process.log_tail());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the front door answers at all, workers or not.
    pub async fn listening(&self) {
        let start = Instant::now();
        while http::send(&self.addr, "GET", "/healthz", &[], None).await.is_err() {
            assert!(start.elapsed() < Duration::from_secs(60), "no door:\n{}", self.process.log_tail());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether a bridge would be tried now.
    pub async fn is_paired(&self) -> bool {
        http::metric(&self.metrics().await, "pd_bridge_worker_pairs", "") > 0.0
    }

    /// `/metrics` as text.
    pub async fn metrics(&self) -> String {
        String::from_utf8(http::get(&self.addr, "/metrics").await.body.to_vec()).unwrap()
    }
}

impl Stack {
    /// Starts everything with one model for both workers.
    pub async fn start(model: &Path, decode: &[&str], prefill: &[&str], gateway: &[&str]) -> Self {
        let model: PathBuf = model.to_owned();
        let decode = Worker::decode(&model, decode);
        let prefill = Worker::prefill(&model, prefill);
        let (d, p) = (decode.addresses.control.clone(), prefill.addresses.control.clone());
        let gateway = Gateway::start(&model, &d, Some(&p), gateway).await;
        Self { gateway, prefill, decode }
    }
}

/// A port that was free a moment ago.
#[must_use]
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
