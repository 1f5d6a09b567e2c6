//! The operator's end of commands: sign, send, read the output, grant more.

use super::{
    Action, Bus, CommandError, CommandId, Credit, End, Frame, FrameError, NodeId, OperatorKey, Refusal,
    Reply, UnsignedCommand, subjects,
};
use async_nats::client::RequestErrorKind;
use async_nats::{Client, Subscriber};
use futures_util::StreamExt as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Longest wait for an agent's reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// How often an agent hears that its operator still listens.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// Output bytes that may be under way to one operator from one node: what bounds memory on both ends.
pub const WINDOW_BYTES: u64 = 2 << 20;
/// A grant is sent when this much of the window was used up.
const GRANT_BYTES: u64 = WINDOW_BYTES / 8;

/// Somebody who may give commands; clones share the connection and the key.
#[derive(Debug, Clone)]
pub struct Operator {
    bus: Bus,
    key: Arc<OperatorKey>,
}

/// A command whose output is being read. Dropping it cancels the command.
#[derive(Debug)]
pub struct Running {
    operator: Operator,
    node: NodeId,
    id: CommandId,
    output: Subscriber,
    next_sequence: u64,
    read_bytes: u64,
    granted: watch::Sender<u64>,
    ended: bool,
    /// Ends the task that grants.
    stop: CancellationToken,
}

/// Why a command failed on its way.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperatorError {
    /// It could not be signed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The node refuses.
    #[error("{node} refuses: {refusal}")]
    Refused {
        /// The node.
        node: NodeId,
        /// Why.
        refusal: Refusal,
    },
    /// No agent listens under this name.
    #[error("no agent of the name `{0}` is on the bus")]
    NoAgent(NodeId),
    /// The agent does not answer.
    #[error("{0} does not answer")]
    NoReply(NodeId),
    /// The bus failed.
    #[error("bus: {0}")]
    Bus(String),
    /// Output that does not belong to this protocol.
    #[error("{node}: {source}")]
    Output {
        /// The node.
        node: NodeId,
        /// What is wrong.
        source: FrameError,
    },
    /// A piece of output is missing; the command was cancelled.
    #[error("a piece of the output of {0} was lost")]
    Lost(NodeId),
}

impl Operator {
    /// Somebody with a connection and a signing key.
    #[must_use]
    pub fn new(bus: Bus, key: OperatorKey) -> Self {
        Self { bus, key: Arc::new(key) }
    }

    /// The connection.
    #[must_use]
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Gives a command that has no output.
    ///
    /// # Errors
    /// [`OperatorError`].
    pub async fn send(&self, node: &NodeId, action: Action) -> Result<(), OperatorError> {
        self.request(&UnsignedCommand::new(node.clone(), action)).await
    }

    /// Starts a command that has output. Its window is [`WINDOW_BYTES`].
    ///
    /// # Errors
    /// [`OperatorError`].
    pub async fn start(&self, node: &NodeId, action: Action) -> Result<Running, OperatorError> {
        let command = UnsignedCommand::new(node.clone(), action);
        let failed = |e: &dyn std::fmt::Display| OperatorError::Bus(e.to_string());
        let subject = subjects::output(node, command.id);
        // Subscribed first, on the same connection: no output can be missed.
        let output = self.bus.client.subscribe(subject).await.map_err(|e| failed(&e))?;
        self.request(&command).await?;
        let (granted, grants) = watch::channel(WINDOW_BYTES);
        let stop = CancellationToken::new();
        let grant = grant(
            self.bus.client.clone(),
            subjects::credit(node, command.id),
            command.nonce,
            grants,
            stop.clone(),
        );
        tokio::spawn(grant);
        Ok(Running {
            operator: self.clone(),
            node: node.clone(),
            id: command.id,
            output,
            next_sequence: 0,
            read_bytes: 0,
            granted,
            ended: false,
            stop,
        })
    }

