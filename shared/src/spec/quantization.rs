//! What `config.json` says about MLX's weight quantization.

use super::SpecError;
use super::check::invalid;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Bits and group size of each quantized module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    default: Option<(u8, u32)>,
    modules: BTreeMap<String, Option<(u8, u32)>>,
}

impl Quantization {
    /// Parse the `quantization` entry of a configuration, or `quantization_config`, which says the same for MLX.
    ///
    /// # Errors
    /// [`SpecError::UnsupportedQuantization`] for any scheme but 4 or 8 bit affine.
    pub fn from_config(config: &Value) -> Result<Self, SpecError> {
        let entry = |key| config.get(key).filter(|v| !v.is_null());
        let (key, entry) = match (entry("quantization"), entry("quantization_config")) {
            (Some(value), _) => ("quantization", value),
            (None, Some(value)) => ("quantization_config", value),
            (None, None) => return Ok(Self::default()),
        };
        let entry = entry.as_object().ok_or_else(|| invalid(key, "is not an object"))?;
        if let Some(method) = entry.get("quant_method") {
            let method = method.as_str().map_or_else(|| method.to_string(), str::to_owned);
            return Err(SpecError::UnsupportedQuantization(method));
        }
        let default = scheme(key, entry, None)?;
        let mut modules = BTreeMap::new();
        for (module, value) in entry {
            match value {
                Value::Object(own) => {
                    modules.insert(module.clone(), scheme(module, own, default)?);
                }
                Value::Bool(quantized) => {
                    modules.insert(module.clone(), default.filter(|_| *quantized));
                }
                _ => {}
            }
        }
        Ok(Self { default, modules })
    }

    /// Bits and group size of a module such as `model.layers.0.mlp.up_proj`; `None` when it is not quantized.
    #[must_use]
    pub fn of(&self, module: &str) -> Option<(u8, u32)> {
        self.modules.get(module).copied().unwrap_or(self.default)
    }
}

/// Read `bits`, `group_size` and `mode`; keys that are absent come from `fallback`.
fn scheme(
    key: &str,
    entry: &Map<String, Value>,
    fallback: Option<(u8, u32)>,
) -> Result<Option<(u8, u32)>, SpecError> {
    if let Some(mode) = entry.get("mode").filter(|m| m.as_str() != Some("affine") && !m.is_null()) {
        return Err(SpecError::UnsupportedQuantization(format!("mode {mode} of {key}")));
    }
    let number = |name: &str, fallback: Option<u64>| match entry.get(name).filter(|v| !v.is_null()) {
        None => Ok(fallback),
        Some(value) => value
            .as_u64()
            .map(Some)
            .ok_or_else(|| invalid(&format!("{key}.{name}"), "is not a positive integer")),
    };
    let bits = number("bits", fallback.map(|f| u64::from(f.0)))?;
    let group_size = number("group_size", fallback.map(|f| u64::from(f.1)))?;
    let (Some(bits), Some(group_size)) = (bits, group_size) else {
        return Ok(None);
    };
    let bits = u8::try_from(bits)
        .ok()
        .filter(|b| matches!(b, 4 | 8))
        .ok_or_else(|| SpecError::UnsupportedQuantization(format!("{bits} bits of {key}")))?;
    // Whole words per group, which all of MLX's group sizes are.
    let group_size = u32::try_from(group_size)
        .ok()
        .filter(|g| *g >= 8 && g.is_multiple_of(8) && *g <= 1 << 16)
        .ok_or_else(|| SpecError::UnsupportedQuantization(format!("groups of {group_size} of {key}")))?;
    Ok(Some((bits, group_size)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn overrides_win() {
        let config = json!({"quantization": {"group_size": 64, "bits": 4,
            "model.embed_tokens": {"group_size": 32, "bits": 8}, "lm_head": false,
            "model.layers.0.mlp.up_proj": {"bits": 8}}});
        let q = Quantization::from_config(&config).unwrap();
        assert_eq!(q.of("model.embed_tokens"), Some((8, 32)));
        assert_eq!(q.of("model.layers.0.mlp.up_proj"), Some((8, 64)));
        assert_eq!(q.of("lm_head"), None);
        assert_eq!(q.of("model.layers.0.mlp.down_proj"), Some((4, 64)));
    }

    #[test]
    fn absent_means_not_quantized() {
        assert_eq!(Quantization::from_config(&json!({})).unwrap().of("lm_head"), None);
    }

    #[test]
    fn other_schemes_are_refused_by_name() {
        for (config, named) in [
            (json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}), "gptq"),
            (json!({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}), "mxfp4"),
            (json!({"quantization": {"group_size": 64, "bits": 3}}), "3 bits"),
            (json!({"quantization": {"group_size": 0, "bits": 4}}), "groups of 0"),
        ] {
            let error = Quantization::from_config(&config).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
