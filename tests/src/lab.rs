//! A home lab's bus as its owner sets it up: keys from `pd-bridge bus keys`, and nats-server started on what it wrote.

use crate::nats;
use crate::paths;
use crate::stack::free_port;
use async_nats::{Client, ConnectOptions, Event, ServerError};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shared::bus::{
    Bus, BusArgs, BusSettings, Cpu, Gpu, Heartbeat, Memory, NodeId, NodeState, WorkerBeat, subjects,
};
use shared::control::{Rates, Role};
use shared::hexbytes::Hex;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Keys in a folder and a server that knows them.
pub struct Lab {
    server: Child,
    /// Port of the server, on loopback.
    pub port: u16,
    dir: tempfile::TempDir,
}

/// Somebody on the bus, and what the server complains of.
pub struct User {
    /// The connection.
    pub client: Client,
    events: mpsc::UnboundedReceiver<Event>,
}

/// A subject that nobody may use: its refusal marks the end of those before it.
const FENCE: &str = "fence";

impl Lab {
    /// Makes keys with these arguments besides the server's name, and starts the server.
    #[must_use]
    pub fn new(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        make_keys(dir.path(), &[&["--server", "nas.local"], args].concat());
        let port = free_port();
        // As its owner would: flags in place of these lines would make a reload fail.
        let conf = dir.path().join("nats/nats-server.conf");
        let text =
            std::fs::read_to_string(&conf).unwrap().replace("0.0.0.0:4222", &format!("127.0.0.1:{port}"));
        std::fs::write(&conf, text.replace("127.0.0.1:8222", &format!("127.0.0.1:{}", free_port()))).unwrap();
        let log = std::fs::File::create(dir.path().join("nats.log")).unwrap();
        let mut command = Command::new(nats::program());
        command.args(["-c", "nats-server.conf"]);
        command.current_dir(dir.path().join("nats")).stdin(Stdio::null());
        let server = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let lab = Self { server, port, dir };
        let start = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(start.elapsed() < Duration::from_secs(20), "nats-server does not listen:\n{}", lab.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        lab
    }

    /// Runs `pd-bridge bus keys` on the same folder again, and lets the server read the result.
    pub fn again(&self, args: &[&str]) {
        make_keys(self.dir.path(), args);
        kill(Pid::from_raw(i32::try_from(self.server.id()).unwrap()), Signal::SIGHUP).unwrap();
    }

    /// A file of the folder, e.g. `node-spark/agent.nk`.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What the server said.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.file("nats.log")).unwrap_or_default()
    }

    /// Settings of a program that holds this key.
    #[must_use]
    pub fn settings(&self, key: &str) -> BusSettings {
        self.args(key).resolve("test").unwrap().unwrap()
    }

    /// The same, before they are checked.
    #[must_use]
    pub fn args(&self, key: &str) -> BusArgs {
        BusArgs {
            servers: Some(vec![self.url()]),
            nkey_file: Some(self.file(key)),
            ca_file: Some(self.file("ca.pem")),
            ..BusArgs::default()
        }
    }

    /// Connects as our own programs do.
    pub async fn bus(&self, role: &str, key: &str) -> Bus {
        Bus::connect(&self.settings(key), role, "test")
            .await
            .unwrap_or_else(|e| panic!("{e}\n{}", self.log()))
    }

    /// Connects with a key and listens to complaints.
    pub async fn user(&self, role: &str, key: &str) -> User {
        let seed = std::fs::read_to_string(self.file(key)).unwrap().trim().to_owned();
        let (tx, events) = mpsc::unbounded_channel();
        let options = self.options().nkey(seed).custom_inbox_prefix(subjects::inbox_prefix(role));
        let options = options.event_callback(move |event| {
            let _ = tx.send(event);
            std::future::ready(())
        });
        User { client: options.connect(self.url()).await.unwrap(), events }
    }

    /// Options that trust the lab's authority, and show no key.
    #[must_use]
    pub fn options(&self) -> ConnectOptions {
        ConnectOptions::new().add_root_certificates(self.file("ca.pem")).require_tls(true)
    }

