//! A model's weights on a backend.

use shared::spec::{ModelSpec, RopeScaling, RopeSpec};
use shared::weights::{HostTensor, TensorSource, WeightsError};

use crate::ops::{Heads, HostLinear, LayerParams, LayerWeights, Ops, OpsError, RestWeights};

/// Weights of a llama-family model, uploaded: everything that makes keys and values, nothing that makes logits.
pub struct Weights<O: Ops> {
    /// `[vocab, hidden]`.
    pub embedding: O::Weight,
    /// In order.
    pub layers: Vec<LayerWeights<O::Weight>>,
    /// Numbers that all layers share.
    pub params: LayerParams,
}

/// Why a model could not be put on a backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A tensor could not be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The backend refused.
    #[error(transparent)]
    Ops(#[from] OpsError),
}

impl<O: Ops> Weights<O> {
    /// Reads and uploads tensor by tensor.
    ///
    /// # Errors
    /// [`LoadError`] when a tensor cannot be read or does not fit on the device.
    pub fn load(ops: &mut O, spec: &ModelSpec, source: &dyn TensorSource) -> Result<Self, LoadError> {
        let embedding = ops.upload_embedding(source.load("model.embed_tokens.weight")?)?;
        let layers =
            (0..spec.n_layers).map(|i| load_layer(ops, spec, source, i)).collect::<Result<_, _>>()?;
        let params = LayerParams { rms_norm_eps: spec.rms_norm_eps, window_tokens: None };
        Ok(Self { embedding, layers, params })
    }
}

/// Head counts of a full projection of this model.
#[must_use]
pub fn heads(spec: &ModelSpec) -> Heads {
    Heads { n_heads: spec.n_heads, n_kv_heads: spec.n_kv_heads, head_dim: spec.head_dim }
}

/// Inverse frequencies as MLX computes them: `exp(-i * ln(theta) / half)` in f32, divided by the scaling's divisors.
///
/// A decoder publishes the very values its device uses; these stand in where there is no decoder (benchmarks, checks).
#[must_use]
pub fn inverse_frequencies(rope: &RopeSpec, head_dim: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let step = rope.theta.ln() / half as f32;
    let linear = if let RopeScaling::Linear { factor } = rope.scaling { factor } else { 1.0 };
    let divisors = rope.frequency_divisors(head_dim).unwrap_or_else(|| vec![linear; half]);
    divisors.iter().enumerate().map(|(i, divisor)| (-(i as f32) * step).exp() / divisor).collect()
}

fn load_layer<O: Ops>(
    ops: &mut O,
    spec: &ModelSpec,
    source: &dyn TensorSource,
    layer: usize,
) -> Result<LayerWeights<O::Weight>, LoadError> {
    let norm = |name: &str| source.load(&format!("model.layers.{layer}.{name}.weight"));
    let last = layer + 1 == spec.n_layers;
    let linear = |modules: &[&str]| host_linear(source, layer, modules);
    let attention_norm = ops.upload_norm(norm("input_layernorm")?)?;
    let projections: &[&str] = match last {
        true => &["self_attn.k_proj", "self_attn.v_proj"],
        false => &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    };
    let qkv = ops.upload_linear(linear(projections)?)?;
    let heads = Heads { n_heads: if last { 0 } else { spec.n_heads }, ..heads(spec) };
    if last {
        return Ok(LayerWeights { attention_norm, qkv, heads, rest: None });
    }
    let rest = RestWeights {
        output: ops.upload_linear(linear(&["self_attn.o_proj"])?)?,
        mlp_norm: ops.upload_norm(norm("post_attention_layernorm")?)?,
        gate_up: ops.upload_linear(linear(&["mlp.gate_proj", "mlp.up_proj"])?)?,
        down: ops.upload_linear(linear(&["mlp.down_proj"])?)?,
    };
    Ok(LayerWeights { attention_norm, qkv, heads, rest: Some(rest) })
}

/// Reads projections of a layer with their biases. Where only some have one, the others get zeros.
fn host_linear(
    source: &dyn TensorSource,
    layer: usize,
    modules: &[&str],
) -> Result<HostLinear, WeightsError> {
    let name = |module: &str, kind: &str| format!("model.layers.{layer}.{module}.{kind}");
    let weights: Vec<_> =
        modules.iter().map(|m| source.load(&name(m, "weight"))).collect::<Result<_, _>>()?;
    let has_bias = |m: &&str| source.info(&name(m, "bias")).is_some();
    if !modules.iter().any(&has_bias) {
        return Ok(HostLinear { weights, biases: Vec::new() });
    }
    let bias = |(module, weight): (&&str, &HostTensor)| match has_bias(module) {
        true => source.load(&name(module, "bias")),
        false => {
            let rows = weight.shape().first().copied().unwrap_or(0);
            Ok(HostTensor::F32 { shape: vec![rows], data: vec![0.0; rows] })
        }
    };
    let biases = modules.iter().zip(&weights).map(bias).collect::<Result<_, _>>()?;
    Ok(HostLinear { weights, biases })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_from_one_by_a_constant_ratio() {
        let rope = RopeSpec { theta: 10_000.0, scaling: RopeScaling::None };
        let plain = inverse_frequencies(&rope, 64);
        assert_eq!((plain.len(), plain[0]), (32, 1.0));
        assert!((plain[31] * 10_000f32.powf(62.0 / 64.0) - 1.0).abs() < 1e-5);
        let scaled = RopeSpec { scaling: RopeScaling::Linear { factor: 4.0 }, ..rope };
        for (a, b) in plain.iter().zip(inverse_frequencies(&scaled, 64)) {
            assert!((a / 4.0 - b).abs() <= f32::EPSILON * a);
        }
    }
}
