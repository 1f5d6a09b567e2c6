//! Which tensors a model must have.

use super::{TensorFormat, TensorSource, WeightsError};
use crate::spec::ModelSpec;
use std::collections::BTreeMap;

/// Check that a source holds exactly the tensors of `spec`, each in the right shape.
///
/// # Errors
/// [`WeightsError`] naming the first missing, unexpected or misshapen tensor.
pub fn check_complete(spec: &ModelSpec, source: &dyn TensorSource) -> Result<(), WeightsError> {
    let expected = expected_tensors(spec);
    for (name, shape) in &expected {
        let info = source.info(name).ok_or_else(|| WeightsError::Missing { tensor: name.clone() })?;
        if info.shape != *shape {
            return Err(WeightsError::Shape {
                tensor: name.clone(),
                found: info.shape,
                expected: shape.clone(),
            });
        }
        if shape.len() == 1 && matches!(info.format, TensorFormat::Affine { .. }) {
            return Err(WeightsError::Quantization {
                tensor: name.clone(),
                reason: "a vector cannot be quantized".to_owned(),
            });
        }
    }
    match source.names().into_iter().find(|name| !expected.contains_key(name)) {
        Some(tensor) => Err(WeightsError::Unexpected { tensor }),
        None => Ok(()),
    }
}

/// Canonical names and logical shapes of a llama model's tensors.
fn expected_tensors(spec: &ModelSpec) -> BTreeMap<String, Vec<usize>> {
    let ModelSpec { hidden, intermediate, vocab_size, .. } = *spec;
    let q_rows = spec.n_heads * spec.head_dim;
    let kv_rows = spec.n_kv_heads * spec.head_dim;
    let projections = [
        ("self_attn.q_proj", q_rows, hidden, spec.attention_bias),
        ("self_attn.k_proj", kv_rows, hidden, spec.attention_bias),
        ("self_attn.v_proj", kv_rows, hidden, spec.attention_bias),
        ("self_attn.o_proj", hidden, q_rows, spec.attention_bias),
        ("mlp.gate_proj", intermediate, hidden, spec.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, spec.mlp_bias),
    ];
    let mut expected = BTreeMap::from([
        ("model.embed_tokens.weight".to_owned(), vec![vocab_size, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ]);
    if !spec.tie_word_embeddings {
        expected.insert("lm_head.weight".to_owned(), vec![vocab_size, hidden]);
    }
    for layer in 0..spec.n_layers {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            expected.insert(format!("model.layers.{layer}.{norm}.weight"), vec![hidden]);
        }
        for (module, rows, columns, bias) in projections {
            expected.insert(format!("model.layers.{layer}.{module}.weight"), vec![rows, columns]);
            if bias {
                expected.insert(format!("model.layers.{layer}.{module}.bias"), vec![rows]);
            }
        }
    }
    expected
}
