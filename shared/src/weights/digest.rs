//! Digests of weights.

use super::{TensorSource, WeightsError};

/// BLAKE3 over the sorted tensor names with shapes, formats and stored sizes: tells two weight files apart without
/// reading them.
#[must_use]
pub fn index_digest(source: &dyn TensorSource) -> [u8; 32] {
    let mut names = source.names();
    names.sort_unstable();
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"pd-bridge/index/v1");
    for name in names {
        let Some(info) = source.info(&name) else { continue };
        let bytes = source.stored_bytes(&name).unwrap_or(0);
        hasher.update(format!("{name}\n{:?} {:?} {bytes}\n", info.shape, info.format).as_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// BLAKE3 over what makes keys and values in one layer: `"pd-bridge/kv-proj/v1"`, then the effective f32 weights of the
/// key and of the value projection and, where there are any, their biases, all little-endian.
///
/// Equal digests mean that two models, however stored, project to the same cache from the same input.
///
/// # Errors
/// [`WeightsError`] when a projection is missing or cannot be read.
pub fn kv_projection_digest(source: &dyn TensorSource, layer: usize) -> Result<[u8; 32], WeightsError> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"pd-bridge/kv-proj/v1");
    let name = |module: &str, kind: &str| format!("model.layers.{layer}.self_attn.{module}.{kind}");
    let mut add = |name: &str| -> Result<(), WeightsError> {
        for chunk in source.load(name)?.into_f32().chunks(16 << 10) {
            let bytes: Vec<u8> = chunk.iter().flat_map(|x| x.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
        Ok(())
    };
    for module in ["k_proj", "v_proj"] {
        add(&name(module, "weight"))?;
    }
    for module in ["k_proj", "v_proj"] {
        let bias = name(module, "bias");
        if source.info(&bias).is_some() {
            add(&bias)?;
        }
    }
    Ok(*hasher.finalize().as_bytes())
}
