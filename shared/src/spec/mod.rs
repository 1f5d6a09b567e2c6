//! What a model is: one [`ModelSpec`], read from a Hugging Face `config.json` or from GGUF metadata.

use serde::{Deserialize, Serialize};

mod check;
mod error;
mod gguf;
mod hf;
mod quantization;
mod rope;

pub use error::SpecError;
pub(crate) use gguf::from_gguf;
pub use hf::from_hf;
pub use quantization::Quantization;

/// The model families both engines can run.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// Llama: RMS norm, grouped-query attention, rotary embedding in half-split order, SwiGLU.
    Llama,
}

/// How the rotary frequencies are stretched beyond the training context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RopeScaling {
    /// Frequencies as trained.
    None,
    /// Every position is divided by `factor`.
    Linear {
        /// Divisor of every position, at least 1 in practice.
        factor: f32,
    },
    /// Llama 3.1's rule: long wavelengths are divided by `factor`, short ones kept, those between blended.
    Llama3 {
        /// Divisor of the lowest frequencies.
        factor: f32,
        /// Wavelengths above `original_max_positions / low_freq_factor` are divided in full.
        low_freq_factor: f32,
        /// Wavelengths below `original_max_positions / high_freq_factor` are left alone.
        high_freq_factor: f32,
        /// Context length of the pre-training, in tokens.
        original_max_positions: u32,
    },
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    /// Base of the geometric series of frequencies.
    pub theta: f32,
    /// Stretching of the frequencies.
    pub scaling: RopeScaling,
}

/// Everything an engine needs to know of a model besides its weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Name for people: the file's own, else the file or folder name.
    pub name: String,
    /// Family, which picks the forward pass.
    pub architecture: Architecture,
    /// Decoder layers.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width of the feed-forward inner layer.
    pub intermediate: usize,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Longest supported sequence, in tokens.
    pub max_positions: usize,
    /// The output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// The four attention projections have biases.
    pub attention_bias: bool,
    /// The three feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Token that starts a sequence.
    pub bos_token_id: Option<u32>,
    /// Tokens that end generation.
    pub eos_token_ids: Vec<u32>,
}
