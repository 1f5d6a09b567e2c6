//! A model's tensors on disk, in whatever container, under one set of names.
//!
//! Canonical names are Hugging Face's llama names (`model.layers.0.self_attn.q_proj.weight` …). GGUF names are mapped
//! and GGUF query/key rows are put back into the half-split rotary order, so engines see one dialect.
//!
//! Tensors are read with positioned reads, one at a time: nothing is mapped and nothing is kept.

mod affine;
mod digest;
mod error;
mod expected;
pub(crate) mod gguf;
mod hf;
mod tensor;

pub use digest::{index_digest, kv_projection_digest};
pub use error::WeightsError;
pub use expected::check_complete;
pub use gguf::GgufSource;
pub use hf::HfSource;
pub use tensor::{FloatVec, HostTensor, TensorFormat, TensorInfo};

/// Named tensors that can be loaded one by one.
pub trait TensorSource: Send + Sync {
    /// Canonical names, sorted.
    fn names(&self) -> Vec<String>;

    /// Shape and stored format of a tensor, or `None` when there is no such tensor.
    fn info(&self, name: &str) -> Option<TensorInfo>;

    /// Read one tensor from disk.
    ///
    /// # Errors
    /// [`WeightsError`] when the name is unknown or the file cannot be read.
    fn load(&self, name: &str) -> Result<HostTensor, WeightsError>;

    /// Bytes a tensor takes in its container, scales and biases included.
    fn stored_bytes(&self, name: &str) -> Option<u64> {
        self.info(name).map(|info| info.default_bytes())
    }
}
