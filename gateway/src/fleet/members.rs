//! Who is in the fleet: a stream of changes, from whatever source.

use serde::Serialize;
use shared::control::{Rates, Role};
use std::collections::BTreeSet;
use tokio::sync::{mpsc, watch};

/// Changes that a source may be ahead of the fleet.
const BACKLOG: usize = 1024;

/// Where a fleet learns of its members. When the sender is gone, the fleet stays as it is.
pub(crate) type Discovery = mpsc::Receiver<Change>;

/// News of one worker.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Change {
    /// It is new, or something about it has changed.
    Present(Member),
    /// It is no longer part of the fleet. Its running requests end by themselves.
    Absent(Role, String),
}

/// A worker as its source describes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Member {
    /// What it does.
    pub(crate) role: Role,
    /// Name that stays when the worker moves to another port; unique among those of its role.
    pub(crate) id: String,
    /// Where it listens; `None` while it is not running.
    pub(crate) addr: Option<String>,
    /// How far it can be counted on.
    pub(crate) standing: Standing,
    /// What its machine says of it.
    pub(crate) reported: Option<Reported>,
}

/// Whether new requests go to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Standing {
    /// Yes.
    Alive,
    /// Only if no other is there, and without a bridge: heartbeats are missing.
    Suspect,
    /// The machine's heartbeats have ended. As long as the worker's own connection lives it is better than nothing.
    Lost,
    /// No; what runs may finish.
    Draining,
}

/// A worker's figures from outside its own connection.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Reported {
    /// Requests in any state, everybody's.
    pub(crate) requests: u32,
    /// Prefill workers: prompt tokens of those; 0 where unknown.
    pub(crate) tokens: u64,
    /// Speeds; 0 where unknown.
    pub(crate) rates: Rates,
}

impl Member {
    /// A worker that is simply there.
    pub(crate) fn fixed(role: Role, addr: String) -> Self {
        Self { role, id: addr.clone(), addr: Some(addr), standing: Standing::Alive, reported: None }
    }
}

/// A fleet that a settings file names. It never changes.
pub(crate) fn fixed(decode: &[String], prefill: &[String]) -> Discovery {
    let named = |role, addrs: &[String]| {
        let unique: BTreeSet<&String> = addrs.iter().collect();
        unique.into_iter().map(|a| Change::Present(Member::fixed(role, a.clone()))).collect::<Vec<_>>()
    };
    let changes = [named(Role::Decode, decode), named(Role::Prefill, prefill)].concat();
    let (tx, rx) = mpsc::channel(changes.len().max(1));
    for change in changes {
        // There is room for all of them.
        let _ = tx.try_send(change);
    }
    rx
}

/// What two sources name. What is there already goes at once, so that it is known before anything starts.
pub(crate) fn both(a: Discovery, b: Discovery) -> Discovery {
    let (tx, rx) = mpsc::channel(BACKLOG);
    for mut from in [a, b] {
        while let Ok(change) = from.try_recv() {
            let _ = tx.try_send(change);
        }
        let tx = tx.clone();
        tokio::spawn(async move {
            while let Some(change) = from.recv().await {
                if tx.send(change).await.is_err() {
                    return;
                }
            }
        });
    }
    rx
}

/// Workers that a supervisor starts and restarts here, each under a name.
pub(crate) fn supervised(workers: Vec<(Role, &'static str, watch::Receiver<Option<String>>)>) -> Discovery {
    let (tx, rx) = mpsc::channel(BACKLOG);
    for (role, name, mut address) in workers {
        let tx = tx.clone();
        let member = move |addr| {
            let (id, standing) = (name.to_owned(), Standing::Alive);
            Change::Present(Member { role, id, addr, standing, reported: None })
        };
        let now = address.borrow_and_update().clone();
        let _ = tx.try_send(member(now));
        tokio::spawn(async move {
            while address.changed().await.is_ok() {
                let addr = address.borrow_and_update().clone();
                if tx.send(member(addr)).await.is_err() {
                    return;
                }
            }
        });
    }
    rx
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_fixed_fleet_is_told_at_once_and_for_good() {
        let mut d = fixed(&["a:1".into(), "b:1".into(), "a:1".into()], &["c:1".into()]);
        let mut ids = vec![];
        while let Some(Change::Present(member)) = d.recv().await {
            assert_eq!(member.addr.as_deref(), Some(member.id.as_str()));
            ids.push((member.role, member.id));
        }
        let is = |role, id: &str| (role, id.to_owned());
        assert_eq!(ids, [is(Role::Decode, "a:1"), is(Role::Decode, "b:1"), is(Role::Prefill, "c:1")]);
    }

    #[tokio::test]
    async fn a_supervised_worker_keeps_its_name_when_it_moves() {
        let (address, watched) = watch::channel(None);
        let own = supervised(vec![(Role::Decode, "decode", watched)]);
        let mut d = both(fixed(&[], &["p:1".into()]), own);
        let mut next = async || match d.recv().await {
            Some(Change::Present(m)) => (m.id, m.addr),
            other => panic!("{other:?}"),
        };
        assert_eq!(next().await, ("p:1".into(), Some("p:1".into())));
        assert_eq!(next().await, ("decode".into(), None));
        address.send_replace(Some("127.0.0.1:7".into()));
        assert_eq!(next().await, ("decode".into(), Some("127.0.0.1:7".into())));
    }
}
