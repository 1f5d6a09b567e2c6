//! One running command: where its output goes, and what ends it from outside.

use shared::bus::{Bus, CommandId, Credit, End, Exit, Frame, NodeId, subjects};
use shared::hexbytes::Hex;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Largest window, whatever an operator grants: the most that waits in this process for a slow server.
const MAX_WINDOW_BYTES: u64 = 4 << 20;
/// An operator that is silent for this long is gone.
const OPERATOR_LIMIT: Duration = Duration::from_secs(10);

/// What the operator last said.
#[derive(Debug, Clone, Copy)]
struct Heard {
    granted_bytes: u64,
    at: Instant,
}

/// The side of a running command that others reach: credits and cancels.
#[derive(Debug)]
pub(super) struct Handle {
    /// Key of the operator that started it.
    pub(super) operator: String,
    pub(super) cancel: CancellationToken,
    token: Hex<16>,
    heard: watch::Sender<Heard>,
    spent: watch::Receiver<u64>,
}

/// Where output goes, within credits.
pub(super) struct Outlet {
    bus: Bus,
    subject: String,
    sequence: u64,
    spent: watch::Sender<u64>,
    heard: watch::Receiver<Heard>,
    stdout_bytes: u64,
    stderr_bytes: u64,
    started: Instant,
    max_output_bytes: u64,
}

/// What ends a command from outside.
pub(super) struct Limits {
    pub(super) deadline: Option<Instant>,
    pub(super) cancel: CancellationToken,
    pub(super) agent_stops: CancellationToken,
    heard: watch::Receiver<Heard>,
}

/// The parts of a new session.
pub(super) fn open(
    bus: Bus,
    node: &NodeId,
    id: CommandId,
    (operator, token): (String, Hex<16>),
    window_bytes: u64,
    max_output_bytes: u64,
    agent_stops: CancellationToken,
) -> (Handle, Outlet, Limits) {
    let granted_bytes = window_bytes.min(MAX_WINDOW_BYTES);
    let (heard, hears) = watch::channel(Heard { granted_bytes, at: Instant::now() });
    let (spent, spent_rx) = watch::channel(0);
    let cancel = CancellationToken::new();
    let handle = Handle { operator, cancel: cancel.clone(), token, heard, spent: spent_rx };
    let outlet = Outlet {
        bus,
        subject: subjects::output(node, id),
        sequence: 0,
        spent,
        heard: hears.clone(),
        stdout_bytes: 0,
        stderr_bytes: 0,
        started: Instant::now(),
        max_output_bytes,
    };
    (handle, outlet, Limits { deadline: None, cancel, agent_stops, heard: hears })
}

impl Handle {
    /// Takes a credit; false when it is not from the operator of this command.
    pub(super) fn credit(&self, credit: &Credit) -> bool {
        if credit.token != self.token {
            return false;
        }
        let most = self.spent.borrow().saturating_add(MAX_WINDOW_BYTES);
        self.heard.send_modify(|heard| {
            heard.granted_bytes = heard.granted_bytes.max(credit.granted_bytes.min(most));
            heard.at = Instant::now();
        });
        true
    }
}

impl Outlet {
    /// Waits until something may be sent; says how much.
    pub(super) async fn room(&mut self) -> usize {
        let spent = *self.spent.borrow();
        let heard = self.heard.wait_for(|heard| heard.granted_bytes > spent).await.map(|heard| *heard);
        let Ok(heard) = heard else {
            // The handle lives as long as the command is known.
            return std::future::pending().await;
        };
        let room = heard.granted_bytes - spent;
        usize::try_from(room).unwrap_or(usize::MAX)
    }

    /// Sends a piece for which there was room; false when this is more than the node allows.
    pub(super) async fn send(&mut self, frame: Frame) -> bool {
        match &frame {
            Frame::Stdout(bytes) => self.stdout_bytes += bytes.len() as u64,
            Frame::Stderr(bytes) => self.stderr_bytes += bytes.len() as u64,
            Frame::End(_) => {}
        }
        if self.stdout_bytes + self.stderr_bytes > self.max_output_bytes {
            return false;
        }
        self.publish(&frame).await;
        true
    }

    /// How it ended.
    pub(super) fn summary(&self, exit: Exit) -> End {
        End {
            exit,
            stdout_bytes: self.stdout_bytes,
            stderr_bytes: self.stderr_bytes,
            duration_ms: self.started.elapsed().as_secs_f64() * 1e3,
        }
    }

    /// Sends the end.
    pub(super) async fn end(mut self, end: End) {
        self.publish(&Frame::End(end)).await;
    }

    async fn publish(&mut self, frame: &Frame) {
        let message = frame.encode(self.sequence);
        self.sequence += 1;
        self.spent.send_modify(|spent| *spent += frame.cost_bytes());
        // A piece that is lost leaves a gap in the numbers, which the operator sees.
        if let Err(error) = self.bus.client.publish(self.subject.clone(), message).await {
            tracing::warn!(%error, "output not sent");
        }
    }
}

impl Limits {
    /// Resolves when the command must end.
    pub(super) async fn reached(&mut self) -> Exit {
        let deadline = self.deadline;
        let timed_out = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.cancel.cancelled() => Exit::Cancelled {},
            () = self.agent_stops.cancelled() => Exit::AgentStopping {},
            () = timed_out => Exit::TimedOut {},
            () = silence(&mut self.heard) => Exit::OperatorGone {},
        }
    }
}

async fn silence(heard: &mut watch::Receiver<Heard>) {
    loop {
        let last = heard.borrow_and_update().at;
        tokio::select! {
            () = tokio::time::sleep_until((last + OPERATOR_LIMIT).into()) => {
                if heard.borrow().at == last {
                    return;
                }
            }
            changed = heard.changed() => if changed.is_err() {
                return std::future::pending().await;
            },
        }
    }
}
