//! `pd-prefill compare`: the same prompts through several backends, every cache array against the first's.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use clap::Args;
use half::f16;
use parking_lot::Mutex;
use safetensors::tensor::{Dtype as FileDtype, TensorView};
use serde::Serialize;
use shared::layout::{DEFAULT_BLOCK_TOKENS, Dtype};
use shared::model::Model;
use tokio_util::sync::CancellationToken;

use super::model::{Backend, failed};
use super::{ToolError, say};
use crate::cpu::CpuOps;
use crate::cuda::{CudaOptions, Precision, open};
use crate::forward::{Forward, Target};
use crate::model::{LoadError, heads, inverse_frequencies};
use crate::ops::{Ops, Piece, Sink, SinkClosed};
use crate::reconstruct::FullKv;

/// Arguments of `compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Backends; the first is the reference.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cpu,cuda")]
    backends: Vec<Backend>,
    /// Element types on the GPU, each compared for itself.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bf16")]
    precision: Vec<Precision>,
    /// GGUF file or model folder.
    #[arg(long)]
    model: PathBuf,
    /// A prompt as text; may be repeated.
    #[arg(long)]
    prompt_file: Vec<PathBuf>,
    /// Prompts as a JSON array of arrays of token ids.
    #[arg(long)]
    tokens_file: Option<PathBuf>,
    /// Tokens per chunk; small ones put several chunks into a prompt.
    #[arg(long, default_value_t = 256)]
    chunk: usize,
    /// Largest relative error allowed for an array.
    #[arg(long, default_value_t = 1e-2)]
    limit: f64,
    /// Write the last backend's arrays here, one `prompt-N.safetensors` in f16 for each prompt.
    #[arg(long)]
    save_dir: Option<PathBuf>,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
}

/// One prompt on one backend against the reference.
#[derive(Debug, Serialize)]
struct Difference {
    prompt: usize,
    tokens: usize,
    backend: String,
    arrays: usize,
    /// `‖a − b‖ / ‖b‖`: of the worst array, and the median over arrays.
    worst: f64,
    worst_array: String,
    median: f64,
}

/// Keys and values of every layer, `[n_kv_heads, tokens, head_dim]`.
struct Arrays {
    shape: [usize; 3],
    layers: Vec<[Vec<f32>; 2]>,
}

pub(super) fn run(args: &CompareArgs) -> Result<(), ToolError> {
    let model = Model::open(&args.model).map_err(|e| ToolError::Argument(e.to_string()))?;
    let prompts = prompts(args, &model)?;
    let mut all: Vec<(String, Vec<Arrays>)> = Vec::new();
    for backend in &args.backends {
        match backend {
            Backend::Cpu => all.push(read(CpuOps::new(0)?, &model, &prompts, args.chunk)?),
            Backend::Cuda => {
                for precision in &args.precision {
                    let options = CudaOptions { precision: *precision, ..CudaOptions::default() };
                    all.push(read(open(&options)?, &model, &prompts, args.chunk)?);
                }
            }
        }
    }
    let Some(((_, reference), others)) = all.split_first() else {
        return Err(ToolError::Argument("no backend was named".into()));
    };
    let mut failed = 0;
    for (backend, arrays) in others {
        for (prompt, (a, b)) in arrays.iter().zip(reference).enumerate() {
            let difference = a.difference(b, prompt, backend);
            failed += usize::from(difference.worst.is_nan() || difference.worst > args.limit);
            print(&difference, args.json)?;
        }
    }
    if let (Some(dir), Some((_, arrays))) = (&args.save_dir, all.last()) {
        std::fs::create_dir_all(dir)?;
        for (prompt, arrays) in arrays.iter().enumerate() {
            arrays.save(&dir.join(format!("prompt-{prompt}.safetensors")))?;
        }
    }
    match failed {
        0 => Ok(()),
        failed => Err(ToolError::ChecksFailed(failed, prompts.len() * others.len())),
    }
}

fn prompts(args: &CompareArgs, model: &Model) -> Result<Vec<Vec<u32>>, ToolError> {
    let mut prompts: Vec<Vec<u32>> = match &args.tokens_file {
        Some(file) => serde_json::from_slice(&std::fs::read(file)?)?,
        None => Vec::new(),
    };
    for file in &args.prompt_file {
        let text = std::fs::read_to_string(file)?;
        prompts.push(model.tokenizer.encode(&text, true).map_err(|e| ToolError::Argument(e.to_string()))?);
    }
    let limit = u32::try_from(model.spec.vocab_size).unwrap_or(u32::MAX);
    if prompts.is_empty() || prompts.iter().any(|p| p.is_empty() || p.iter().any(|id| *id >= limit)) {
        return Err(ToolError::Argument(
            "give prompts of at least one token of this model's vocabulary".into(),
        ));
    }
    Ok(prompts)
}

