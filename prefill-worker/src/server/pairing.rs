//! Introducing a decoder: what of its projections is missing here is fetched from it, checked and handed to the engine.
//!
//! Another quantization of the same model is welcome, another model is not: its projections of our attention inputs
//! would be a well-formed cache of nothing. What tells them apart is the distance of the weights.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use shared::control::{
    ClusterKey, ControlClient, DecodeEvent, DecodeRequest, Incoming, PairSpec, WorkerError, WorkerErrorCode,
};
use shared::weights::{HostTensor, TensorInfo, TensorSource, WeightsError, kv_projection_digest};

use crate::engine::{Engine, Projection};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence while projections arrive.
const LAYER_TIMEOUT: Duration = Duration::from_secs(60);

/// Largest relative distance `‖theirs − ours‖ / ‖ours‖` (Frobenius) of a projection of the same model. Quantizing to 4
/// bits gives about 0.1, unrelated weights about 1.4.
const MAX_DISTANCE: f64 = 0.5;

/// Pairs and answers in how many layers the decoder's projections are not this worker's.
pub(super) async fn pair(
    engine: &Engine,
    own: &[[u8; 32]],
    own_weights: &Arc<dyn TensorSource>,
    spec: PairSpec,
    key: &ClusterKey,
) -> Result<u32, WorkerError> {
    let published = &spec.cache.recipe.projection_digests;
    let ours: HashSet<[u8; 32]> = own.iter().copied().collect();
    let missing: Vec<usize> = (0..published.len())
        .filter(|&layer| own.get(layer) != Some(&published[layer].0))
        .filter(|&layer| !engine.holds_projection(&published[layer].0))
        .collect();
    tracing::info!(
        decoder = %spec.cache.fingerprint,
        fetch_layers = missing.len(),
        same_layers = published.iter().filter(|d| ours.contains(&d.0)).count(),
        "pairing"
    );
    let mut fetched = Vec::new();
    if !missing.is_empty() {
        let failed = |text: String| WorkerError::new(WorkerErrorCode::Incompatible, text);
        fetch(&spec, key, &missing, own_weights, &mut fetched)
            .await
            .map_err(|e| failed(format!("decoder's projections: {e}")))?;
    }
    engine.pair(spec.cache, fetched).await
}

async fn fetch(
    spec: &PairSpec,
    key: &ClusterKey,
    missing: &[usize],
    own_weights: &Arc<dyn TensorSource>,
    out: &mut Vec<Projection>,
) -> Result<(), String> {
    type Client = ControlClient<DecodeRequest, DecodeEvent>;
    let (client, _) =
        Client::connect(&spec.control_addr, key, CONNECT_TIMEOUT).await.map_err(|e| e.to_string())?;
    let mut events = client.request(&DecodeRequest::GetProjections).await.map_err(|e| e.to_string())?;
    let digests = &spec.cache.recipe.projection_digests;
    for layer in 0.. {
        let next =
            tokio::time::timeout(LAYER_TIMEOUT, events.next()).await.map_err(|_| "timed out".to_owned())?;
        match next {
            Some(Incoming::Binary(bytes)) if layer < digests.len() => {
                if missing.contains(&layer) {
                    let expected = digests[layer].0;
                    let own = own_weights.clone();
                    let parsed =
                        tokio::task::spawn_blocking(move || parse(&bytes, layer, expected, &*own)).await;
                    out.push(parsed.map_err(|e| e.to_string())??);
                }
            }
            Some(Incoming::Binary(_)) => return Err("more layers than were published".into()),
            Some(Incoming::Event(DecodeEvent::ProjectionsEnd)) if layer == digests.len() => return Ok(()),
            Some(Incoming::Event(DecodeEvent::Error(error))) => return Err(error.message),
            Some(Incoming::Event(_)) => return Err("an answer to something else".into()),
            None => return Err("the connection closed".into()),
        }
    }
    Ok(())
}

