//! Foreign clients: scripts in other languages (`tests/clients`) that judge the front door, and what they judge.

mod plays;

use crate::fakes::FakeDecode;
use crate::http::metric;
use crate::stack::{Gateway, Stack, free_port};
use crate::{paths, tiny, wait};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::Mutex;

/// The key that opens the guarded door; it may ask one thing at a time.
const KEY: &str = "sk-clients-of-the-tests";
/// Longest time that a script may take.
const LIMIT: Duration = Duration::from_secs(180);

/// What runs a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// Python with the OpenAI SDK.
    Python,
    /// Python with everything that is built on the SDK.
    Frameworks,
    /// Node.
    Node,
}

/// Front doors of every kind that a client meets.
pub struct Doors {
    real: Arc<Stack>,
    scripted: Gateway,
    guarded: Gateway,
    late: Gateway,
    /// Where the decode worker of `late` will listen.
    late_addr: String,
    decode: FakeDecode,
    _keys: tempfile::NamedTempFile,
}

impl Doors {
    /// Opens them. The real model is shared by all who use it at the same time.
    pub async fn open() -> Self {
        let decode = FakeDecode::start(tiny::model(), vec![]).await;
        decode.direct(plays::script);
        let keys = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(keys.path(), format!("guest = {{ key = \"{KEY}\", max_concurrent = 1 }}\n")).unwrap();
        let (model, addr) = (tiny::model(), decode.server.addr.clone());
        let guards = ["--api-keys-file", keys.path().to_str().unwrap(), "--public-metrics"];
        let late_addr = format!("127.0.0.1:{}", free_port());
        let late = Gateway::start_unready(model, &late_addr, None, &[]);
        late.listening().await;
        Self {
            real: real().await,
            scripted: Gateway::start(model, &addr, None, &["--reasoning-parser", "qwen3"]).await,
            guarded: Gateway::start(model, &addr, None, &guards).await,
            late,
            late_addr,
            decode,
            _keys: keys,
        }
    }

    /// Lets a script of `tests/clients` judge them; returns the report on its last line.
    ///
    /// Its one argument is JSON: `real` (real workers and model), `scripted` (answers after [`plays`]), `guarded` (the
    /// same with `key`), `late` (no decode worker until a request was refused), each a base URL.
    pub async fn judged(&self, program: Program, script: &str) -> Value {
        let url = |gateway: &Gateway| format!("http://{}/v1", gateway.addr);
        let doors = json!({"real": url(&self.real.gateway), "scripted": url(&self.scripted),
            "guarded": url(&self.guarded), "key": KEY, "late": url(&self.late)});
        let before = self.decode.cancelled().len();
        let report = tokio::select! {
            report = judged(program, script, &doors) => report,
            () = self.serve_late() => unreachable!("it never ends"),
        };
        let asked = report["cancelled"].as_u64().unwrap() as usize;
        wait::until(&format!("{asked} answers to stop"), Duration::from_secs(10), || async {
            (self.decode.cancelled().len() - before >= asked).then_some(())
        })
        .await;
        assert_eq!(self.decode.cancelled().len() - before, asked, "answers that stopped before their end");
        report
    }

    /// Once the late door has refused a request, its worker comes.
    async fn serve_late(&self) {
        wait::until("a refused request", LIMIT, || async {
            let refused = metric(&self.late.metrics().await, "pd_bridge_requests_total", "no_decode_worker");
            (refused > 0.0).then_some(())
        })
        .await;
        let worker = FakeDecode::listening_on(&self.late_addr, tiny::model(), vec![]).await;
        worker.direct(plays::script);
        std::future::pending().await
    }
}

/// The start model on real workers: the one that runs, or a new one.
async fn real() -> Arc<Stack> {
    static RUNNING: Mutex<Weak<Stack>> = Mutex::const_new(Weak::new());
    let mut running = RUNNING.lock().await;
    if let Some(stack) = running.upgrade() {
        return stack;
    }
    let stack = Arc::new(Stack::start(&paths::model(), &[], &[], &[]).await);
    *running = Arc::downgrade(&stack);
    stack
}

/// Runs a script with one JSON argument; the last line of its output is its report.
///
/// # Panics
/// The script fails, with all that it wrote.
pub async fn judged(program: Program, script: &str, argument: &Value) -> Value {
    static FETCH: Mutex<()> = Mutex::const_new(());
    let clients = paths::root().join("tests/clients");
    let program = clients.join(match program {
        Program::Python => "python.sh",
        Program::Frameworks => "frameworks.sh",
        Program::Node => "node.sh",
    });
    {
        // Tests that start together fetch what they need one after the other.
        let _one = FETCH.lock().await;
        run(&program, &["--version"]).await;
    }
    let script = clients.join(script);
    let output = run(&program, &[script.to_str().unwrap(), &argument.to_string()]).await;
    let last = output.lines().last().unwrap_or_default();
    serde_json::from_str(last).unwrap_or_else(|e| panic!("{}: no report ({e}):\n{output}", script.display()))
}

async fn run(program: &Path, arguments: &[&str]) -> String {
    let child = Command::new(program).args(arguments).kill_on_drop(true).output();
    let shown = format!("{} {:.120}", program.display(), arguments.join(" "));
    let output =
        tokio::time::timeout(LIMIT, child).await.unwrap_or_else(|_| panic!("{shown} hangs")).unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{shown}: {}\n{out}{err}", output.status);
    out.into_owned()
}
