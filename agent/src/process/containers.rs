//! Containers for commands, one of them always started before it is needed.

use super::container::{CONTAIN, Containment};
use super::nursery::Nursery;
use parking_lot::Mutex;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, ChildStdin, Command};

/// Starts containers; clones share the spare one.
///
/// A spare has done what takes time (the start of a program) and nothing that depends on a command. It still is the
/// agent's own user, so no command can reach it. It reads one order, carries it out inside that order's limits, and
/// ends: it serves one command.
#[derive(Debug, Clone)]
pub(crate) struct Containers {
    nursery: Nursery,
    env: Arc<Vec<(&'static str, OsString)>>,
    spare: Arc<Mutex<Option<Started>>>,
}

/// A container, and the pipe whose end is its own.
#[derive(Debug)]
struct Started {
    child: Child,
    lifeline: ChildStdin,
}

impl Containers {
    /// Containers whose programs see exactly this environment.
    pub(crate) fn new(nursery: Nursery, env: Vec<(&'static str, OsString)>) -> Self {
        Self { nursery, env: Arc::new(env), spare: Arc::default() }
    }

    /// Who knows the containers' processes.
    pub(crate) fn nursery(&self) -> &Nursery {
        &self.nursery
    }

    /// Starts a spare, if there is none.
    pub(crate) fn prepare(&self) {
        let mut spare = self.spare.lock();
        if spare.is_none() {
            match self.start() {
                Ok(started) => *spare = Some(started),
                // The next command tries again, and says so if it fails.
                Err(error) => tracing::debug!(%error, "no spare container"),
            }
        }
    }

    /// A container that carries this out. When the pipe is dropped, everything in the container ends.
    ///
    /// # Errors
    /// When it can't be started.
    pub(crate) async fn run(&self, containment: &Containment) -> std::io::Result<(Child, ChildStdin)> {
        let mut order = serde_json::to_vec(containment)?;
        order.push(b'\n');
        let spare = self.spare.lock().take();
        let refill = self.clone();
        tokio::spawn(async move { refill.prepare() });
        if let Some(mut spare) = spare {
            let is_alive = spare.child.try_wait().is_ok_and(|status| status.is_none());
            if is_alive && spare.lifeline.write_all(&order).await.is_ok() {
                return Ok((spare.child, spare.lifeline));
            }
            let pid = spare.child.id();
            let _ = spare.child.kill().await;
            self.nursery.forget(pid);
        }
        let mut started = self.start()?;
        started.lifeline.write_all(&order).await?;
        Ok((started.child, started.lifeline))
    }

    fn start(&self) -> std::io::Result<Started> {
        let mut command = Command::new(this_program()?);
        command.arg(CONTAIN).env_clear().envs(self.env.iter().map(|(name, value)| (*name, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.nursery.spawn(&mut command)?;
        let lifeline = child.stdin.take().ok_or_else(|| std::io::Error::other("no pipe to the container"))?;
        Ok(Started { child, lifeline })
    }
}

/// The running file itself, also when another version lies at its path by now.
fn this_program() -> std::io::Result<PathBuf> {
    let running = PathBuf::from("/proc/self/exe");
    if cfg!(target_os = "linux") { Ok(running) } else { std::env::current_exe() }
}
