//! Which children of this process are wanted.

use super::tree;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;
use tokio::process::{Child, Command};

/// Starts children and knows them; clones share what they know.
#[derive(Debug, Clone, Default)]
pub(crate) struct Nursery(Arc<Mutex<HashSet<u32>>>);

impl Nursery {
    /// Makes this process the parent of every orphan below it, where the system can do that.
    pub(crate) fn adopt_orphans() -> Self {
        #[cfg(target_os = "linux")]
        if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
            tracing::warn!(%error, "processes that outlive their command can't be caught");
        }
        Self::default()
    }

    /// Starts a child that is wanted.
    ///
    /// # Errors
    /// As [`Command::spawn`].
    pub(crate) fn spawn(&self, command: &mut Command) -> std::io::Result<Child> {
        // Held over the start: a sweep must not meet a child that is not yet known.
        let mut known = self.0.lock();
        let child = command.spawn()?;
        known.extend(child.id());
        Ok(child)
    }

    /// A child was waited for.
    pub(crate) fn forget(&self, pid: Option<u32>) {
        if let Some(pid) = pid {
            self.0.lock().remove(&pid);
        }
    }

    /// Ends every child that is not wanted, and all below it: what has outlived a command.
    pub(crate) fn sweep(&self) {
        self.end_strangers(tree::direct_children);
    }

    /// The same with a look at every process of the machine.
    pub(crate) fn sweep_all(&self) {
        self.end_strangers(tree::all_direct_children);
    }

    fn end_strangers(&self, children: fn(u32) -> Vec<u32>) {
        let known = self.0.lock();
        let this = std::process::id();
        let strangers: Vec<u32> = children(this).into_iter().filter(|pid| !known.contains(pid)).collect();
        if strangers.is_empty() {
            return;
        }
        tracing::warn!(n = strangers.len(), "ending processes that outlived their command");
        tree::end_below(this, &known);
        for pid in children(this).into_iter().filter(|pid| !known.contains(pid)) {
            if let Ok(pid) = i32::try_from(pid) {
                let _ = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
            }
        }
    }
}
