//! Model shapes to measure without a model file.

use std::path::Path;

use shared::spec::{Architecture, ModelSpec, RopeScaling, RopeSpec};

use super::ToolError;

/// Layers, hidden, query heads, key heads, head dimension, intermediate, vocabulary, biases on q/k/v.
type Sizes = (usize, usize, usize, usize, usize, usize, usize, bool);

const SHAPES: [(&str, Sizes, f32); 4] = [
    ("llama-3.1-8b", (32, 4096, 32, 8, 128, 14336, 128_256, false), 500_000.0),
    ("qwen2.5-7b", (28, 3584, 28, 4, 128, 18944, 152_064, true), 1_000_000.0),
    ("qwen3-32b", (64, 5120, 64, 8, 128, 25600, 151_936, false), 1_000_000.0),
    ("smollm2-135m", (30, 576, 9, 3, 64, 1536, 49_152, false), 100_000.0),
];

/// A named shape, or the shape in a `config.json`.
pub(super) fn resolve(name: &str) -> Result<ModelSpec, ToolError> {
    if let Some((name, sizes, theta)) = SHAPES.into_iter().find(|(known, ..)| *known == name) {
        return Ok(spec(name, sizes, theta));
    }
    if Path::new(name).is_file() {
        let config = serde_json::from_slice(&std::fs::read(name)?)?;
        return shared::spec::from_hf(name, &config, None, false)
            .map_err(|e| ToolError::Argument(format!("{name}: {e}")));
    }
    let known: Vec<&str> = SHAPES.iter().map(|(name, ..)| *name).collect();
    Err(ToolError::Argument(format!("{name} is neither a file nor one of {}", known.join(", "))))
}

fn spec(name: &str, sizes: Sizes, theta: f32) -> ModelSpec {
    let (n_layers, hidden, n_heads, n_kv_heads, head_dim, intermediate, vocab_size, attention_bias) = sizes;
    ModelSpec {
        name: name.into(),
        architecture: Architecture::Llama,
        n_layers,
        hidden,
        n_heads,
        n_kv_heads,
        head_dim,
        intermediate,
        vocab_size,
        rms_norm_eps: 1e-5,
        max_positions: 1 << 20,
        tie_word_embeddings: false,
        attention_bias,
        mlp_bias: false,
        rope: RopeSpec { theta, scaling: RopeScaling::None },
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    }
}

/// Floating-point operations that a prefill of `tokens` needs: every layer's products and the causal half of
/// attention, without the output head. The last layer needs its keys and values only.
pub(super) fn prefill_flops(spec: &ModelSpec, tokens: usize) -> f64 {
    let (t, hidden) = (tokens as f64, spec.hidden as f64);
    let kv = 2.0 * (spec.n_kv_heads * spec.head_dim) as f64 * hidden;
    let width = (spec.n_heads * spec.head_dim) as f64;
    let rest = 2.0 * width * hidden + 3.0 * hidden * spec.intermediate as f64;
    let whole_layers = spec.n_layers as f64 - 1.0;
    let products = 2.0 * t * (whole_layers * (kv + rest) + kv);
    let attention = whole_layers * 4.0 * width * t * (t + 1.0) / 2.0;
    products + attention
}

/// The same with every layer computed whole, as frameworks do it; the customary count.
pub(super) fn whole_model_flops(spec: &ModelSpec, tokens: usize) -> f64 {
    let per_layer = prefill_flops(&ModelSpec { n_layers: 2, ..spec.clone() }, tokens)
        - prefill_flops(&ModelSpec { n_layers: 1, ..spec.clone() }, tokens);
    per_layer * spec.n_layers as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_8b_model_needs_about_fourteen_gigaflops_a_token() {
        let spec = resolve("llama-3.1-8b").unwrap();
        let per_token = whole_model_flops(&spec, 1) / 1e9;
        assert!((13.9..14.1).contains(&per_token), "{per_token}");
        assert!(prefill_flops(&spec, 1) < whole_model_flops(&spec, 1));
        assert!(resolve("no-such-shape").is_err());
    }
}
