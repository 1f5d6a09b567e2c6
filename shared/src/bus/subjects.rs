//! Every subject on the bus.
//!
//! | role | publishes | subscribes |
//! |---|---|---|
//! | agent | `heartbeat.<own>`, `out.<own>.>`, `audit.<own>`, replies to requests | `cmd.<own>`, `credit.<own>.*` |
//! | gateway | `gateway.<id>` | `heartbeat.*` |
//! | operator | `cmd.*`, `credit.*.*` | `heartbeat.*`, `out.*.*`, `audit.*`, `gateway.*` |
//! | viewer | nothing | `heartbeat.*`, `audit.*`, `gateway.*` |
//! | worker | `worker.<node>.>` | nothing |
//!
//! All below [`PREFIX`]. An agent answers requests, so its account entry needs `allow_responses`; each role
//! subscribes to its own reply inboxes only, [`inbox_prefix`] and deeper.

use super::{CommandId, NodeId};
use crate::hexbytes::Hex;

/// What every subject starts with; the number changes when messages do.
pub const PREFIX: &str = "pd.v1";

/// Where an agent says how its machine is.
#[must_use]
pub fn heartbeat(node: &NodeId) -> String {
    format!("{PREFIX}.heartbeat.{node}")
}

/// All heartbeats.
#[must_use]
pub fn heartbeats() -> String {
    format!("{PREFIX}.heartbeat.*")
}

/// Where an agent takes signed commands, as requests.
#[must_use]
pub fn commands(node: &NodeId) -> String {
    format!("{PREFIX}.cmd.{node}")
}

/// Where the output of one command goes.
#[must_use]
pub fn output(node: &NodeId, command: CommandId) -> String {
    format!("{PREFIX}.out.{node}.{command}")
}

/// Where the operator of one command grants it more output.
#[must_use]
pub fn credit(node: &NodeId, command: CommandId) -> String {
    format!("{PREFIX}.credit.{node}.{command}")
}

/// All credits for one agent.
#[must_use]
pub fn credits(node: &NodeId) -> String {
    format!("{PREFIX}.credit.{node}.*")
}

/// Where an agent says what it was asked, accepted or refused.
#[must_use]
pub fn audit(node: &NodeId) -> String {
    format!("{PREFIX}.audit.{node}")
}

/// All audit lines.
#[must_use]
pub fn audits() -> String {
    format!("{PREFIX}.audit.*")
}

/// Where a gateway says how it is.
#[must_use]
pub fn gateway(id: &NodeId) -> String {
    format!("{PREFIX}.gateway.{id}")
}

/// All gateways.
#[must_use]
pub fn gateways() -> String {
    format!("{PREFIX}.gateway.*")
}

/// Where replies to a role's requests arrive: this and one or more tokens.
#[must_use]
pub fn inbox_prefix(role: &str) -> String {
    format!("_INBOX.pd.{role}")
}

/// The node that a heartbeat, audit or gateway subject names.
#[must_use]
pub fn node_of(subject: &str) -> Option<NodeId> {
    NodeId::new(subject.strip_prefix(PREFIX)?.strip_prefix('.')?.split('.').nth(1)?).ok()
}

/// The command that an output or credit subject names.
#[must_use]
pub fn command_of(subject: &str) -> Option<CommandId> {
    let id = subject.strip_prefix(PREFIX)?.strip_prefix('.')?.split('.').nth(2)?;
    let mut bytes = [0; 16];
    hex::decode_to_slice(id, &mut bytes).ok()?;
    Some(Hex(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_can_be_read_back() {
        let (node, id) = (NodeId::new("spark-1").unwrap(), Hex([0xab; 16]));
        for subject in [heartbeat(&node), commands(&node), output(&node, id), credit(&node, id), audit(&node)]
        {
            assert_eq!(node_of(&subject).as_ref(), Some(&node), "{subject}");
        }
        assert_eq!(command_of(&credit(&node, id)), Some(id));
        assert_eq!(command_of(&output(&node, id)), Some(id));
        for bad in
            ["", "pd.v1", "pd.v1.heartbeat", "pd.v2.heartbeat.a", "pd.v1.heartbeat.A", "x.pd.v1.heartbeat.a"]
        {
            assert_eq!(node_of(bad), None, "{bad}");
        }
        assert_eq!(command_of("pd.v1.credit.a.zz"), None);
    }
}
