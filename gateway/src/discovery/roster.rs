//! Who was heard when: the machines that send heartbeats, and whether they still do.
//!
//! Time is this process's monotonic clock at receipt, never the sender's. While the bus itself is away nobody can be
//! heard, so nobody ages.

use shared::bus::{HEARTBEAT_INTERVAL, Heartbeat, NodeId, NodeState};
use shared::hexbytes::Hex;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// A beat may be late by this much before it counts as missed.
const GRACE: Duration = Duration::from_millis(500);
/// Heard no more for longer than this: suspect.
pub(super) const SUSPECT_AFTER: Duration = HEARTBEAT_INTERVAL.saturating_mul(2).saturating_add(GRACE);
/// Heard no more for longer than this: gone.
pub(super) const GONE_AFTER: Duration = HEARTBEAT_INTERVAL.saturating_mul(3).saturating_add(GRACE);
/// Gone for longer than this: forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(3600);
/// Most machines remembered; those gone for longest make room.
pub(super) const MAX_NODES: usize = 4096;
/// Coming back from silence this often makes a machine unsteady, until it has been steady for a while.
const MAX_RETURNS: u32 = 3;
/// Beats in time that make a machine steady again.
const STEADY_BEATS: u32 = 6;
/// Earlier boots of a machine that are remembered, to notice two that speak under one name.
const PAST_BOOTS: usize = 4;

/// Everybody who was heard.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    nodes: BTreeMap<NodeId, Entry>,
    /// The bus is away since then.
    down_since: Option<Instant>,
}

/// A machine.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Its last message.
    pub(crate) beat: Heartbeat,
    /// Whether it is still heard.
    pub(crate) presence: Presence,
    heard: Instant,
    past_boots: VecDeque<Hex<16>>,
    /// Another agent spoke under this name then.
    rival_heard: Option<Instant>,
    returns: u32,
    steady_beats: u32,
}

/// Whether a machine is still heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Presence {
    /// In time.
    Alive,
    /// Two beats were missed, or it comes and goes.
    Suspect,
    /// Three beats were missed, or it said goodbye.
    Gone,
}

/// What became of a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It counts.
    Taken,
    /// Older than what is known.
    Stale,
    /// Of a second agent under the same name; the other one counts.
    Rival,
    /// There is no room for another machine.
    TooMany,
}

impl Roster {
    /// Takes a heartbeat that arrived at `now`.
    pub(crate) fn heard(&mut self, beat: Heartbeat, now: Instant) -> Heard {
        let now = self.clock(now);
        if let Some(entry) = self.nodes.get_mut(&beat.node) {
            return entry.heard(beat, now);
        }
        if self.nodes.len() >= MAX_NODES && !self.make_room() {
            return Heard::TooMany;
        }
        self.nodes.insert(beat.node.clone(), Entry::new(beat, now));
        Heard::Taken
    }

    /// Lets time pass; answers whose presence has changed.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<NodeId> {
        let now = self.clock(now);
        self.nodes.retain(|_, e| e.presence != Presence::Gone || now - e.heard < FORGET_AFTER);
        let changed = self.nodes.iter_mut().filter_map(|(node, entry)| entry.tick(now).then(|| node.clone()));
        changed.collect()
    }

    /// The bus is away; it may have been for `unnoticed` already.
    pub(crate) fn bus_down(&mut self, now: Instant, unnoticed: Duration) {
        if self.down_since.is_none() {
            self.down_since = Some(now.checked_sub(unnoticed).unwrap_or(now));
        }
    }

    /// The bus is back: the time without it does not count.
    pub(crate) fn bus_up(&mut self, now: Instant) {
        if let Some(since) = self.down_since.take() {
            let away = now.saturating_duration_since(since);
            for entry in self.nodes.values_mut() {
                entry.heard = (entry.heard + away).min(now);
            }
        }
    }

    /// Whether the bus is there.
    pub(crate) fn is_bus_up(&self) -> bool {
        self.down_since.is_none()
    }

    /// All machines, with the time since each was heard that counts.
    pub(crate) fn nodes(&self, now: Instant) -> impl Iterator<Item = (&Entry, Duration)> {
        let now = self.clock(now);
        self.nodes.values().map(move |e| (e, now.saturating_duration_since(e.heard)))
    }

    /// One machine.
    pub(crate) fn node(&self, node: &NodeId) -> Option<&Entry> {
        self.nodes.get(node)
    }

    fn clock(&self, now: Instant) -> Instant {
        self.down_since.map_or(now, |since| since.min(now))
    }

    fn make_room(&mut self) -> bool {
        let gone = self.nodes.iter().filter(|(_, e)| e.presence == Presence::Gone);
        let Some(oldest) = gone.min_by_key(|(_, e)| e.heard).map(|(node, _)| node.clone()) else {
            return false;
        };
        self.nodes.remove(&oldest).is_some()
    }
}

