//! An agent on a bus, and an operator who may give it commands.

use crate::nats::Nats;
use crate::paths;
use crate::process::Process;
use futures_util::StreamExt as _;
use shared::bus::{
    Action, AuditLine, Bus, ExecSpec, Exit, Heartbeat, NodeId, Operator, OperatorError, OperatorKey,
    RefusalCode, Running, WINDOW_BYTES, subjects,
};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Everything that an agent test needs. Ends what it started.
#[derive(Debug)]
pub struct AgentScene {
    /// The server.
    pub nats: Nats,
    /// The agent; a dead one after [`AgentScene::kill_agent`].
    pub agent: Process,
    /// Its node.
    pub node: NodeId,
    /// Seed of the operator that the agent knows.
    pub key_file: PathBuf,
    config: PathBuf,
    /// Others may read here: programs run as somebody else.
    dir: tempfile::TempDir,
}

impl AgentScene {
    /// An agent whose `[agent.commands]` table is `commands`, besides the operator and the user, which are filled in.
    #[must_use]
    pub fn start(commands: &str) -> Self {
        Self::start_with("", commands, "")
    }

    /// The same with more keys of `[agent]` and more sections.
    #[must_use]
    pub fn start_with(agent: &str, commands: &str, sections: &str) -> Self {
        Self::on(Nats::start(), "node-1", agent, commands, sections)
    }

    /// An agent of this name on a server of the test's own.
    #[must_use]
    pub fn on(nats: Nats, node: &str, agent: &str, commands: &str, sections: &str) -> Self {
        let dir = public_dir();
        let (key_file, public) = nats.new_key("operator");
        let config = dir.path().join("agent.toml");
        let state = dir.path().join("state");
        let text = format!(
            "[agent]\nnode = \"{node}\"\nbus.servers = [\"{}\"]\nstate_dir = \"{}\"\n{agent}\n\
             [agent.commands]\noperators = {{ tester = \"{public}\" }}\n{}{commands}\n{sections}\n\
             [operator]\nbus.servers = [\"{}\"]\nkey_file = \"{}\"\n",
            nats.url(),
            state.display(),
            user_line(),
            nats.url(),
            key_file.display(),
        );
        std::fs::write(&config, text).unwrap();
        let agent = start_agent(&config);
        Self { nats, agent, node: NodeId::new(node).unwrap(), key_file, config, dir }
    }

    /// One more agent on the same bus, which knows the same operator. Its audit is in [`Self::neighbour_audit`].
    #[must_use]
    pub fn neighbour(&self, node: &str, commands: &str) -> Process {
        let public = OperatorKey::from_file(&self.key_file).unwrap().public();
        let config = self.dir.path().join(format!("{node}.toml"));
        let text = format!(
            "[agent]\nnode = \"{node}\"\nbus.servers = [\"{}\"]\nstate_dir = \"{}\"\n\
             [agent.commands]\noperators = {{ tester = \"{public}\" }}\n{}{commands}\n",
            self.nats.url(),
            self.dir.path().join(node).display(),
            user_line(),
        );
        std::fs::write(&config, text).unwrap();
        start_agent(&config)
    }

    /// Every line of a neighbour's audit file.
    #[must_use]
    pub fn neighbour_audit(&self, node: &str) -> Vec<AuditLine> {
        read_audit(&self.dir.path().join(node).join("audit.log"))
    }

    /// Kills the agent, as a power cut would.
    pub fn kill_agent(&mut self) {
        self.agent.kill();
    }

    /// Starts the agent (again) with what it kept.
    pub fn restart_agent(&mut self) {
        self.agent.kill();
        self.agent = start_agent(&self.config);
    }

    /// Starts the agent again with one more environment variable.
    pub fn restart_agent_with_env(&mut self, name: &str, value: &str) {
        self.agent.kill();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let agent = text(&paths::bin("pd-agent"));
        let args = [format!("{name}={value}"), agent, "--config".to_owned(), text(&self.config)];
        // `env` becomes the agent, so that its process is ours.
        self.agent = Process::start_at(Path::new("/usr/bin/env"), &args);
    }

    /// A folder that every user can read.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where the agent keeps what must survive.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// The configuration file of agent and operator.
    #[must_use]
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// Writes a script that every user can run.
    #[must_use]
    pub fn script(&self, name: &str, text: &str) -> String {
        let file = self.dir.path().join(name);
        std::fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        file.to_str().unwrap().to_owned()
    }

