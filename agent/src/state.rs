//! What the operator decided about this node, kept over restarts.

use shared::bus::NodeState;
use std::path::{Path, PathBuf};
use tokio::sync::watch;

/// Whether work may be sent here; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct State {
    state: watch::Sender<NodeState>,
    /// Exists while the node drains.
    mark: PathBuf,
}

impl State {
    /// As it was left.
    pub(crate) fn load(dir: &Path) -> Self {
        let mark = dir.join("draining");
        let state = if mark.exists() { NodeState::Draining } else { NodeState::Alive };
        Self { state: watch::channel(state).0, mark }
    }

    /// Now.
    pub(crate) fn current(&self) -> NodeState {
        *self.state.borrow()
    }

    /// Follows it.
    pub(crate) fn watch(&self) -> watch::Receiver<NodeState> {
        self.state.subscribe()
    }

    /// No new work, also after a restart.
    ///
    /// # Errors
    /// When that can't be written down; nothing changes then.
    pub(crate) fn drain(&self) -> std::io::Result<()> {
        std::fs::write(&self.mark, "")?;
        self.set(NodeState::Draining);
        Ok(())
    }

    /// Work is welcome.
    ///
    /// # Errors
    /// When that can't be written down; nothing changes then.
    pub(crate) fn resume(&self) -> std::io::Result<()> {
        match std::fs::remove_file(&self.mark) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.set(NodeState::Alive);
        Ok(())
    }

    /// This agent ends.
    pub(crate) fn leave(&self) {
        self.state.send_replace(NodeState::Leaving);
    }

    fn set(&self, state: NodeState) {
        // Nothing brings a leaving agent back.
        self.state.send_if_modified(|s| *s != NodeState::Leaving && std::mem::replace(s, state) != state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draining_survives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::load(dir.path());
        assert_eq!(state.current(), NodeState::Alive);
        state.drain().unwrap();
        state.drain().unwrap();
        let again = State::load(dir.path());
        assert_eq!(again.current(), NodeState::Draining);
        again.resume().unwrap();
        again.resume().unwrap();
        assert_eq!(State::load(dir.path()).current(), NodeState::Alive);
        again.leave();
        again.drain().unwrap();
        assert_eq!(again.current(), NodeState::Leaving);
    }
}
