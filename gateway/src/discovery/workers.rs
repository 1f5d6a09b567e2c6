//! Which workers follow from a machine's last heartbeat.

use super::roster::{Entry, Presence};
use crate::fleet::{Member, Reported, Standing};
use shared::bus::{NodeId, NodeState, WorkerBeat};

/// Name of a worker in the fleet; it stays when the worker moves to another port.
pub(crate) fn member_id(node: &NodeId, worker: &WorkerBeat) -> String {
    format!("{node}/{}", worker.name)
}

/// The machine's workers as the fleet wants to know them. Two of one role under one name can't be told apart; the
/// first counts.
pub(super) fn members(entry: &Entry) -> Vec<Member> {
    let beat = &entry.beat;
    let mut members: Vec<Member> = Vec::with_capacity(beat.workers.len());
    for worker in &beat.workers {
        let id = member_id(&beat.node, worker);
        if members.iter().any(|m| (m.role, &m.id) == (worker.role, &id)) {
            continue;
        }
        members.push(Member {
            role: worker.role,
            id,
            addr: Some(worker.control_addr.clone()),
            standing: standing(entry, worker),
            reported: Some(Reported {
                requests: worker.queue,
                tokens: worker.queue_tokens,
                rates: worker.rates,
            }),
        });
    }
    members
}

fn standing(entry: &Entry, worker: &WorkerBeat) -> Standing {
    if entry.beat.state == NodeState::Draining {
        return Standing::Draining;
    }
    match entry.presence {
        Presence::Gone => Standing::Lost,
        Presence::Suspect => Standing::Suspect,
        // Its own machine gets no answer from it.
        Presence::Alive if !worker.reachable => Standing::Suspect,
        Presence::Alive => Standing::Alive,
    }
}

#[cfg(test)]
mod tests {
    use super::super::roster::Roster;
    use super::super::testing::{beat, worker};
    use super::*;
    use shared::bus::Heartbeat;
    use shared::control::Role;
    use std::time::{Duration, Instant};

    #[test]
    fn standing_follows_the_machine_and_its_own_word() {
        let workers = vec![
            worker(Role::Decode, "w", "h:1"),
            worker(Role::Decode, "w", "h:2"),
            worker(Role::Prefill, "w", "h:3"),
            WorkerBeat { reachable: false, ..worker(Role::Decode, "hung", "h:4") },
        ];
        let now = Instant::now();
        let mut roster = Roster::default();
        roster.heard(Heartbeat { workers, ..beat("a") }, now);
        let node = NodeId::new("a").unwrap();
        let is = |roster: &Roster| -> Vec<_> {
            let members = members(roster.node(&node).unwrap());
            members.into_iter().map(|m| (m.id, m.addr.unwrap(), m.standing)).collect()
        };
        let member = |id: &str, addr: &str, standing| (id.to_owned(), addr.to_owned(), standing);
        let alive = [
            member("a/w", "h:1", Standing::Alive),
            member("a/w", "h:3", Standing::Alive),
            member("a/hung", "h:4", Standing::Suspect),
        ];
        assert_eq!(is(&roster), alive);
        roster.tick(now + Duration::from_secs(11));
        assert!(is(&roster).iter().all(|(_, _, s)| *s == Standing::Suspect));
        roster.tick(now + Duration::from_secs(16));
        assert!(is(&roster).iter().all(|(_, _, s)| *s == Standing::Lost));
        let draining =
            Heartbeat { state: NodeState::Draining, sequence: 2, ..roster.node(&node).unwrap().beat.clone() };
        roster.heard(draining, now + Duration::from_secs(17));
        assert!(is(&roster).iter().all(|(_, _, s)| *s == Standing::Draining));
    }
}
