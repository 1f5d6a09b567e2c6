//! Takes messages from the bus and decides what becomes of them.

use super::allow::ExecRule;
use super::audit::Audit;
use super::memory::{Memory, NotTaken};
use super::rules::Rules;
use super::session::{self, Handle, Limits, Outlet};
use super::{ask, exec, tail};
use crate::logs::LogRing;
use crate::process::{Containers, Nursery};
use crate::state::State;
use async_nats::Message;
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use shared::bus::{
    Action, Bus, CommandId, Credit, Exit, NodeId, NotFresh, Refusal, RefusalCode, Reply, SignedCommand,
    UnsignedCommand, subjects, unix_now_ms,
};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A question may take as long as a long answer does.
const MAX_ASK_TIME: Duration = Duration::from_secs(600);
/// Following a log ends after this time at the latest.
const MAX_LOGS_TIME: Duration = Duration::from_secs(24 * 3600);
/// Replies go to inboxes only: whoever asks must not make the agent speak elsewhere.
const INBOX: &str = "_INBOX.";

/// Everything that commands need; clones share it.
#[derive(Clone)]
pub(crate) struct Intake(Arc<Inner>);

struct Inner {
    node: NodeId,
    bus: Bus,
    rules: Option<Rules>,
    memory: Mutex<Option<Memory>>,
    audit: Audit,
    running: Mutex<HashMap<CommandId, Handle>>,
    tasks: TaskTracker,
    containers: Option<Containers>,
    state: State,
    ring: LogRing,
    stop: CancellationToken,
}

