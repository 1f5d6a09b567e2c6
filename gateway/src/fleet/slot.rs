//! One worker's place in the fleet.

use super::link::Link;
use super::members::{Member, Standing};
use super::node::Node;
use crate::planner::Tier;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A worker: its connection and what its source says of it. Dropping it ends the connection as soon as no request
/// uses it any more.
pub(super) struct Slot<Req, Ev> {
    pub(super) node: Arc<Node<Req, Ev>>,
    addr: watch::Sender<Option<String>>,
    member: Mutex<Member>,
    _stop: DropGuard,
}

impl<Req, Ev> Slot<Req, Ev>
where
    Req: Serialize + Send + Sync + 'static,
    Ev: DeserializeOwned + Send + 'static,
{
    /// A place for a member; `start` makes the node that follows the address until the token is cancelled.
    pub(super) fn new(
        member: Member,
        shutdown: &CancellationToken,
        start: impl FnOnce(watch::Receiver<Option<String>>, CancellationToken) -> Arc<Node<Req, Ev>>,
    ) -> Self {
        let (addr, watched) = watch::channel(member.addr.clone());
        let stop = shutdown.child_token();
        let node = start(watched, stop.clone());
        Self { node, addr, member: Mutex::new(member), _stop: stop.drop_guard() }
    }

    /// Takes news of the worker. Answers whether anything but figures has changed.
    pub(super) fn update(&self, new: Member) -> bool {
        self.addr.send_if_modified(|addr| {
            let moved = *addr != new.addr;
            addr.clone_from(&new.addr);
            moved
        });
        if let (Some(reported), Some(link)) = (new.reported, self.node.link()) {
            link.learn(reported.rates);
            let tokens = (reported.tokens > 0 || reported.requests == 0).then_some(reported.tokens);
            link.load.observe(u64::from(reported.requests), tokens);
        }
        let mut member = self.member.lock();
        let changed = (&member.addr, member.standing) != (&new.addr, new.standing);
        *member = new;
        changed
    }

    /// The source's last word.
    pub(super) fn member(&self) -> Member {
        self.member.lock().clone()
    }

    /// How far it can be counted on for new requests; `None`: not at all.
    pub(super) fn tier(&self) -> Option<Tier> {
        match self.member.lock().standing {
            Standing::Alive => Some(Tier::Alive),
            Standing::Suspect => Some(Tier::Suspect),
            Standing::Lost => Some(Tier::Lost),
            Standing::Draining => None,
        }
    }

    /// Its machine is gone, and it has not been reached for a while.
    pub(super) fn is_lost_for(&self, limit: Duration) -> bool {
        self.member.lock().standing == Standing::Lost && self.node.unlinked_for().is_some_and(|t| t > limit)
    }

    /// The connection, if there is one and new requests may use it.
    pub(super) fn usable(&self) -> Option<(Tier, Arc<Link<Req, Ev>>)> {
        Some((self.tier()?, self.node.link()?))
    }
}