    /// Where the server is.
    #[must_use]
    pub fn url(&self) -> String {
        format!("tls://localhost:{}", self.port)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl User {
    /// Which of the subjects this user may publish to.
    pub async fn may_publish(&mut self, all: &[String]) -> Vec<String> {
        for subject in all.iter().map(String::as_str).chain([FENCE]) {
            self.client.publish(subject.to_owned(), "x".into()).await.unwrap();
        }
        let refused = self.refusals("Publish").await;
        all.iter().filter(|s| !refused.contains(s)).cloned().collect()
    }

    /// Which of the subjects this user may subscribe to.
    pub async fn may_subscribe(&mut self, all: &[String]) -> Vec<String> {
        let mut held = vec![];
        for subject in all.iter().map(String::as_str).chain([FENCE]) {
            held.push(self.client.subscribe(subject.to_owned()).await.unwrap());
        }
        let refused = self.refusals("Subscription").await;
        all.iter().filter(|s| !refused.contains(s)).cloned().collect()
    }

    /// Subjects that the server refused, up to the fence. It answers in order.
    async fn refusals(&mut self, what: &str) -> Vec<String> {
        let start = format!("Permissions Violation for {what} to \"");
        let mut refused = vec![];
        loop {
            let event = tokio::time::timeout(Duration::from_secs(10), self.events.recv()).await;
            let event = event.unwrap_or_else(|_| panic!("no refusal of the fence after {refused:?}"));
            let Some(Event::ServerError(ServerError::Other(text))) = event else { continue };
            match text.strip_prefix(&start).and_then(|t| t.strip_suffix('"')) {
                Some(FENCE) => return refused,
                Some(subject) => refused.push(subject.to_owned()),
                None => panic!("unexpected complaint: {text}"),
            }
        }
    }
}

/// Runs `pd-bridge bus keys` to the end.
pub fn make_keys(dir: &Path, args: &[&str]) {
    let mut command = Command::new(paths::bin("pd-bridge"));
    let ran = command.args(["bus", "keys", "--dir"]).arg(dir).args(args).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

/// A heartbeat of a machine with a GPU and two workers (`spark`), or of one that is only there (any other name).
#[must_use]
pub fn beat(node: &str, sequence: u64, state: NodeState) -> Heartbeat {
    let rich = node == "spark";
    let worker = |role: Role| WorkerBeat {
        role,
        name: format!("{node}-{role:?}").to_lowercase(),
        control_addr: "127.0.0.1:9".to_owned(),
        reachable: false,
        version: "0".to_owned(),
        engine: "script".to_owned(),
        model: "m".to_owned(),
        tokenizer_digest: None,
        fingerprint: None,
        layout_digest: None,
        bulk_addr: None,
        max_tokens: 1,
        capacity_tokens: 0,
        queue: 3,
        queue_tokens: 700,
        rates: Rates { prefill_tokens_per_s: 1000.0, decode_tokens_per_s: 50.0 },
        link_bytes_per_s: 1e9,
        prefix_bytes: 1 << 20,
        resident_memory_bytes: 1 << 30,
    };
    Heartbeat {
        node: NodeId::new(node).unwrap(),
        boot_id: Hex([7; 16]),
        sequence,
        sent_at_ms: 0,
        uptime_s: 1,
        state,
        version: "0".to_owned(),
        host: node.to_owned(),
        os: "script".to_owned(),
        arch: "script".to_owned(),
        cpu: Cpu { model: "script".to_owned(), cores: 8, load_1m: 0.5, busy: 0.25 },
        memory: Memory { total_bytes: 128 << 30, used_bytes: 32 << 30 },
        gpus: if rich { vec![gpu()] } else { vec![] },
        workers: if rich { vec![worker(Role::Prefill), worker(Role::Decode)] } else { vec![] },
        commands_allowed: false,
    }
}

fn gpu() -> Gpu {
    Gpu {
        name: "NVIDIA GB10".to_owned(),
        memory_total_bytes: 128 << 30,
        memory_used_bytes: 64 << 30,
        busy: Some(0.75),
        ..Gpu::default()
    }
}
