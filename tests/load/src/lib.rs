//! A token source that follows a script, and the clients that load gateways with it.
//!
//! The source has no engine. It answers the same way on two doors: OpenAI's HTTP API, for gateways that forward HTTP,
//! and pd-bridge's control protocol, as a decode worker. A request chooses its own script: `max_tokens` is the number of
//! tokens, `seed` the time between two of them in microseconds. Both fields reach the source through any gateway.
//!
//! Every token's text tells when the source sent it (see [`timecode`]), so a client measures what a token spent on the
//! way, not only the distance between two arrivals.

pub mod client;
pub mod pace;
pub mod process;
pub mod source;
pub mod timecode;