impl Entry {
    fn new(beat: Heartbeat, now: Instant) -> Self {
        let presence = presence_of(&beat);
        let (past_boots, rival_heard, returns, steady_beats) = (VecDeque::new(), None, 0, 0);
        Self { beat, presence, heard: now, past_boots, rival_heard, returns, steady_beats }
    }

    /// Two agents speak under this machine's name.
    pub(crate) fn is_duplicate(&self) -> bool {
        self.rival_heard.is_some()
    }

    /// It comes and goes.
    pub(crate) fn is_unsteady(&self) -> bool {
        self.returns >= MAX_RETURNS
    }

    fn heard(&mut self, beat: Heartbeat, now: Instant) -> Heard {
        let silent = now.saturating_duration_since(self.heard);
        if beat.boot_id == self.beat.boot_id {
            if beat.sequence <= self.beat.sequence {
                return Heard::Stale;
            }
        } else if self.past_boots.contains(&beat.boot_id) {
            // A boot that was replaced speaks again, so there are two. Every gateway takes the same one.
            let both_there = self.presence == Presence::Alive && self.beat.state != NodeState::Leaving;
            self.rival_heard = Some(now);
            if both_there && self.beat.boot_id.0 < beat.boot_id.0 {
                return Heard::Rival;
            }
            self.replace_boot();
        } else {
            self.replace_boot();
        }
        let late = silent > SUSPECT_AFTER;
        if late {
            self.returns = self.returns.saturating_add(1);
            self.steady_beats = 0;
        } else {
            self.steady_beats = self.steady_beats.saturating_add(1);
            if self.steady_beats >= STEADY_BEATS {
                self.returns = 0;
            }
        }
        self.beat = beat;
        self.heard = now;
        self.tick(now);
        Heard::Taken
    }

    fn replace_boot(&mut self) {
        self.past_boots.retain(|b| *b != self.beat.boot_id);
        self.past_boots.push_back(self.beat.boot_id);
        if self.past_boots.len() > PAST_BOOTS {
            self.past_boots.pop_front();
        }
    }

    fn tick(&mut self, now: Instant) -> bool {
        let silent = now.saturating_duration_since(self.heard);
        if self.rival_heard.is_some_and(|heard| now.saturating_duration_since(heard) > GONE_AFTER) {
            self.rival_heard = None;
        }
        let by_time = match silent {
            s if s > GONE_AFTER => Presence::Gone,
            s if s > SUSPECT_AFTER => Presence::Suspect,
            _ if self.is_unsteady() => Presence::Suspect,
            _ => Presence::Alive,
        };
        let presence = by_time.max(presence_of(&self.beat));
        let changed = presence != self.presence;
        self.presence = presence;
        changed
    }
}

/// `alive`, `draining`, `suspect`, `leaving`, `gone`.
pub(crate) fn state(entry: &Entry) -> &'static str {
    match (entry.presence, entry.beat.state) {
        (Presence::Gone, NodeState::Leaving) => "leaving",
        (Presence::Gone, _) => "gone",
        (Presence::Suspect, _) => "suspect",
        (Presence::Alive, NodeState::Draining) => "draining",
        (Presence::Alive, _) => "alive",
    }
}

fn presence_of(beat: &Heartbeat) -> Presence {
    match beat.state {
        NodeState::Leaving => Presence::Gone,
        NodeState::Alive | NodeState::Draining => Presence::Alive,
    }
}

#[cfg(test)]
mod tests;
