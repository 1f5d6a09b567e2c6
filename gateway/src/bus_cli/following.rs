//! A command on a node, followed until its end; a cancel here ends it over there, too.

use shared::bus::{Action, Frame, NodeId, Operator, OperatorError, Running};
use tokio_util::sync::CancellationToken;

/// A started command.
pub(super) struct Following<'a> {
    running: Running,
    cancel: &'a CancellationToken,
    cancelled: bool,
}

impl<'a> Following<'a> {
    /// Starts a command on a node.
    ///
    /// # Errors
    /// [`OperatorError`].
    pub(super) async fn start(
        operator: &Operator,
        node: &NodeId,
        action: Action,
        cancel: &'a CancellationToken,
    ) -> Result<Self, OperatorError> {
        Ok(Self { running: operator.start(node, action).await?, cancel, cancelled: false })
    }

    /// The next frame. After a cancel they go on until the one that says how the command ended.
    ///
    /// # Errors
    /// [`OperatorError`].
    pub(super) async fn next(&mut self) -> Result<Frame, OperatorError> {
        loop {
            tokio::select! {
                frame = self.running.next() => return frame,
                () = self.cancel.cancelled(), if !self.cancelled => {}
            }
            self.cancelled = true;
            match self.running.cancel().await {
                // It ended by itself a moment ago: its end is on the way.
                Ok(()) | Err(OperatorError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }
}
