//! Support for the end-to-end tests: real processes, scripted workers on the real wire, HTTP and SSE clients.
//!
//! The tests under `tests/tests` start the release binaries, so `cargo build --release` comes first
//! (`make test` does both).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "everything here runs inside a test, which fails by panicking"
)]

pub mod agents;
pub mod attack;
pub mod browser;
pub mod bulk;
pub mod clients;
pub mod collector;
pub mod decoder;
pub mod fakes;
pub mod golden;
pub mod http;
pub mod lab;
pub mod nats;
pub mod netns;
pub mod paths;
pub mod process;
pub mod prometheus;
pub mod raw;
pub mod scene;
pub mod schemas;
pub mod sim_agents;
pub mod stack;
pub mod tiny;
pub mod wait;
