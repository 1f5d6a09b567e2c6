use super::*;
use crate::discovery::testing::beat;
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

/// A roster and its clock.
struct Scene {
    roster: Roster,
    now: Instant,
    sequence: u64,
}

impl Scene {
    fn new() -> Self {
        Self { roster: Roster::default(), now: Instant::now(), sequence: 0 }
    }

    fn pass(&mut self, time: Duration) {
        // In steps, as in life.
        let end = self.now + time;
        while self.now < end {
            self.now = (self.now + Duration::from_millis(250)).min(end);
            self.roster.tick(self.now);
        }
    }

    fn say(&mut self, node: &str, boot: u8) -> Heard {
        self.sequence += 1;
        let beat = Heartbeat { boot_id: Hex([boot; 16]), sequence: self.sequence, ..beat(node) };
        self.roster.heard(beat, self.now)
    }

    fn presence(&self, node: &str) -> Option<Presence> {
        self.roster.node(&NodeId::new(node).unwrap()).map(|e| e.presence)
    }

    fn entry(&self, node: &str) -> &Entry {
        self.roster.node(&NodeId::new(node).unwrap()).unwrap()
    }
}

#[test]
fn a_silent_machine_is_suspect_then_gone_then_forgotten_and_back_at_once() {
    let mut s = Scene::new();
    s.say("a", 1);
    assert_eq!(s.presence("a"), Some(Presence::Alive));
    s.pass(SUSPECT_AFTER);
    assert_eq!(s.presence("a"), Some(Presence::Alive));
    s.pass(SECOND / 4);
    assert_eq!(s.presence("a"), Some(Presence::Suspect));
    s.pass(HEARTBEAT_INTERVAL);
    assert_eq!(s.presence("a"), Some(Presence::Gone));
    s.say("a", 1);
    assert_eq!(s.presence("a"), Some(Presence::Alive));
    s.pass(FORGET_AFTER + SECOND);
    assert_eq!(s.presence("a"), None);
}

#[test]
fn the_bars_hold_whenever_the_machine_dies() {
    // Killed at any time between two beats: suspect within 11 s of it, gone within 16 s.
    for after_beat in [0, 100, 2500, 4999] {
        let mut s = Scene::new();
        s.say("a", 1);
        s.pass(Duration::from_millis(after_beat));
        s.pass(11 * SECOND);
        assert!(s.presence("a") >= Some(Presence::Suspect));
        s.pass(5 * SECOND);
        assert_eq!(s.presence("a"), Some(Presence::Gone));
    }
}

#[test]
fn without_the_bus_nobody_ages() {
    let mut s = Scene::new();
    s.say("a", 1);
    s.pass(4 * SECOND);
    s.roster.bus_down(s.now, Duration::ZERO);
    s.pass(600 * SECOND);
    assert_eq!(s.presence("a"), Some(Presence::Alive));
    s.roster.bus_up(s.now);
    s.pass(6 * SECOND);
    assert_eq!(s.presence("a"), Some(Presence::Alive));
    s.pass(SECOND);
    assert_eq!(s.presence("a"), Some(Presence::Suspect), "4 s before and 7 s after");
}

#[test]
fn a_bus_that_was_away_unnoticed_makes_nobody_suspect_for_long() {
    let mut s = Scene::new();
    s.say("a", 1);
    s.pass(14 * SECOND);
    assert_eq!(s.presence("a"), Some(Presence::Suspect));
    // Only now is it noticed.
    s.roster.bus_down(s.now, 12 * SECOND);
    s.pass(SECOND);
    assert_eq!(s.presence("a"), Some(Presence::Alive));
    s.roster.bus_up(s.now);
    s.pass(8 * SECOND);
    assert_eq!(s.presence("a"), Some(Presence::Alive));
}

#[test]
fn goodbye_is_believed_at_once() {
    let mut s = Scene::new();
    s.say("a", 1);
    let bye = Heartbeat { state: NodeState::Leaving, sequence: 9, boot_id: Hex([1; 16]), ..beat("a") };
    assert_eq!(s.roster.heard(bye, s.now), Heard::Taken);
    assert_eq!(s.presence("a"), Some(Presence::Gone));
    assert_eq!(s.say("a", 2), Heard::Taken);
    assert_eq!(s.presence("a"), Some(Presence::Alive));
    assert!(!s.entry("a").is_duplicate());
}

