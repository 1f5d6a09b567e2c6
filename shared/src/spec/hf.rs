//! Hugging Face's `config.json` and `generation_config.json`.

use super::check::invalid;
use super::{Architecture, ModelSpec, RopeScaling, RopeSpec, SpecError};
use serde_json::Value;

/// Defaults of transformers' `LlamaConfig`, for keys that an export may leave out.
const DEFAULT_RMS_NORM_EPS: f64 = 1e-6;
const DEFAULT_ROPE_THETA: f64 = 10_000.0;
const DEFAULT_MAX_POSITIONS: usize = 2048;

/// Read a specification from a parsed `config.json`, with `generation_config.json` where there is one.
///
/// `has_lm_head` says whether the weights hold a separate head; it decides when the configuration does not.
///
/// # Errors
/// [`SpecError`] naming the architecture, rope type or key that is not supported, missing or senseless.
pub fn from_hf(
    name: &str,
    config: &Value,
    generation: Option<&Value>,
    has_lm_head: bool,
) -> Result<ModelSpec, SpecError> {
    let keys = Keys(config);
    let architecture = architecture(keys)?;
    let hidden = keys.size("hidden_size")?;
    let n_heads = keys.size("num_attention_heads")?;
    if n_heads == 0 {
        return Err(invalid("num_attention_heads", "is 0"));
    }
    refuse_variants(keys)?;
    let mut eos_token_ids = Vec::new();
    for source in generation.into_iter().chain([config]) {
        for id in token_ids(source, "eos_token_id")? {
            if !eos_token_ids.contains(&id) {
                eos_token_ids.push(id);
            }
        }
    }
    ModelSpec {
        name: name.to_owned(),
        architecture,
        n_layers: keys.size("num_hidden_layers")?,
        hidden,
        n_heads,
        n_kv_heads: keys.size_or("num_key_value_heads", n_heads)?,
        head_dim: keys.size_or("head_dim", hidden / n_heads)?,
        intermediate: keys.size("intermediate_size")?,
        vocab_size: keys.size("vocab_size")?,
        rms_norm_eps: keys.float_or("rms_norm_eps", DEFAULT_RMS_NORM_EPS)? as f32,
        max_positions: keys.size_or("max_position_embeddings", DEFAULT_MAX_POSITIONS)?,
        tie_word_embeddings: keys.bool_or("tie_word_embeddings", !has_lm_head)?,
        attention_bias: keys.bool_or("attention_bias", false)?,
        mlp_bias: keys.bool_or("mlp_bias", false)?,
        rope: rope(keys)?,
        bos_token_id: token_ids(config, "bos_token_id")?.first().copied(),
        eos_token_ids,
    }
    .checked()
}

fn architecture(keys: Keys<'_>) -> Result<Architecture, SpecError> {
    let model_type = keys.get("model_type").and_then(Value::as_str);
    let class = keys.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
    if let Some(other) = model_type.filter(|t| *t != "llama") {
        return Err(SpecError::UnsupportedArchitecture(other.to_owned()));
    }
    if let Some(other) = class.filter(|c| *c != "LlamaForCausalLM") {
        return Err(SpecError::UnsupportedArchitecture(other.to_owned()));
    }
    match (model_type, class) {
        (None, None) => Err(SpecError::Missing("model_type".to_owned())),
        _ => Ok(Architecture::Llama),
    }
}

/// Settings of llama configurations that change the forward pass and that no engine here implements.
fn refuse_variants(keys: Keys<'_>) -> Result<(), SpecError> {
    let unsupported =
        |key: &str, value: &Value| SpecError::Unsupported { key: key.to_owned(), value: value.to_string() };
    for (key, only) in [("hidden_act", Value::from("silu")), ("partial_rotary_factor", Value::from(1.0))] {
        if let Some(value) =
            keys.get(key).filter(|v| **v != only && (v.as_f64() != only.as_f64() || v.is_string()))
        {
            return Err(unsupported(key, value));
        }
    }
    Ok(())
}

/// `rope_theta` and `rope_scaling`, or the `rope_parameters` that hold both since transformers 5.
fn rope(keys: Keys<'_>) -> Result<RopeSpec, SpecError> {
    let (key, parameters) = match keys.get("rope_parameters") {
        Some(parameters) => ("rope_parameters", Some(parameters)),
        None => ("rope_scaling", keys.get("rope_scaling")),
    };
    let theta = match parameters.map(|p| Keys(p).float("rope_theta")).transpose()?.flatten() {
        Some(theta) => theta,
        None => keys.float_or("rope_theta", DEFAULT_ROPE_THETA)?,
    };
    let scaling = parameters.map_or(Ok(RopeScaling::None), |p| rope_scaling(key, p, keys))?;
    Ok(RopeSpec { theta: theta as f32, scaling })
}

fn rope_scaling(key: &str, entry: &Value, config: Keys<'_>) -> Result<RopeScaling, SpecError> {
    if !entry.is_object() {
        return Err(invalid(key, "is not an object"));
    }
    let scaling = Keys(entry);
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type"));
    let kind = match kind {
        None => "default",
        Some(value) => value.as_str().ok_or_else(|| SpecError::UnsupportedRope(value.to_string()))?,
    };
    let needed = |name: &str| {
        scaling.float(name)?.map(|v| v as f32).ok_or_else(|| SpecError::Missing(format!("{key}.{name}")))
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: needed("factor")? }),
        "llama3" => {
            let original = match scaling.get("original_max_position_embeddings") {
                Some(_) => scaling.size("original_max_position_embeddings")?,
                None => config.size("max_position_embeddings")?,
            };
            Ok(RopeScaling::Llama3 {
                factor: needed("factor")?,
                low_freq_factor: needed("low_freq_factor")?,
                high_freq_factor: needed("high_freq_factor")?,
                original_max_positions: u32::try_from(original)
                    .map_err(|_| invalid("original_max_position_embeddings", "is too large"))?,
            })
        }
        other => Err(SpecError::UnsupportedRope(other.to_owned())),
    }
}

/// A token id, a list of them, or nothing.
fn token_ids(source: &Value, key: &str) -> Result<Vec<u32>, SpecError> {
    let id = |value: &Value| {
        value
            .as_u64()
            .and_then(|v| u32::try_from(v).ok())
            .ok_or_else(|| invalid(key, format!("{value} is not a token id")))
    };
    match source.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

/// Typed access to an object's keys; null counts as absent, as in Python.
#[derive(Clone, Copy)]
struct Keys<'a>(&'a Value);

impl<'a> Keys<'a> {
    fn get(self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn size(self, key: &str) -> Result<usize, SpecError> {
        let value = self.get(key).ok_or_else(|| SpecError::Missing(key.to_owned()))?;
        value
            .as_u64()
            .and_then(|v| usize::try_from(v).ok())
            .ok_or_else(|| invalid(key, format!("{value} is not a size")))
    }

    fn size_or(self, key: &str, default: usize) -> Result<usize, SpecError> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    fn float(self, key: &str) -> Result<Option<f64>, SpecError> {
        self.get(key)
            .map(|v| v.as_f64().ok_or_else(|| invalid(key, format!("{v} is not a number"))))
            .transpose()
    }

    fn float_or(self, key: &str, default: f64) -> Result<f64, SpecError> {
        Ok(self.float(key)?.unwrap_or(default))
    }

    fn bool_or(self, key: &str, default: bool) -> Result<bool, SpecError> {
        self.get(key).map_or(Ok(default), |v| {
            v.as_bool().ok_or_else(|| invalid(key, format!("{v} is not true or false")))
        })
    }
}

#[cfg(test)]
mod tests;
