//! Caches in files, for `pd-bridge verify`.

use super::Core;
use super::generate::{cancelled, computed_here, wait};
use super::requests::{Prepared, Running};
use super::{invalid, serving};
use crate::engine::{InspectJob, Inspection, Served};
use safetensors::tensor::{Dtype as TensorDtype, TensorView};
use shared::control::{DecodeEvent, DecodeReceipt, Responder, WorkerError, WorkerErrorCode};
use shared::layout::{CacheLayout, Dtype, LayerCache};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Longest wait for a transfer: its own idle timeout ends it much sooner.
const TRANSFER_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// The file to write; only a plain name inside the inspection folder will do.
pub(super) fn target(dir: Option<&Path>, file: &str) -> Result<PathBuf, WorkerError> {
    let dir = dir.ok_or_else(|| invalid("this worker was started without an inspection folder"))?;
    let mut components = Path::new(file).components();
    match (components.next(), components.next()) {
        (Some(Component::Normal(name)), None) if name == file => Ok(dir.join(name)),
        _ => Err(invalid(format!("`{file}` is not a plain file name"))),
    }
}

pub(super) async fn run(
    core: Arc<Core>,
    prepared: Prepared,
    running: Running,
    path: PathBuf,
    responder: Responder<DecodeEvent>,
) {
    let done = tokio::select! {
        biased;
        () = running.cancel.cancelled() => Err(cancelled()),
        done = inspect(&core, prepared, &running, path) => done,
    };
    drop(running);
    let event = done.map_or_else(DecodeEvent::Error, |receipt| DecodeEvent::Inspected(Box::new(receipt)));
    responder.send(&event).await;
}

async fn inspect(
    core: &Core,
    prepared: Prepared,
    running: &Running,
    path: PathBuf,
) -> Result<DecodeReceipt, WorkerError> {
    let Prepared { tokens, lease, transfer, .. } = prepared;
    let waiting = Instant::now();
    let bridged = transfer.is_some();
    let received = wait(transfer, TRANSFER_LIMIT).await;
    let (mut served, mut receipt) = serving::gather(tokens.len(), core.parts.block_tokens, lease, received);
    if !bridged {
        // What the model computes itself is wanted, not what happens to be in the store.
        served = Served::default();
        computed_here(&mut receipt);
    }
    receipt.wait_ms = waiting.elapsed().as_secs_f64() * 1e3;
    let (reply, result) = oneshot::channel();
    core.parts.engine.inspect(InspectJob {
        prompt: tokens,
        served,
        receipt,
        reply,
        cancel: running.cancel.clone(),
        submitted: Instant::now(),
    });
    let failed = |text: String| WorkerError::new(WorkerErrorCode::Engine, text);
    let inspection = result.await.map_err(|_| failed("the engine is gone".to_owned()))?;
    let inspection = inspection.map_err(|e| failed(e.to_string()))?;
    let receipt = inspection.receipt.clone();
    let layout = core.parts.hello.cache.as_ref().map(|cache| cache.layout.clone());
    let layout = layout.ok_or_else(|| failed("this worker publishes no cache layout".to_owned()))?;
    let written = tokio::task::spawn_blocking(move || write(&path, &layout, &inspection)).await;
    match written {
        Ok(Ok(())) => Ok(receipt),
        Ok(Err(error)) => Err(failed(error.to_string())),
        Err(panic) => Err(failed(panic.to_string())),
    }
}

fn write(
    path: &Path,
    layout: &CacheLayout,
    inspection: &Inspection,
) -> Result<(), safetensors::SafeTensorError> {
    let as_bytes = |x: &[f32]| bytemuck::cast_slice::<f32, u8>(x).to_vec();
    let inputs: Vec<Vec<u8>> = inspection.attention_inputs.iter().map(|x| as_bytes(x)).collect();
    let logits = as_bytes(&inspection.logits);
    let tokens = inspection.cache.tokens;
    let mut tensors = Vec::new();
    for (i, (layer, bytes)) in layout.layers.iter().zip(&inspection.cache.layers).enumerate() {
        let (shape, dtype) = shape_of(layer, tokens);
        for (name, part) in ["k", "v"].iter().zip(&bytes.parts) {
            tensors.push((format!("layers.{i}.{name}"), TensorView::new(dtype, shape.clone(), part)?));
        }
    }
    for (i, input) in inputs.iter().enumerate() {
        let hidden = input.len() / size_of::<f32>() / tokens.max(1);
        let view = TensorView::new(TensorDtype::F32, vec![tokens, hidden], input)?;
        tensors.push((format!("layers.{i}.attn_input"), view));
    }
    tensors.push((
        "logits".to_owned(),
        TensorView::new(TensorDtype::F32, vec![inspection.logits.len()], &logits)?,
    ));
    safetensors::serialize_to_file(tensors, None, path)
}

fn shape_of(layer: &LayerCache, tokens: usize) -> (Vec<usize>, TensorDtype) {
    match *layer {
        LayerCache::Full { n_kv_heads, head_dim, dtype } => {
            let dtype = match dtype {
                Dtype::F32 => TensorDtype::F32,
                Dtype::F16 => TensorDtype::F16,
                Dtype::Bf16 => TensorDtype::BF16,
            };
            (vec![n_kv_heads as usize, tokens, head_dim as usize], dtype)
        }
        _ => (vec![0], TensorDtype::F32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_inside_the_folder() {
        let dir = Path::new("inspections");
        assert_eq!(target(Some(dir), "a.safetensors").unwrap(), dir.join("a.safetensors"));
        for bad in ["", ".", "..", "/etc/passwd", "a/b", "../a", "a/", "./a", "a/.."] {
            assert!(target(Some(dir), bad).is_err(), "{bad}");
        }
        assert!(target(None, "a").is_err());
    }
}
