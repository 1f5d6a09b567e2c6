//! Reconstruction alone, from a file of attention inputs to a file of cache arrays.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as StoredDtype, TensorView};
use shared::control::{WorkerError, WorkerErrorCode};
use shared::hexbytes::Hex;
use shared::layout::Dtype;

use super::run::{Runner, worker_error};
use crate::forward::Target;
use crate::ops::{Ops, Piece, Sink, SinkClosed};

/// Keeps a copy of every piece: a backend's own bytes may be from a small pool that the next pieces need.
#[derive(Default)]
struct Collect(Mutex<Vec<Piece>>);

impl Sink for Collect {
    fn deliver(&self, piece: Piece) -> Result<(), SinkClosed> {
        let keys = Bytes::copy_from_slice(&piece.keys);
        let values = Bytes::copy_from_slice(&piece.values);
        self.0.lock().push(Piece { keys, values, ..piece });
        Ok(())
    }
}

impl<O: Ops> Runner<O> {
    pub(super) fn reconstruct(
        &mut self,
        fingerprint: &Hex<32>,
        input: &Path,
        output: &Path,
    ) -> Result<(), WorkerError> {
        let decoder = self.decoders.find(fingerprint)?;
        let bytes = std::fs::read(input).map_err(|e| invalid(format!("{}: {e}", input.display())))?;
        let tensors =
            SafeTensors::deserialize(&bytes).map_err(|e| invalid(format!("{}: {e}", input.display())))?;
        let inputs = (0..self.forward.n_layers())
            .map(|layer| attention_input(&tensors, layer, self.spec.hidden))
            .collect::<Result<Vec<_>, _>>()?;
        let tokens = inputs.iter().map(|x| x.len() / self.spec.hidden).max().unwrap_or(0);
        let mut sequence =
            self.forward.begin(tokens, &decoder.reconstruct).map_err(|e| worker_error(&e.into()))?;
        let collect = Arc::new(Collect::default());
        let target = Target {
            sink: collect.clone(),
            tokens: 0..tokens,
            // One piece per array: no border within it.
            block_tokens: tokens.max(1),
            dtypes: decoder.dtypes.clone(),
        };
        for (layer, input) in inputs.iter().enumerate() {
            let made =
                self.forward.reconstruct_layer(&mut sequence, layer, input, &decoder.reconstruct, &target);
            made.map_err(|e| worker_error(&e))?;
        }
        self.forward.ops.synchronize().map_err(|e| worker_error(&e.into()))?;
        let pieces = std::mem::take(&mut *collect.0.lock());
        let heads = self.forward.heads();
        write(output, &pieces, &decoder.dtypes, [heads.n_kv_heads, tokens, heads.head_dim])
    }
}

fn attention_input(tensors: &SafeTensors<'_>, layer: usize, hidden: usize) -> Result<Vec<f32>, WorkerError> {
    let name = format!("layers.{layer}.attn_input");
    let view = tensors.tensor(&name).map_err(|e| invalid(format!("{name}: {e}")))?;
    if view.dtype() != StoredDtype::F32 || view.shape().len() != 2 || view.shape()[1] != hidden {
        return Err(invalid(format!(
            "{name} is {:?} {:?}, not F32 [tokens, {hidden}]",
            view.dtype(),
            view.shape()
        )));
    }
    let (words, _) = view.data().as_chunks::<4>();
    Ok(words.iter().map(|w| f32::from_le_bytes(*w)).collect())
}

fn write(path: &Path, pieces: &[Piece], dtypes: &[Dtype], shape: [usize; 3]) -> Result<(), WorkerError> {
    let engine = |e: String| WorkerError::new(WorkerErrorCode::Engine, format!("{}: {e}", path.display()));
    let mut views = HashMap::new();
    for piece in pieces {
        let dtype = match dtypes[piece.layer] {
            Dtype::F32 => StoredDtype::F32,
            Dtype::F16 => StoredDtype::F16,
            Dtype::Bf16 => StoredDtype::BF16,
        };
        for (part, bytes) in [("k", &piece.keys), ("v", &piece.values)] {
            let view = TensorView::new(dtype, shape.to_vec(), bytes).map_err(|e| engine(e.to_string()))?;
            views.insert(format!("layers.{}.{part}", piece.layer), view);
        }
    }
    let encoded = safetensors::serialize(&views, None).map_err(|e| engine(e.to_string()))?;
    std::fs::write(path, encoded).map_err(|e| engine(e.to_string()))
}

fn invalid(message: String) -> WorkerError {
    WorkerError::new(WorkerErrorCode::InvalidRequest, message)
}