/// Why commands can't be taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IntakeError {
    /// The folder for the audit and the replay memory can't be used.
    #[error("{dir}: {source}")]
    StateDir {
        /// The folder.
        dir: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The bus refuses the subscription.
    #[error("bus: {0}")]
    Bus(#[from] async_nats::SubscribeError),
}

impl Intake {
    /// Opens the audit and the memory of earlier commands in `dir`, which was made just now if it `is_new`.
    ///
    /// # Errors
    /// [`IntakeError::StateDir`].
    #[allow(clippy::too_many_arguments, reason = "the parts that only the program's start knows")]
    pub(crate) fn open(
        node: NodeId,
        bus: Bus,
        rules: Option<Rules>,
        (dir, is_new): (&Path, bool),
        nursery: Nursery,
        state: State,
        ring: LogRing,
        stop: CancellationToken,
    ) -> Result<Self, IntakeError> {
        let bad = |source| IntakeError::StateDir { dir: dir.to_owned(), source };
        let audit = Audit::open(dir, node.clone(), bus.clone()).map_err(bad)?;
        let tolerance_ms =
            rules.as_ref().map(|r| u64::try_from(r.clock_tolerance.as_millis()).unwrap_or(u64::MAX));
        let memory =
            tolerance_ms.map(|t| Memory::open(dir, is_new, t, unix_now_ms())).transpose().map_err(bad)?;
        let memory = Mutex::new(memory);
        let containers = rules.as_ref().map(|rules| exec::containers(rules, nursery));
        let (running, tasks) = (Mutex::default(), TaskTracker::new());
        Ok(Self(Arc::new(Inner {
            node,
            bus,
            rules,
            memory,
            audit,
            running,
            tasks,
            containers,
            state,
            ring,
            stop,
        })))
    }

    /// Takes commands and credits until the agent stops.
    ///
    /// # Errors
    /// [`IntakeError::Bus`].
    pub(crate) async fn run(self) -> Result<(), IntakeError> {
        let Inner { node, bus, stop, rules, containers, .. } = &*self.0;
        if let (Some(rules), Some(containers)) = (rules, containers)
            && !matches!(rules.exec, ExecRule::Off)
        {
            containers.prepare();
        }
        let mut commands = bus.client.subscribe(subjects::commands(node)).await?;
        let mut credits = bus.client.subscribe(subjects::credits(node)).await?;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                Some(message) = credits.next() => self.credit(&message),
                Some(message) = commands.next() => self.command(message).await,
                else => return Ok(()),
            }
        }
    }

    /// Waits until nothing runs any more.
    pub(crate) async fn idle(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    fn credit(&self, message: &Message) {
        let Some(id) = subjects::command_of(&message.subject) else { return };
        let running = self.0.running.lock();
        // One that comes after the end is nothing unusual.
        let Some(handle) = running.get(&id) else { return };
        let taken =
            serde_json::from_slice::<Credit>(&message.payload).is_ok_and(|credit| handle.credit(&credit));
        drop(running);
        if !taken {
            let refusal = Refusal::new(
                RefusalCode::BadSignature,
                format!("a credit for command {id} without its token"),
            );
            self.refuse(None, None, refusal);
        }
    }

    async fn command(&self, message: Message) {
        let reply = match self.take(&message.payload) {
            Ok(()) => Reply::Accepted {},
            Err(refusal) => Reply::Refused(refusal),
        };
        let Some(inbox) = message.reply.filter(|inbox| inbox.starts_with(INBOX)) else { return };
        if let Err(error) = self.0.bus.client.publish(inbox, reply.encode()).await {
            tracing::warn!(%error, "reply not sent");
        }
    }

    fn take(&self, payload: &[u8]) -> Result<(), Refusal> {
        let Inner { rules, audit, node, .. } = &*self.0;
        let Some(rules) = rules else {
            let refusal = Refusal::new(RefusalCode::Disabled, "this node's configuration allows no commands");
            return Err(self.refuse(SignedCommand::decode(payload).ok().as_ref(), None, refusal));
        };
        let signed = SignedCommand::decode(payload).map_err(|r| self.refuse(None, None, r))?;
        let keys = rules.operators.iter().map(|(_, key)| key);
        let command = signed.verify(node, keys).map_err(|r| self.refuse(Some(&signed), None, r))?;
        let refuse = |refusal| self.refuse(Some(&signed), Some(&command), refusal);
        self.is_fresh(&command).map_err(refuse)?;
        let task = self.prepare(rules, &signed, &command).map_err(refuse)?;
        if let Err(error) = audit.accepted(rules, &signed, &command) {
            return Err(refuse(Refusal::new(RefusalCode::Failed, format!("can't be written down: {error}"))));
        }
        match task {
            Task::Done => Ok(()),
            Task::Now(work) => work().map_err(refuse),
            Task::Start(work) => {
                self.start(work, signed, command);
                Ok(())
            }
        }
    }

    /// Writes it down.
    fn refuse(
        &self,
        signed: Option<&SignedCommand>,
        command: Option<&UnsignedCommand>,
        refusal: Refusal,
    ) -> Refusal {
        self.0.audit.refused(self.0.rules.as_ref(), signed, command, &refusal);
        refusal
    }

    fn is_fresh(&self, command: &UnsignedCommand) -> Result<(), Refusal> {
        let mut memory = self.0.memory.lock();
        let Some(memory) = memory.as_mut() else {
            return Err(Refusal::new(RefusalCode::Disabled, "this node takes no commands"));
        };
        memory.take(unix_now_ms(), command.issued_at_ms, command.nonce).map_err(|error| {
            let code = match &error {
                NotTaken::NotFresh(NotFresh::FromTheFuture(_)) => RefusalCode::FromTheFuture,
                NotTaken::NotFresh(NotFresh::Replayed) => RefusalCode::Replayed,
                NotTaken::NotFresh(NotFresh::Full) => RefusalCode::Busy,
                NotTaken::NotFresh(_) => RefusalCode::Stale,
                NotTaken::Io(_) => RefusalCode::Failed,
            };
            Refusal::new(code, error)
        })
    }

    /// Decides without doing anything yet.
    fn prepare(
        &self,
        rules: &Rules,
        signed: &SignedCommand,
        command: &UnsignedCommand,
    ) -> Result<Task, Refusal> {
        let disabled =
            |what: &str| Refusal::new(RefusalCode::Disabled, format!("this node does not allow {what}"));
        let failed = |e: std::io::Error| Refusal::new(RefusalCode::Failed, e);
        // A second one would take over output, credits and cancels of the first.
        if self.0.running.lock().contains_key(&command.id) {
            return Err(Refusal::new(RefusalCode::Replayed, "a command of this id runs already"));
        }
        match &command.action {
            Action::Drain {} if rules.drain => {
                let state = self.0.state.clone();
                Ok(Task::Now(Box::new(move || state.drain().map_err(failed))))
            }
            Action::Resume {} if rules.drain => {
                let state = self.0.state.clone();
                Ok(Task::Now(Box::new(move || state.resume().map_err(failed))))
            }
            Action::Drain {} | Action::Resume {} => Err(disabled("to drain it")),
            Action::Cancel { command } => {
                let running = self.0.running.lock();
                let handle = running.get(command).filter(|handle| handle.operator == signed.operator);
                let handle = handle
                    .ok_or_else(|| Refusal::new(RefusalCode::NotRunning, "no such command of yours runs"))?;
                handle.cancel.cancel();
                Ok(Task::Done)
            }
            Action::Exec(spec) => {
                self.has_room(rules)?;
                let approved = rules.exec.approve(&spec.argv, &rules.path)?;
                let limit = Duration::from_millis(spec.timeout_ms).min(rules.limits.max_timeout);
                Ok(Task::Start(Work { window_bytes: spec.window_bytes, limit, kind: Kind::Exec(approved) }))
            }
            Action::Logs(spec) if rules.logs => {
                self.has_room(rules)?;
                Ok(Task::Start(Work {
                    window_bytes: spec.window_bytes,
                    limit: MAX_LOGS_TIME,
                    kind: Kind::Logs(spec.clone()),
                }))
            }
            Action::Logs(_) => Err(disabled("to read its log")),
            Action::Ask(spec) => {
                let endpoint = rules.ask.clone().ok_or_else(|| disabled("questions"))?;
                ask::approve(spec).map_err(|e| Refusal::new(RefusalCode::NotAllowed, e))?;
                self.has_room(rules)?;
                let limit = Duration::from_millis(spec.timeout_ms).min(MAX_ASK_TIME);
                Ok(Task::Start(Work {
                    window_bytes: spec.window_bytes,
                    limit,
                    kind: Kind::Ask(endpoint, spec.clone()),
                }))
            }
            _ => Err(Refusal::new(RefusalCode::Disabled, "this agent doesn't know this kind of command")),
        }
    }

    fn has_room(&self, rules: &Rules) -> Result<(), Refusal> {
        let running = self.0.running.lock().len();
        if running >= rules.limits.max_concurrent {
            return Err(Refusal::new(RefusalCode::Busy, format!("{running} commands run already")));
        }
        Ok(())
    }

    fn start(&self, work: Work, signed: SignedCommand, command: UnsignedCommand) {
        let Inner { bus, node, stop, rules, .. } = &*self.0;
        let most = rules.as_ref().map_or(0, |rules| rules.limits.max_output_bytes);
        let owner = (signed.operator.clone(), command.nonce);
        let (handle, outlet, mut limits) =
            session::open(bus.clone(), node, command.id, owner, work.window_bytes, most, stop.clone());
        limits.deadline = Some(Instant::now() + work.limit);
        self.0.running.lock().insert(command.id, handle);
        let intake = self.clone();
        self.0.tasks.spawn(async move {
            let (outlet, exit) = intake.work(work.kind, outlet, limits).await;
            let end = outlet.summary(exit);
            // Whoever hears of the end finds it written down, and room for the next command.
            if let Some(rules) = &intake.0.rules {
                intake.0.audit.ended(rules, &signed, &command, &end);
            }
            intake.0.running.lock().remove(&command.id);
            outlet.end(end).await;
        });
    }

    async fn work(&self, kind: Kind, mut outlet: Outlet, mut limits: Limits) -> (Outlet, Exit) {
        let Inner { rules, containers, ring, .. } = &*self.0;
        let exit = match (kind, rules.as_ref().zip(containers.as_ref())) {
            (Kind::Exec(approved), Some((rules, containers))) => {
                exec::run(rules, containers, approved, &mut outlet, &mut limits).await
            }
            (Kind::Logs(spec), _) => tokio::select! {
                exit = tail::run(ring, &spec, &mut outlet) => exit,
                exit = limits.reached() => exit,
            },
            (Kind::Ask(endpoint, spec), _) => tokio::select! {
                exit = ask::run(&endpoint, &spec, &mut outlet) => exit,
                exit = limits.reached() => exit,
            },
            (Kind::Exec(_), None) => Exit::Failed { message: "commands are off".to_owned() },
        };
        (outlet, exit)
    }
}

/// What a believed command comes to.
enum Task {
    /// It is done.
    Done,
    /// Something quick.
    Now(Box<dyn FnOnce() -> Result<(), Refusal> + Send>),
    /// Something with output.
    Start(Work),
}

struct Work {
    window_bytes: u64,
    limit: Duration,
    kind: Kind,
}

enum Kind {
    Exec(super::allow::Approved),
    Logs(shared::bus::LogsSpec),
    Ask(ask::Endpoint, shared::bus::AskSpec),
}
