//! Hears the heartbeats and tells the fleet what follows from them.

use super::directory::Directory;
use super::intake;
use super::roster::{Heard, Presence};
use super::workers::members;
use crate::fleet::{Change, Discovery, Member};
use futures_util::StreamExt as _;
use shared::bus::{Bus, NodeId, PING_INTERVAL, subjects};
use shared::control::Role;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// How often silence is looked at.
const TICK: Duration = Duration::from_millis(250);
/// A broken connection shows after so many pings without an answer at the latest; until then nobody was heard either.
const UNNOTICED: Duration = PING_INTERVAL.saturating_mul(3);
/// Pause before a subscription that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Changes that the fleet may be behind.
const BACKLOG: usize = 1024;

/// Starts listening; ends with `shutdown`. While the bus is away, everything stays as it was.
pub(crate) fn listen(bus: Bus, shutdown: CancellationToken) -> (Discovery, Arc<Directory>) {
    let (out, discovery) = mpsc::channel(BACKLOG);
    let directory = Arc::new(Directory::default());
    let listener = Listener { directory: directory.clone(), told: HashMap::new(), out };
    tokio::spawn(async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = listener.run(bus) => {}
        }
    });
    (discovery, directory)
}

struct Listener {
    directory: Arc<Directory>,
    /// What the fleet knows, by machine.
    told: HashMap<NodeId, Vec<Member>>,
    out: mpsc::Sender<Change>,
}

impl Listener {
    async fn run(mut self, bus: Bus) {
        while !self.out.is_closed() {
            self.follow(&bus).await;
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn follow(&mut self, bus: &Bus) {
        let mut messages = match bus.client.subscribe(subjects::heartbeats()).await {
            Ok(messages) => messages,
            Err(error) => {
                tracing::warn!(%error, "heartbeats can't be subscribed to");
                return;
            }
        };
        let mut connects = bus.connects();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return };
                    self.hear(message.subject.as_str(), &message.payload).await;
                }
                _ = tick.tick() => {
                    let again = connects.has_changed().unwrap_or(false);
                    connects.mark_unchanged();
                    self.tick(bus.is_connected(), again).await;
                }
            }
        }
    }

    async fn hear(&mut self, subject: &str, payload: &[u8]) {
        let beat = match intake::read(subject, payload) {
            Ok(beat) => beat,
            Err(error) => {
                self.directory.tally.malformed();
                tracing::debug!(%error, subject, "heartbeat ignored");
                return;
            }
        };
        let node = beat.node.clone();
        let heard = {
            let mut roster = self.directory.roster.lock();
            let known = roster.node(&node).map(|e| (e.presence, e.is_duplicate()));
            let heard = roster.heard(beat, Instant::now());
            let now = roster.node(&node).map(|e| (e.presence, e.is_duplicate()));
            drop(roster);
            say(&node, known, now);
            heard
        };
        self.directory.tally.heard(heard);
        if heard == Heard::Taken {
            self.tell(&node).await;
        }
    }

    async fn tick(&mut self, connected: bool, reconnected: bool) {
        let now = Instant::now();
        let changed = {
            let mut roster = self.directory.roster.lock();
            if !connected || reconnected {
                roster.bus_down(now, UNNOTICED);
            }
            if connected {
                roster.bus_up(now);
            }
            let changed = roster.tick(now);
            for node in &changed {
                say(node, None, roster.node(node).map(|e| (e.presence, e.is_duplicate())));
            }
            changed
        };
        for node in changed {
            self.tell(&node).await;
        }
        let roster = self.directory.roster.lock();
        // The fleet itself drops the workers of machines that are forgotten.
        self.told.retain(|node, _| roster.node(node).is_some());
    }

    /// Tells the fleet what is new about a machine's workers.
    async fn tell(&mut self, node: &NodeId) {
        let members = self.directory.roster.lock().node(node).map(members).unwrap_or_default();
        let told = self.told.insert(node.clone(), members.clone()).unwrap_or_default();
        let is = |m: &Member, role: Role, id: &str| m.role == role && m.id == id;
        for gone in told.iter().filter(|t| !members.iter().any(|m| is(m, t.role, &t.id))) {
            // Nobody listening means that the gateway ends.
            let _ = self.out.send(Change::Absent(gone.role, gone.id.clone())).await;
        }
        for member in members {
            if !told.contains(&member) {
                let _ = self.out.send(Change::Present(member)).await;
            }
        }
    }
}

/// Logs what has become of a machine.
fn say(node: &NodeId, before: Option<(Presence, bool)>, now: Option<(Presence, bool)>) {
    let Some((presence, duplicate)) = now else { return };
    if before.map(|b| b.0) != Some(presence) {
        match presence {
            Presence::Alive => tracing::info!(%node, "node is alive"),
            Presence::Suspect => tracing::warn!(%node, "node is suspect: heartbeats are missing"),
            Presence::Gone => tracing::warn!(%node, "node is gone"),
        }
    }
    if duplicate && !before.is_some_and(|b| b.1) {
        tracing::error!(%node, "two agents speak under this name; give one of them another");
    }
}
