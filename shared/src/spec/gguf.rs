//! GGUF metadata of a llama model.

use super::check::invalid;
use super::rope::llama3_from_divisors;
use super::{Architecture, ModelSpec, RopeScaling, RopeSpec, SpecError};
use crate::weights::gguf::{GgufFile, GgufValue};

const DEFAULT_ROPE_THETA: f64 = 10_000.0;

/// Read a specification. `rope_divisors` are the values of the file's `rope_freqs.weight`, if it has one.
pub(crate) fn from_gguf(
    name: &str,
    file: &GgufFile,
    rope_divisors: Option<&[f32]>,
) -> Result<ModelSpec, SpecError> {
    let keys = Keys(file);
    match keys.text("general.architecture") {
        None => return Err(SpecError::Missing("general.architecture".to_owned())),
        Some("llama") => {}
        Some(other) => return Err(SpecError::UnsupportedArchitecture(other.to_owned())),
    }
    for (key, none) in [("llama.expert_count", 0), ("split.count", 1)] {
        if let Some(value) = keys.size(key)?.filter(|v| *v > none) {
            return Err(SpecError::Unsupported { key: key.to_owned(), value: value.to_string() });
        }
    }
    let hidden = keys.needed_size("llama.embedding_length")?;
    let n_heads = keys.needed_size("llama.attention.head_count")?;
    if n_heads == 0 {
        return Err(invalid("llama.attention.head_count", "is 0"));
    }
    let head_dim = keys.size("llama.attention.key_length")?.unwrap_or(hidden / n_heads);
    for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
        if let Some(value) = keys.size(key)?.filter(|v| *v != head_dim) {
            return Err(SpecError::Unsupported { key: key.to_owned(), value: value.to_string() });
        }
    }
    let has = |tensor: &str| file.tensors().contains_key(tensor);
    let rows = |tensor: &str| file.tensors().get(tensor).and_then(|t| t.shape.first().copied());
    let vocab_size = match rows("token_embd.weight") {
        Some(rows) => rows,
        None => keys.needed_size("llama.vocab_size")?,
    };
    ModelSpec {
        name: name.to_owned(),
        architecture: Architecture::Llama,
        n_layers: keys.needed_size("llama.block_count")?,
        hidden,
        n_heads,
        n_kv_heads: keys.size("llama.attention.head_count_kv")?.unwrap_or(n_heads),
        head_dim,
        intermediate: keys.needed_size("llama.feed_forward_length")?,
        vocab_size,
        rms_norm_eps: keys
            .float("llama.attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| SpecError::Missing("llama.attention.layer_norm_rms_epsilon".to_owned()))?
            as f32,
        max_positions: keys.needed_size("llama.context_length")?,
        tie_word_embeddings: !has("output.weight"),
        attention_bias: has("blk.0.attn_q.bias"),
        mlp_bias: has("blk.0.ffn_gate.bias"),
        rope: rope(keys, head_dim, rope_divisors)?,
        bos_token_id: keys.token("tokenizer.ggml.bos_token_id")?,
        eos_token_ids: end_tokens(keys)?,
    }
    .checked()
}

fn rope(keys: Keys<'_>, head_dim: usize, divisors: Option<&[f32]>) -> Result<RopeSpec, SpecError> {
    let theta = keys.float("llama.rope.freq_base")?.unwrap_or(DEFAULT_ROPE_THETA) as f32;
    let kind = keys.text("llama.rope.scaling.type").unwrap_or("none");
    // Files older than the typed key say only the factor of linear scaling.
    let old_factor = keys.float("llama.rope.scale_linear")?.filter(|f| *f != 1.0);
    let factor = keys.float("llama.rope.scaling.factor")?.or(old_factor);
    let scaling = match (kind, divisors) {
        ("none", None) => old_factor.map_or(RopeScaling::None, |f| RopeScaling::Linear { factor: f as f32 }),
        ("linear", None) => {
            let factor = factor.ok_or_else(|| SpecError::Missing("llama.rope.scaling.factor".to_owned()))?;
            RopeScaling::Linear { factor: factor as f32 }
        }
        ("none", Some(divisors)) => llama3_from_divisors(theta, head_dim, divisors)
            .ok_or_else(|| SpecError::UnsupportedRope("rope_freqs.weight".to_owned()))?,
        (other, _) => return Err(SpecError::UnsupportedRope(other.to_owned())),
    };
    Ok(RopeSpec { theta, scaling })
}

/// The end token and the end-of-turn and end-of-message tokens beside it.
fn end_tokens(keys: Keys<'_>) -> Result<Vec<u32>, SpecError> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        if let Some(id) = keys.token(key)?.filter(|id| !ids.contains(id)) {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// Typed access to metadata.
#[derive(Clone, Copy)]
struct Keys<'a>(&'a GgufFile);

impl<'a> Keys<'a> {
    fn text(self, key: &str) -> Option<&'a str> {
        self.0.value(key).and_then(GgufValue::as_str)
    }

    fn size(self, key: &str) -> Result<Option<usize>, SpecError> {
        let number = |v: &GgufValue| {
            v.as_u64().and_then(|v| usize::try_from(v).ok()).ok_or_else(|| invalid(key, "is not a size"))
        };
        self.0.value(key).map(number).transpose()
    }

    fn needed_size(self, key: &str) -> Result<usize, SpecError> {
        self.size(key)?.ok_or_else(|| SpecError::Missing(key.to_owned()))
    }

    fn float(self, key: &str) -> Result<Option<f64>, SpecError> {
        let number = |v: &GgufValue| v.as_f64().ok_or_else(|| invalid(key, "is not a number"));
        self.0.value(key).map(number).transpose()
    }

    fn token(self, key: &str) -> Result<Option<u32>, SpecError> {
        let id = |v: usize| u32::try_from(v).map_err(|_| invalid(key, "is not a token id"));
        self.size(key)?.map(id).transpose()
    }
}
