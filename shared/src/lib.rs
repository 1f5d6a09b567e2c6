//! What two or more parts of pd-bridge need.
//!
//! - [`layout`], [`keys`]: what a decoder's cache is, and how its blocks are named
//! - [`angles`]: cosines and sines of rotary angles to the last bit
//! - [`wire`], [`transport`]: cache frames and how they move
//! - [`control`]: messages between gateway and workers
//! - [`spec`], [`weights`], [`tokenizer`], [`template`], [`model`]: models on disk
//! - [`verdict`]: what is said to the client
//! - [`bus`]: what travels over NATS: heartbeats, signed commands, their output
//! - [`trace`]: OpenTelemetry spans across the processes
//! - [`settings`]: reading configuration the same way everywhere

pub mod angles;
pub mod bus;
pub mod control;
pub mod hexbytes;
pub mod keys;
pub mod layout;
pub mod model;
pub mod settings;
pub mod spec;
pub mod template;
pub mod tokenizer;
pub mod tokens;
pub mod trace;
pub mod transport;
pub mod verdict;
pub mod weights;
pub mod wire;
