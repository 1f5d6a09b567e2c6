//! The GGUF container, versions 2 and 3, as ggml's specification describes it.

mod blocks;
mod header;
mod names;
mod source;
mod value;

pub(crate) use header::GgufFile;
pub(crate) use names::ROPE_FACTORS;
pub use source::GgufSource;
pub(crate) use value::GgufValue;
