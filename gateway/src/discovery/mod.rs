//! Finding the fleet over the bus: who is heard ([`roster`]), which workers follow from that ([`workers`]), the
//! connection itself ([`listen`]), and what this gateway says of itself ([`announce`]).

mod announce;
mod directory;
mod intake;
mod listen;
mod metrics;
mod roster;
#[cfg(test)]
mod testing;
mod workers;

pub(crate) use announce::announce;
pub(crate) use directory::Directory;
pub(crate) use listen::listen;
pub(crate) use metrics::FleetMetrics;
pub(crate) use roster::{Entry, Presence, state};
pub(crate) use workers::member_id;
