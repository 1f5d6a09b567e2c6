//! Keeps the programs of this machine running.

use super::Workers;
use crate::logs::LogRing;
use crate::process::Nursery;
use backon::{BackoffBuilder as _, ExponentialBuilder};
use serde::Deserialize;
use shared::control::Role;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

const FIRST_DELAY: Duration = Duration::from_millis(500);
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// A program that ran this long was good: the next restart starts with the shortest delay.
const GOOD_RUN: Duration = Duration::from_secs(10);
/// A program that was asked to end gets this long; a gateway lets running answers finish.
const STOP_LIMIT: Duration = Duration::from_secs(35);

/// What can be kept running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Program {
    /// `pd-decode`.
    Decode,
    /// `pd-prefill`.
    Prefill,
    /// `pd-bridge gateway`.
    Gateway,
}

/// Starts one program again whenever it ends.
pub(crate) struct Supervisor {
    pub(crate) program: Program,
    /// Configuration file, for the program's own section.
    pub(crate) config: Option<PathBuf>,
    pub(crate) nursery: Nursery,
    pub(crate) ring: LogRing,
    pub(crate) workers: Workers,
    pub(crate) stop: CancellationToken,
}

/// A worker's first line on stdout.
#[derive(Deserialize)]
struct Announcement {
    control: String,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Gateway => "gateway",
        }
    }

    fn command(self, config: Option<&PathBuf>) -> std::io::Result<Command> {
        let (file, args): (&str, &[&str]) = match self {
            Self::Decode => ("pd-decode", &["--exit-with-stdin"]),
            Self::Prefill => ("pd-prefill", &["--exit-with-stdin"]),
            Self::Gateway => ("pd-bridge", &["gateway"]),
        };
        let beside = std::env::current_exe()?.with_file_name(file);
        let mut command = Command::new(beside);
        command.args(args).args(config.into_iter().flat_map(|c| ["--config".as_ref(), c.as_os_str()]));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0).kill_on_drop(true);
        Ok(command)
    }

    fn role(self) -> Option<Role> {
        match self {
            Self::Decode => Some(Role::Decode),
            Self::Prefill => Some(Role::Prefill),
            Self::Gateway => None,
        }
    }
}

impl Supervisor {
    /// Runs until stopped.
    pub(crate) async fn run(self) {
        let name = self.program.name();
        let mut delays = delays();
        while !self.stop.is_cancelled() {
            let since = Instant::now();
            match self.spawn() {
                Ok(child) => self.follow(child).await,
                Err(error) => tracing::error!(program = name, %error, "can't be started"),
            }
            if since.elapsed() >= GOOD_RUN {
                delays = self::delays();
            }
            tokio::select! {
                () = tokio::time::sleep(delays.next().unwrap_or(LONGEST_DELAY)) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = self.program.command(self.config.as_ref())?;
        self.nursery.spawn(&mut command)
    }

    /// Passes on what it says until it ends.
    async fn follow(&self, mut child: Child) {
        let (name, pid) = (self.program.name(), child.id());
        tracing::info!(program = name, pid, "started");
        if let Some(stderr) = child.stderr.take() {
            tokio::spawn(pass_on(self.ring.clone(), name, stderr));
        }
        // Held: waiting for a child closes whatever input it still has, and that is how these are asked to end.
        let stdin = child.stdin.take();
        let gone = self.stop.child_token();
        if let Some(stdout) = child.stdout.take() {
            tokio::spawn(announce(
                self.program,
                self.workers.clone(),
                self.ring.clone(),
                stdout,
                gone.clone(),
            ));
        }
        let status = tokio::select! {
            status = child.wait() => status,
            () = self.stop.cancelled() => {
                drop(stdin);
                stop(&mut child).await;
                self.nursery.forget(pid);
                return;
            }
        };
        gone.cancel();
        self.nursery.forget(pid);
        let status = status.map_or_else(|e| e.to_string(), |s| s.to_string());
        tracing::error!(program = name, status, "ended; starting it again");
    }
}

/// Politely, then not.
async fn stop(child: &mut Child) {
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
        // It may be gone already, which is what is wanted.
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM);
    }
    if tokio::time::timeout(STOP_LIMIT, child.wait()).await.is_err() {
        let _ = child.kill().await;
    }
}

/// Reads where a worker listens, follows it there, and passes on the rest.
async fn announce(
    program: Program,
    workers: Workers,
    ring: LogRing,
    stdout: impl AsyncRead + Unpin,
    gone: CancellationToken,
) {
    let mut lines = BufReader::new(stdout);
    let mut first = String::new();
    if lines.read_line(&mut first).await.is_ok()
        && let Some(role) = program.role()
        && let Ok(said) = serde_json::from_str::<Announcement>(&first)
    {
        workers.follow(role, said.control, gone);
    } else if !first.trim().is_empty() {
        tell(&ring, program.name(), first.trim_end());
    }
    pass_on(ring, program.name(), lines).await;
}

async fn pass_on(ring: LogRing, name: &'static str, from: impl AsyncRead + Unpin) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        tell(&ring, name, &line);
    }
}

#[allow(clippy::print_stderr, reason = "a supervisor passes on what its children say")]
fn tell(ring: &LogRing, name: &str, line: &str) {
    let line = format!("[{name}] {line}");
    ring.push(&line);
    eprintln!("{line}");
}

fn delays() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::new()
        .with_min_delay(FIRST_DELAY)
        .with_max_delay(LONGEST_DELAY)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}
