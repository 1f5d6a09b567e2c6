//! What is going on right now, for people who watch: requests with their stages, recent verdicts, nodes.
//!
//! - [`Live`]: the table that requests write to and viewers read from
//! - [`Watched`]: one request's handle on it
//! - [`socket`]: `GET /v1/bridge/events`, a WebSocket that sends what has changed
//! - [`page`]: `GET /`, the page that shows it

mod hub;
pub(crate) mod page;
mod record;
pub(crate) mod session;
pub(crate) mod socket;

pub(crate) use hub::{Live, Totals, Watched};
pub(crate) use record::Stage;
