//! K/V projection weights for a prefill worker that has others.

use safetensors::tensor::{Dtype, TensorView};
use shared::control::{DecodeEvent, Responder, WorkerError, WorkerErrorCode};
use shared::weights::{TensorSource, WeightsError};
use std::sync::Arc;

/// Sends one safetensors message per layer, then the end.
pub(super) async fn send(source: Arc<dyn TensorSource>, n_layers: usize, responder: Responder<DecodeEvent>) {
    for layer in 0..n_layers {
        let source = source.clone();
        let encoded = match tokio::task::spawn_blocking(move || encode(&*source, layer)).await {
            Ok(encoded) => encoded,
            Err(panic) => Err(panic.to_string()),
        };
        match encoded {
            Ok(bytes) if responder.send_binary(&bytes).await => {}
            Ok(_) => return,
            Err(text) => {
                let error = WorkerError::new(WorkerErrorCode::Engine, format!("layer {layer}: {text}"));
                responder.send(&DecodeEvent::Error(error)).await;
                return;
            }
        }
    }
    responder.send(&DecodeEvent::ProjectionsEnd).await;
}

/// The effective f32 projections of one layer.
fn encode(source: &dyn TensorSource, layer: usize) -> Result<Vec<u8>, String> {
    let mut tensors = Vec::new();
    for module in ["k_proj", "v_proj"] {
        for kind in ["weight", "bias"] {
            let name = format!("model.layers.{layer}.self_attn.{module}.{kind}");
            if kind == "bias" && source.info(&name).is_none() {
                continue;
            }
            let tensor = source.load(&name).map_err(|e: WeightsError| e.to_string())?;
            let shape = tensor.shape().to_vec();
            let bytes: Vec<u8> = tensor.into_f32().iter().flat_map(|x| x.to_le_bytes()).collect();
            tensors.push((format!("{module}.{kind}"), shape, bytes));
        }
    }
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>, safetensors::SafeTensorError>>();
    views.and_then(|views| safetensors::serialize(views, None)).map_err(|e| e.to_string())
}