/// Reads one layer's message and checks that it is what the decoder published, and of the same model as `own`.
fn parse(
    bytes: &Bytes,
    layer: usize,
    expected: [u8; 32],
    own: &dyn TensorSource,
) -> Result<Projection, String> {
    let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
    let layer_tensors = OneLayer { tensors, layer };
    let digest = kv_projection_digest(&layer_tensors, layer).map_err(|e| e.to_string())?;
    if digest != expected {
        return Err(format!("layer {layer} is not what its digest says"));
    }
    let weights = ["k_proj.weight", "v_proj.weight"].map(|name| layer_tensors.named(name));
    let biases = ["k_proj.bias", "v_proj.bias"].map(|name| layer_tensors.named(name));
    let [Some(k), Some(v)] = weights else { return Err(format!("layer {layer} is not whole")) };
    for (module, theirs) in [("k_proj", &k), ("v_proj", &v)] {
        let ours = own
            .load(&format!("model.layers.{layer}.self_attn.{module}.weight"))
            .map_err(|e| e.to_string())?;
        let distance = distance(theirs, &ours);
        if distance.is_nan() || distance > MAX_DISTANCE {
            return Err(format!(
                "{module} of layer {layer} is of another model: its relative distance is {distance:.2}, at most \
                 {MAX_DISTANCE} is another quantization of the same"
            ));
        }
    }
    let biases = match biases {
        [None, None] => Vec::new(),
        [k_bias, v_bias] => vec![k_bias.unwrap_or_else(|| zeros(&k)), v_bias.unwrap_or_else(|| zeros(&v))],
    };
    Ok(Projection::new(digest, vec![k, v], biases))
}

/// `‖theirs − ours‖ / ‖ours‖`; infinite for different shapes.
fn distance(theirs: &HostTensor, ours: &HostTensor) -> f64 {
    if theirs.shape() != ours.shape() {
        return f64::INFINITY;
    }
    let (theirs, ours) = (theirs.to_f32(), ours.to_f32());
    let square = |x: f64| x * x;
    let difference: f64 = theirs.iter().zip(&ours).map(|(t, o)| square(f64::from(*t) - f64::from(*o))).sum();
    let norm: f64 = ours.iter().map(|o| square(f64::from(*o))).sum();
    (difference / norm).sqrt()
}

fn zeros(weight: &HostTensor) -> HostTensor {
    let rows = weight.shape().first().copied().unwrap_or(0);
    HostTensor::F32 { shape: vec![rows], data: vec![0.0; rows] }
}

/// A decoder's message seen as a tensor source, so that it is digested exactly like a model.
struct OneLayer<'a> {
    tensors: SafeTensors<'a>,
    layer: usize,
}

impl OneLayer<'_> {
    fn named(&self, name: &str) -> Option<HostTensor> {
        let view = self.tensors.tensor(name).ok().filter(|view| view.dtype() == Dtype::F32)?;
        let (words, _) = view.data().as_chunks::<4>();
        let data = words.iter().map(|w| f32::from_le_bytes(*w)).collect();
        Some(HostTensor::F32 { shape: view.shape().to_vec(), data })
    }

    fn short<'n>(&self, name: &'n str) -> Option<&'n str> {
        name.strip_prefix(&format!("model.layers.{}.self_attn.", self.layer))
    }
}

impl TensorSource for OneLayer<'_> {
    fn names(&self) -> Vec<String> {
        self.tensors.names().iter().map(|name| (*name).to_owned()).collect()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        let tensor = self.named(self.short(name)?)?;
        Some(TensorInfo { shape: tensor.shape().to_vec(), format: tensor.format() })
    }

    fn load(&self, name: &str) -> Result<HostTensor, WeightsError> {
        let tensor = self.short(name).and_then(|short| self.named(short));
        tensor.ok_or_else(|| WeightsError::Missing { tensor: name.to_owned() })
    }

    fn stored_bytes(&self, _name: &str) -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(seed: usize, noise: f32) -> HostTensor {
        let value = |i: usize| ((i * (36 + seed)) as f32).sin() + noise * ((i * 7) as f32).cos();
        HostTensor::F32 { shape: vec![16, 32], data: (0..512).map(value).collect() }
    }

    #[test]
    fn quantization_noise_is_near_and_other_weights_are_far() {
        assert_eq!(distance(&tensor(1, 0.0), &tensor(1, 0.0)), 0.0);
        assert!(distance(&tensor(1, 0.1), &tensor(1, 0.0)) < 0.15);
        assert!(distance(&tensor(2, 0.0), &tensor(1, 0.0)) > 1.0);
        let other_shape = HostTensor::F32 { shape: vec![32, 16], data: vec![0.0; 512] };
        assert!(distance(&other_shape, &tensor(1, 0.0)).is_infinite());
    }
}
