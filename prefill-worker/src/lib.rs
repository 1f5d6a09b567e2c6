//! The prefill worker of pd-bridge: reads a prompt and streams the decoder's finished cache to it while reading.
//!
//! - [`ops`]: the seam to the hardware; [`cpu`] and [`cuda`] are its two sides, [`backend`] chooses
//! - [`forward`]: the llama forward, written once over the seam, on the [`model`]'s weights
//! - [`reconstruct`]: from a layer's attention input to the decoder's cache arrays
//! - [`engine`]: the thread that runs prompts, with its own prefix cache
//! - [`server`]: the control port, and the transfers to decoders
//! - [`bench`](mod@bench): tools for a person at a terminal

pub mod backend;
pub mod bench;
pub mod cpu;
pub mod cuda;
pub mod engine;
pub mod forward;
pub mod model;
pub mod ops;
pub mod reconstruct;
pub mod server;
pub mod settings;