    /// The operator that the agent knows, once the agent takes commands.
    pub async fn operator(&self) -> Operator {
        self.operator_on(self.nats.connect().await).await
    }

    /// The same over another connection.
    pub async fn operator_on(&self, bus: Bus) -> Operator {
        let operator = Operator::new(bus, OperatorKey::from_file(&self.key_file).unwrap());
        self.ready(&operator).await;
        operator
    }

    /// Waits until the agent takes commands: also until its memory reaches back far enough.
    pub async fn ready(&self, operator: &Operator) {
        let start = Instant::now();
        loop {
            match operator.send(&self.node, Action::Cancel { command: shared::hexbytes::Hex([0; 16]) }).await
            {
                Err(OperatorError::Refused { refusal, .. }) if refusal.code != RefusalCode::Stale => return,
                other => {
                    assert!(start.elapsed() < Duration::from_secs(30), "{other:?}\n{}", self.agent.log_tail())
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The next heartbeat that satisfies `wanted`.
    pub async fn beat(&self, bus: &Bus, wanted: impl Fn(&Heartbeat) -> bool) -> Heartbeat {
        let mut beats = bus.client.subscribe(subjects::heartbeats()).await.unwrap();
        let hearing = async {
            loop {
                let message = beats.next().await.unwrap();
                let beat = Heartbeat::decode(&message.subject, &message.payload).unwrap();
                if beat.node == self.node && wanted(&beat) {
                    return beat;
                }
            }
        };
        let limit = Duration::from_secs(30);
        tokio::time::timeout(limit, hearing)
            .await
            .unwrap_or_else(|_| panic!("no such heartbeat:\n{}", self.agent.log_tail()))
    }

    /// `pd-bridge` with these arguments and this scene's configuration, before it is started.
    #[must_use]
    pub fn cli(&self, args: &[&str]) -> Command {
        let mut command = Command::new(paths::bin("pd-bridge"));
        command.args(args).env("PD_BRIDGE_CONFIG", &self.config).env_remove("RUST_LOG").stdin(Stdio::null());
        command
    }

    /// Runs `pd-bridge` to its end.
    #[must_use]
    pub fn run_cli(&self, args: &[&str]) -> Output {
        self.cli(args).output().unwrap()
    }

    /// Every line of the audit file.
    #[must_use]
    pub fn audit(&self) -> Vec<AuditLine> {
        read_audit(&self.state_dir().join("audit.log"))
    }
}

fn read_audit(file: &Path) -> Vec<AuditLine> {
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Asks for a program.
#[must_use]
pub fn exec(argv: &[&str], timeout: Duration) -> Action {
    Action::Exec(ExecSpec {
        argv: argv.iter().map(|a| (*a).to_owned()).collect(),
        timeout_ms: u64::try_from(timeout.as_millis()).unwrap(),
        window_bytes: WINDOW_BYTES,
    })
}

/// Starts a program on the scene's node.
///
/// # Errors
/// As [`Operator::start`].
pub async fn start(operator: &Operator, scene: &AgentScene, argv: &[&str]) -> Result<Running, OperatorError> {
    operator.start(&scene.node, exec(argv, Duration::from_secs(60))).await
}

/// Runs a program on the scene's node: its exit, standard output and standard error.
pub async fn run(operator: &Operator, scene: &AgentScene, argv: &[&str]) -> (Exit, String, String) {
    let (out, err, end) = start(operator, scene, argv).await.unwrap().collect().await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (end.exit, text(out), text(err))
}

/// The code of a refusal.
///
/// # Panics
/// When it is no refusal.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, OperatorError>) -> RefusalCode {
    match result {
        Err(OperatorError::Refused { refusal, .. }) => refusal.code,
        other => panic!("not refused: {other:?}"),
    }
}

/// Processes whose command line holds `mark`.
#[must_use]
pub fn processes_with(mark: &str) -> Vec<u32> {
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| String::from_utf8_lossy(&line).contains(mark))
    })
    .collect()
}

/// Asks again and again until it is true.
pub async fn until(what: &str, mut check: impl FnMut() -> bool) {
    crate::wait::until(what, Duration::from_secs(30), || std::future::ready(check().then_some(()))).await;
}

fn start_agent(config: &Path) -> Process {
    Process::start("pd-agent", &["--config".to_owned(), config.to_str().unwrap().to_owned()])
}

/// Programs must not run as root, so that limits on processes count.
fn user_line() -> &'static str {
    if nix::unistd::geteuid().is_root() { "user = \"nobody\"\n" } else { "" }
}

fn public_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}