#[test]
fn old_messages_change_nothing_and_a_restart_starts_over() {
    let mut s = Scene::new();
    s.sequence = 10;
    s.say("a", 1);
    s.sequence = 5;
    assert_eq!(s.say("a", 1), Heard::Stale);
    s.sequence = 0;
    assert_eq!(s.say("a", 2), Heard::Taken);
    assert!(!s.entry("a").is_duplicate());
}

#[test]
fn of_two_agents_under_one_name_all_gateways_take_the_same() {
    for first in [1u8, 2] {
        let mut s = Scene::new();
        let second = 3 - first;
        s.say("a", first);
        assert_eq!(s.say("a", second), Heard::Taken, "it looks like a restart");
        for _ in 0..3 {
            s.pass(SECOND);
            s.say("a", first);
            s.pass(SECOND);
            s.say("a", second);
            assert_eq!(s.entry("a").beat.boot_id, Hex([1; 16]));
            assert!(s.entry("a").is_duplicate());
        }
        // The chosen one dies: the other takes over once that is clear, and nothing is odd any more.
        let mut taken = None;
        for beat in 0..10 {
            s.pass(HEARTBEAT_INTERVAL);
            if s.say("a", 2) == Heard::Taken && taken.is_none() {
                taken = Some(beat);
            }
        }
        assert!(taken.is_some_and(|beat| beat <= 3), "{taken:?}");
        assert_eq!((s.presence("a"), s.entry("a").is_duplicate()), (Some(Presence::Alive), false));
    }
}

#[test]
fn one_that_comes_and_goes_is_suspect_until_it_is_steady() {
    let mut s = Scene::new();
    for _ in 0..MAX_RETURNS {
        s.say("a", 1);
        assert_eq!(s.presence("a"), Some(Presence::Alive));
        s.pass(12 * SECOND);
    }
    s.say("a", 1);
    assert_eq!(s.presence("a"), Some(Presence::Suspect));
    for _ in 0..STEADY_BEATS {
        s.pass(HEARTBEAT_INTERVAL);
        s.say("a", 1);
    }
    assert_eq!(s.presence("a"), Some(Presence::Alive));
}

#[test]
fn the_number_of_machines_is_limited_and_the_gone_make_room() {
    let mut s = Scene::new();
    for i in 0..MAX_NODES {
        assert_eq!(s.say(&format!("n{i}"), 1), Heard::Taken);
    }
    assert_eq!(s.say("one-more", 1), Heard::TooMany);
    s.pass(GONE_AFTER + SECOND);
    assert_eq!(s.say("one-more", 1), Heard::Taken);
    assert_eq!(s.roster.nodes(s.now).count(), MAX_NODES);
}

#[derive(Debug, Clone)]
enum Step {
    Beat(u8, u8),
    Pass(u64),
    Down(u64),
    Up,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0u8..3, 0u8..3).prop_map(|(node, boot)| Step::Beat(node, boot)),
        4 => (0u64..20_000).prop_map(Step::Pass),
        1 => (0u64..20_000).prop_map(Step::Down),
        1 => Just(Step::Up),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    #[test]
    fn whatever_happens_presence_follows_the_age(steps in steps()) {
        let mut s = Scene::new();
        for step in steps {
            match step {
                Step::Beat(node, boot) => { s.say(&format!("n{node}"), boot); }
                Step::Pass(ms) => s.pass(Duration::from_millis(ms)),
                Step::Down(ms) => s.roster.bus_down(s.now, Duration::from_millis(ms)),
                Step::Up => s.roster.bus_up(s.now),
            }
            s.roster.tick(s.now);
            for (entry, age) in s.roster.nodes(s.now) {
                match entry.presence {
                    Presence::Gone => prop_assert!(age > GONE_AFTER),
                    Presence::Suspect => prop_assert!(age > SUSPECT_AFTER && age <= GONE_AFTER || entry.is_unsteady()),
                    Presence::Alive => prop_assert!(age <= SUSPECT_AFTER && !entry.is_unsteady()),
                }
            }
        }
    }
}