    async fn request(&self, command: &UnsignedCommand) -> Result<(), OperatorError> {
        let node = || command.node.clone();
        let message = command.sign(&self.key)?.encode()?;
        let request = async_nats::Request::new().payload(message).timeout(Some(REPLY_TIMEOUT));
        let reply = self.bus.client.send_request(subjects::commands(&command.node), request).await;
        let reply = reply.map_err(|e| match e.kind() {
            RequestErrorKind::NoResponders => OperatorError::NoAgent(node()),
            RequestErrorKind::TimedOut => OperatorError::NoReply(node()),
            _ => OperatorError::Bus(e.to_string()),
        })?;
        match serde_json::from_slice(&reply.payload) {
            Ok(Reply::Accepted {}) => Ok(()),
            Ok(Reply::Refused(refusal)) => Err(OperatorError::Refused { node: node(), refusal }),
            Err(source) => Err(OperatorError::Output { node: node(), source: source.into() }),
        }
    }
}

impl Running {
    /// The node.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// The next piece of output; after [`Frame::End`] nothing comes. Asking for the next piece grants the room of the
    /// one before, so a slow reader slows the command down, whose output waits on its own machine.
    ///
    /// # Errors
    /// [`OperatorError::Lost`], [`OperatorError::Output`], [`OperatorError::Bus`]; the command is over then.
    pub async fn next(&mut self) -> Result<Frame, OperatorError> {
        if self.read_bytes + WINDOW_BYTES >= *self.granted.borrow() + GRANT_BYTES {
            self.granted.send_replace(self.read_bytes + WINDOW_BYTES);
        }
        let message = self.output.next().await.ok_or_else(|| OperatorError::Bus("closed".to_owned()))?;
        let frame = Frame::decode(&message.payload);
        let (sequence, frame) =
            frame.map_err(|source| OperatorError::Output { node: self.node.clone(), source })?;
        if sequence != self.next_sequence {
            return Err(OperatorError::Lost(self.node.clone()));
        }
        self.next_sequence += 1;
        self.read_bytes += frame.cost_bytes();
        self.ended |= matches!(frame, Frame::End(_));
        Ok(frame)
    }

    /// Asks the agent to end the command; its [`Frame::End`] still comes.
    ///
    /// # Errors
    /// [`OperatorError`]; [`super::RefusalCode::NotRunning`] when it had ended already.
    pub async fn cancel(&self) -> Result<(), OperatorError> {
        self.operator.send(&self.node, Action::Cancel { command: self.id }).await
    }

    /// Reads everything into memory: standard output, standard error, end. For short answers.
    ///
    /// # Errors
    /// As [`Self::next`].
    pub async fn collect(mut self) -> Result<(Vec<u8>, Vec<u8>, End), OperatorError> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.next().await? {
                Frame::Stdout(bytes) => stdout.extend_from_slice(&bytes),
                Frame::Stderr(bytes) => stderr.extend_from_slice(&bytes),
                Frame::End(end) => return Ok((stdout, stderr, end)),
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
        if !self.ended {
            let (operator, node, command) = (self.operator.clone(), self.node.clone(), self.id);
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                runtime.spawn(async move {
                    // Best effort: without it the agent finds out by itself that nobody listens.
                    let _ = operator.send(&node, Action::Cancel { command }).await;
                });
            }
        }
    }
}

/// Sends each new grant, and the last one again as a sign of life.
async fn grant(
    client: Client,
    subject: String,
    token: crate::hexbytes::Hex<16>,
    mut grants: watch::Receiver<u64>,
    stop: CancellationToken,
) {
    loop {
        let granted_bytes = *grants.borrow_and_update();
        if let Ok(message) = serde_json::to_vec(&Credit { token, granted_bytes }) {
            // A lost connection comes back, or the command ends.
            let _ = client.publish(subject.clone(), message.into()).await;
        }
        tokio::select! {
            changed = grants.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(SIGN_OF_LIFE) => {}
            () = stop.cancelled() => return,
        }
    }
}
