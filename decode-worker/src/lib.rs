//! The decode worker: owner of the decoder's cache and writer of answers.
//!
//! - [`mlx`]: the model in MLX
//! - [`engine`]: one thread that owns the model, and the policy by which requests share it
//! - [`store`]: blocks of finished cache, by the tokens they hold
//! - [`ingest`]: blocks arriving from a prefill worker
//! - [`server`]: what the gateway may ask
//! - [`sampler`]: from logits to a token
//! - [`constraint`]: which tokens keep an answer in its form
//! - [`rates`], [`identity`], [`settings`]: measured speeds, who this decoder is, options

pub mod block;
pub mod constraint;
pub mod engine;
pub mod identity;
pub mod ingest;
pub mod mlx;
pub mod rates;
pub mod sampler;
pub mod server;
pub mod settings;
pub mod store;
