//! Processes that must not get away.
//!
//! A command runs inside a second copy of this program ([`contain`]): it has its own session, is the reaper of
//! everything below it, has lost its privileges and carries the limits, before it starts what was asked for. Whoever
//! leaves the process group or the session is still its descendant; whoever survives it becomes a child of the agent,
//! which knows its own ([`Nursery`]) and ends all others.

mod container;
mod containers;
mod nursery;
mod tree;

pub(crate) use container::{CONTAIN, Containment, contain};
pub(crate) use containers::Containers;
pub(crate) use nursery::Nursery;
pub(crate) use tree::{end_descendants, signal_descendants};
