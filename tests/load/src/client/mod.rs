//! Clients that load a gateway: whole answers at a fixed rate or as fast as they come, and many streams at once.

mod connection;
mod requests;
mod sse;
mod stats;
mod streams;

pub use connection::{Connection, ConnectionError, Target};
pub use requests::{closed_loop, fixed_rate};
pub use sse::{SseEvent, SseParser};
pub use stats::{Quantiles, Report};
pub use streams::{StreamPlan, streams};