/// Every prompt through one backend.
fn read<O: Ops>(
    ops: O,
    model: &Model,
    prompts: &[Vec<u32>],
    chunk: usize,
) -> Result<(String, Vec<Arrays>), ToolError> {
    let spec = &model.spec;
    let mut forward =
        Forward::load(ops, spec, model.source.as_ref(), chunk).map_err(|error| match error {
            LoadError::Ops(error) => error.into(),
            other => ToolError::Argument(other.to_string()),
        })?;
    let inv_freq = inverse_frequencies(&spec.rope, spec.head_dim);
    let reconstruct = FullKv::new(&mut forward.ops, heads(spec), &inv_freq, vec![None; spec.n_layers])?;
    let mut all = Vec::new();
    for prompt in prompts {
        let collector = Arc::new(Collector(Mutex::new(Arrays::new(
            spec.n_layers,
            spec.n_kv_heads,
            prompt.len(),
            spec.head_dim,
        ))));
        let target = Target {
            sink: collector.clone(),
            tokens: 0..prompt.len(),
            block_tokens: DEFAULT_BLOCK_TOKENS as usize,
            dtypes: vec![Dtype::F32; spec.n_layers].into(),
        };
        let mut sequence = forward.begin(prompt.len(), &reconstruct)?;
        for tokens in prompt.chunks(forward.chunk_tokens()) {
            let cancel = CancellationToken::new();
            forward.chunk(&mut sequence, tokens, &reconstruct, Some(&target), &cancel).map_err(failed)?;
        }
        forward.ops.synchronize()?;
        let empty = Arrays::new(0, 0, 0, 0);
        all.push(std::mem::replace(&mut *collector.0.lock(), empty));
    }
    Ok((forward.ops.describe(), all))
}

/// Puts pieces where they belong.
struct Collector(Mutex<Arrays>);

impl Sink for Collector {
    fn deliver(&self, piece: Piece) -> Result<(), SinkClosed> {
        let mut arrays = self.0.lock();
        for (part, bytes) in [&piece.keys, &piece.values].into_iter().enumerate() {
            arrays.place(piece.layer, part, piece.tokens.start, piece.tokens.len(), bytes);
        }
        Ok(())
    }
}

impl Arrays {
    fn new(n_layers: usize, heads: usize, tokens: usize, head_dim: usize) -> Self {
        let array = || vec![f32::NAN; heads * tokens * head_dim];
        Self { shape: [heads, tokens, head_dim], layers: (0..n_layers).map(|_| [array(), array()]).collect() }
    }

    fn place(&mut self, layer: usize, part: usize, start: usize, count: usize, bytes: &Bytes) {
        let [_, tokens, head_dim] = self.shape;
        let values: Vec<f32> =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        for (head, rows) in values.chunks_exact(count * head_dim).enumerate() {
            let at = (head * tokens + start) * head_dim;
            self.layers[layer][part][at..at + rows.len()].copy_from_slice(rows);
        }
    }

    fn difference(&self, reference: &Self, prompt: usize, backend: &str) -> Difference {
        let mut errors = Vec::new();
        for (layer, (a, b)) in self.layers.iter().zip(&reference.layers).enumerate() {
            for (part, name) in ["keys", "values"].into_iter().enumerate() {
                errors.push((relative(&a[part], &b[part]), format!("layer {layer} {name}")));
            }
        }
        errors.sort_by(|x, y| x.0.total_cmp(&y.0));
        let (worst, worst_array) = errors.last().cloned().unwrap_or_default();
        Difference {
            prompt,
            tokens: self.shape[1],
            backend: backend.into(),
            arrays: errors.len(),
            worst,
            worst_array,
            median: errors.get(errors.len() / 2).map_or(f64::NAN, |e| e.0),
        }
    }

    fn save(&self, path: &Path) -> Result<(), ToolError> {
        let halves = |values: &[f32]| -> Vec<u8> {
            values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()
        };
        let data: Vec<(String, Vec<u8>)> = self
            .layers
            .iter()
            .enumerate()
            .flat_map(|(i, [k, v])| [(format!("{i}.keys"), halves(k)), (format!("{i}.values"), halves(v))])
            .collect();
        let views = data.iter().map(|(name, bytes)| {
            let view = TensorView::new(FileDtype::F16, self.shape.to_vec(), bytes);
            view.map(|view| (name.clone(), view))
        });
        let encode = || safetensors::serialize(views.collect::<Result<Vec<_>, _>>()?, None);
        let bytes = encode().map_err(|e| ToolError::Argument(format!("{}: {e}", path.display())))?;
        Ok(std::fs::write(path, bytes)?)
    }
}

/// NaN where something is missing or broken.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    let sum = |f: &dyn Fn(f64, f64) -> f64| {
        a.iter().zip(b).map(|(a, b)| f(f64::from(*a), f64::from(*b))).sum::<f64>()
    };
    (sum(&|a, b| (a - b) * (a - b)) / sum(&|_, b| b * b).max(f64::MIN_POSITIVE)).sqrt()
}

fn print(d: &Difference, json: bool) -> Result<(), ToolError> {
    let line = if json {
        serde_json::to_string(d)?
    } else {
        format!(
            "prompt {} ({} tokens), {} arrays on {}: worst {:.2e} ({}), median {:.2e}",
            d.prompt, d.tokens, d.arrays, d.backend, d.worst, d.worst_array, d.median
        )
    };
    Ok(say(&line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_land_in_their_rows_and_differences_show() {
        let mut a = Arrays::new(1, 2, 3, 1);
        let bytes =
            |values: &[f32]| Bytes::from(values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        for part in 0..2 {
            a.place(0, part, 0, 1, &bytes(&[1.0, 10.0]));
            a.place(0, part, 1, 2, &bytes(&[2.0, 3.0, 20.0, 30.0]));
        }
        assert_eq!(a.layers[0][1], [1.0, 2.0, 3.0, 10.0, 20.0, 30.0]);
        assert_eq!(a.difference(&a, 0, "same").worst, 0.0);
        let holes = Arrays::new(1, 2, 3, 1);
        assert!(holes.difference(&a, 0, "holes").worst.is_nan());
    }
}
