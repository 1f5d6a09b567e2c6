//! One worker process: how it is started, what it says, how it ends.

use serde::Deserialize;
use shared::settings::EXIT_BAD_SETTING;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};

/// A child that has been asked to end gets this long before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// What to start.
#[derive(Debug, Clone)]
pub(crate) struct ChildSpec {
    /// Prefix of its log lines, and its name in the fleet.
    pub(crate) name: &'static str,
    program: PathBuf,
    args: Vec<OsString>,
}

/// A worker that listens.
pub(crate) struct Running {
    name: &'static str,
    child: Child,
    /// The worker ends when this closes, which the system does if this process is killed.
    stdin: Option<ChildStdin>,
    /// Its control address.
    pub(crate) control: String,
}

/// Why a worker did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChildError {
    /// The program is not beside this one.
    #[error("{program} is not beside {beside}: {source}")]
    Missing {
        /// Name of the program.
        program: &'static str,
        /// Folder it was looked for in.
        beside: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The system did not start it.
    #[error("can't start the {name} worker: {source}")]
    Spawn {
        /// Which.
        name: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// It refused a setting; its own message says which.
    #[error("the {name} worker refused a setting, see its message above")]
    BadSetting {
        /// Which.
        name: &'static str,
    },
    /// It ended before it listened.
    #[error("the {name} worker ended before it was ready ({status}), see its messages above")]
    Ended {
        /// Which.
        name: &'static str,
        /// How.
        status: ExitStatus,
    },
    /// Its first line is not the promised JSON.
    #[error("the {name} worker said `{line}` instead of its addresses")]
    Garbled {
        /// Which.
        name: &'static str,
        /// What it said.
        line: String,
    },
}

/// A worker's first line on stdout.
#[derive(Deserialize)]
struct Announcement {
    control: String,
}

impl ChildSpec {
    /// A worker program in the folder of this one, on a free loopback port.
    ///
    /// # Errors
    /// [`ChildError::Missing`].
    pub(crate) fn beside_this_program(program: &'static str, name: &'static str) -> Result<Self, ChildError> {
        let missing = |beside: PathBuf, source| ChildError::Missing { program, beside, source };
        let this = std::env::current_exe().map_err(|e| missing(PathBuf::new(), e))?;
        let beside = this.parent().map(PathBuf::from).unwrap_or_default();
        let path = beside.join(format!("{program}{}", std::env::consts::EXE_SUFFIX));
        if let Err(source) = std::fs::metadata(&path) {
            return Err(missing(beside, source));
        }
        let args = ["--listen", "127.0.0.1:0", "--exit-with-stdin", "--node", name];
        Ok(Self { name, program: path, args: args.into_iter().map(OsString::from).collect() })
    }

    /// Adds an option if it has a value.
    pub(crate) fn option(
        &mut self,
        flag: &str,
        value: Option<&(impl AsRef<std::ffi::OsStr> + ?Sized)>,
    ) -> &mut Self {
        if let Some(value) = value {
            self.args.push(flag.into());
            self.args.push(value.as_ref().into());
        }
        self
    }

    /// Starts the worker and waits until it listens, however long its model takes to load.
    ///
    /// # Errors
    /// [`ChildError`].
    pub(crate) async fn start(&self) -> Result<Running, ChildError> {
        let name = self.name;
        let mut child = Command::new(&self.program)
            .args(&self.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in a terminal reaches this process alone, which then drains before it ends its children.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| ChildError::Spawn { name, source })?;
        if let Some(stderr) = child.stderr.take() {
            tokio::spawn(pass_on(name, stderr));
        }
        let stdin = child.stdin.take();
        let mut first = String::new();
        if let Some(stdout) = child.stdout.take() {
            let mut lines = BufReader::new(stdout);
            // An error here means that the pipe broke, which the exit status explains better.
            let _ = lines.read_line(&mut first).await;
            tokio::spawn(pass_on(name, lines));
        }
        if first.trim().is_empty() {
            let status = child.wait().await.map_err(|source| ChildError::Spawn { name, source })?;
            return Err(if status.code() == Some(i32::from(EXIT_BAD_SETTING)) {
                ChildError::BadSetting { name }
            } else {
                ChildError::Ended { name, status }
            });
        }
        match serde_json::from_str::<Announcement>(&first) {
            Ok(said) => Ok(Running { name, child, stdin, control: said.control }),
            Err(_) => Err(ChildError::Garbled { name, line: first.trim().chars().take(200).collect() }),
        }
    }
}

impl Running {
    /// Waits until it ends by itself.
    pub(crate) async fn ended(&mut self) -> String {
        match self.child.wait().await {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        }
    }

    /// Ends it: politely, then not.
    pub(crate) async fn stop(mut self) {
        drop(self.stdin.take());
        if let Some(pid) = self.child.id().and_then(|pid| i32::try_from(pid).ok()) {
            // It may be gone already, which is what is wanted.
            let _ =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGTERM);
        }
        if tokio::time::timeout(STOP_LIMIT, self.child.wait()).await.is_err() {
            tracing::warn!(worker = self.name, "killing a worker that does not end");
            let _ = self.child.kill().await;
        }
    }
}

/// Copies a worker's lines to stderr under its name.
async fn pass_on(name: &'static str, from: impl AsyncRead + Unpin) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        #[allow(clippy::print_stderr, reason = "a supervisor passes on what its children say")]
        {
            eprintln!("[{name}] {line}");
        }
    }
}
