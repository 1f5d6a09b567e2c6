//! A real Prometheus, and promtool.

use crate::http;
use crate::paths::root;
use crate::process::Process;
use crate::stack::free_port;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// A running server; its data and its copy of the configuration end with it.
pub struct Prometheus {
    _process: Process,
    _dir: tempfile::TempDir,
    addr: String,
}

/// The folder of `prometheus` and `promtool`.
#[must_use]
pub fn programs() -> PathBuf {
    let script = root().join("tests/clients/prometheus.sh");
    let made = Command::new(&script).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    PathBuf::from(String::from_utf8(made.stdout).unwrap().trim())
}

/// Runs promtool in `deploy/prometheus`; gives whether it succeeded, and what it said.
#[must_use]
pub fn promtool(args: &[&str]) -> (bool, String) {
    let program = programs().join("promtool");
    let ran =
        Command::new(program).args(args).current_dir(root().join("deploy/prometheus")).output().unwrap();
    let said = [ran.stdout, ran.stderr].concat();
    (ran.status.success(), String::from_utf8_lossy(&said).into_owned())
}

impl Prometheus {
    /// Starts it with the shipped configuration, made quicker, over these gateways. Returns when it has read them.
    pub async fn start(gateways: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let shipped = root().join("deploy/prometheus");
        let text = std::fs::read_to_string(shipped.join("prometheus.yml")).unwrap();
        let quick = text.replace("interval: 5s", "interval: 1s").replace("interval: 15s", "interval: 1s");
        assert_ne!(text, quick, "the shipped intervals are not where this test looks for them");
        std::fs::write(dir.path().join("prometheus.yml"), quick).unwrap();
        std::fs::copy(shipped.join("alerts.yml"), dir.path().join("alerts.yml")).unwrap();
        std::fs::create_dir(dir.path().join("targets")).unwrap();
        let targets = serde_json::json!([{"targets": gateways}]).to_string();
        std::fs::write(dir.path().join("targets/gateways.yml"), targets).unwrap();
        let addr = format!("127.0.0.1:{}", free_port());
        let path = |p: &Path| p.to_str().unwrap().to_owned();
        let args = [
            format!("--config.file={}", path(&dir.path().join("prometheus.yml"))),
            format!("--storage.tsdb.path={}", path(&dir.path().join("data"))),
            format!("--web.listen-address={addr}"),
        ];
        let process = Process::start_at(&programs().join("prometheus"), &args);
        let started = Self { _process: process, _dir: dir, addr };
        crate::wait::until("Prometheus has read the gateways", Duration::from_secs(30), || async {
            // A server that is starting answers 503 as soon as it listens.
            let ready = http::send(&started.addr, "GET", "/-/ready", &[], None).await.ok()?;
            if ready.status != 200 {
                return None;
            }
            let up = started.query(r#"up{job="pd-bridge"} == 1"#).await.ok()?;
            (up.len() == gateways.len()).then_some(())
        })
        .await;
        started
    }

    /// Evaluates an expression now.
    ///
    /// # Errors
    /// What Prometheus says is wrong with it.
    pub async fn query(&self, expression: &str) -> Result<Vec<Value>, String> {
        let path = format!("/api/v1/query?query={}", percent_encoded(expression));
        let answer = http::get(&self.addr, &path).await.json();
        if answer["status"] != "success" {
            return Err(answer.to_string());
        }
        match (&answer["data"]["resultType"], &answer["data"]["result"]) {
            (Value::String(kind), Value::Array(series)) if kind == "vector" => Ok(series.clone()),
            (_, other) => Ok(vec![other.clone()]),
        }
    }

    /// Every alert, once each has been evaluated.
    pub async fn alerts(&self) -> Vec<Alert> {
        crate::wait::until("the alerts are evaluated", Duration::from_secs(20), || async {
            let answer = http::get(&self.addr, "/api/v1/rules?type=alert").await.json();
            let groups = answer["data"]["groups"].as_array()?.clone();
            let rules: Vec<Value> =
                groups.iter().flat_map(|g| g["rules"].as_array().unwrap().clone()).collect();
            let known = rules.iter().all(|r| r["health"] != "unknown");
            (known && !rules.is_empty()).then(|| rules.iter().map(Alert::read).collect())
        })
        .await
    }
}

/// An alert as the server sees it.
#[derive(Debug)]
pub struct Alert {
    /// Its name.
    pub name: String,
    /// `inactive`, `pending` or `firing`.
    pub state: String,
    /// Its expression, on one line.
    pub expression: String,
    /// What went wrong at its last evaluation.
    pub error: Option<String>,
}

impl Alert {
    fn read(rule: &Value) -> Self {
        let text = |key: &str| rule[key].as_str().unwrap_or_default().to_owned();
        let expression = text("query").split_whitespace().collect::<Vec<_>>().join(" ");
        let error = Some(text("lastError")).filter(|e| !e.is_empty());
        Self { name: text("name"), state: text("state"), expression, error }
    }
}

fn percent_encoded(text: &str) -> String {
    let encode = |b: u8| {
        if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") }
    };
    text.bytes().map(encode).collect()
}
