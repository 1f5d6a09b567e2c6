//! Directories of safetensors files, plain or quantized by MLX.

mod shard;
mod source;

pub use source::HfSource;
