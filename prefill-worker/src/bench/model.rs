//! `pd-prefill bench`: a whole prefill of a shape, with the decoder's cache streamed out or not.

use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use rand::RngExt;
use serde::Serialize;
use shared::layout::{DEFAULT_BLOCK_TOKENS, Dtype};
use shared::spec::ModelSpec;
use tokio_util::sync::CancellationToken;

use super::counting::CountingSink;
use super::random::{self, Measured};
use super::shape;
use super::{ToolError, say};
use crate::cpu::CpuOps;
use crate::cuda::{CudaOptions, Precision, StageTimes, open};
use crate::forward::{Forward, ForwardError, Target};
use crate::model::{heads, inverse_frequencies};
use crate::reconstruct::FullKv;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// llama-3.1-8b, qwen2.5-7b, qwen3-32b, smollm2-135m, or a Hugging Face config.json.
    #[arg(long, default_value = "llama-3.1-8b")]
    shape: String,
    /// Prompt lengths.
    #[arg(long, value_delimiter = ',', default_value = "2048,8192")]
    tokens: Vec<usize>,
    /// Tokens per chunk; 0 lets the backend choose.
    #[arg(long, default_value_t = 0)]
    chunk: usize,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = Backend::Cuda)]
    backend: Backend,
    /// Element type on the GPU.
    #[arg(long, value_enum, default_value_t = Precision::Bf16)]
    precision: Precision,
    /// Where the cache goes: nowhere, or over loopback TCP to a receiver that checks and counts it. With both, runs
    /// alternate.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "null,tcp")]
    sink: Vec<SinkKind>,
    /// TCP connections of one transfer.
    #[arg(long, default_value_t = 8)]
    connections: usize,
    /// Give every layer a decoder projection of its own, as for a decoder of another quantization: the extra keys and
    /// values are computed in the same pass, and they are what is sent.
    #[arg(long)]
    decoder_projections: bool,
    /// Element type of the decoder's cache.
    #[arg(long, value_enum, default_value_t = CacheElements::F16)]
    cache_dtype: CacheElements,
    /// Timed runs of each kind, after one warm-up; the median counts.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
    /// Take orders from standard input, `TOKENS null|tcp` a line, and answer each with one run as JSON. Lets another
    /// program alternate runs of its own with these.
    #[arg(long)]
    driven: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Backend {
    Cpu,
    Cuda,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CacheElements {
    F32,
    F16,
    Bf16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SinkKind {
    Null,
    Tcp,
}

/// One line of results.
#[derive(Debug, Serialize)]
struct Row {
    shape: String,
    backend: String,
    tokens: usize,
    chunk_tokens: usize,
    sink: String,
    runs: usize,
    /// Median, slowest and fastest, from the first call to the receiver's commit.
    tokens_per_s: [f64; 3],
    median_ms: f64,
    /// By the operations this prefill needs, and by those of every layer computed whole.
    tflops: f64,
    tflops_whole_model: f64,
    /// Of the rate of a large matrix product in this process.
    share_of_ceiling: Option<f64>,
    ceiling_tflops: Option<f64>,
    /// From the end of computing to the receiver's commit, median.
    commit_lag_ms: f64,
    payload_bytes: u64,
    /// A further run with events around each operation.
    stages: Option<StageTimes>,
    /// Most device memory at once, and what of it is neither weights nor the running cache.
    peak_device_bytes: Option<usize>,
    peak_beyond_weights_and_cache_bytes: Option<usize>,
}

/// One run.
#[derive(Debug, Serialize)]
struct Run {
    total_ms: f64,
    commit_lag_ms: f64,
    payload_bytes: u64,
}

pub(super) fn run(args: &BenchArgs) -> Result<(), ToolError> {
    let spec = shape::resolve(&args.shape)?;
    match args.backend {
        Backend::Cpu => bench(CpuOps::new(0)?, &spec, args),
        Backend::Cuda => {
            let precision = args.precision;
            bench(open(&CudaOptions { precision, ..CudaOptions::default() })?, &spec, args)
        }
    }
}

fn bench<O: Measured>(mut ops: O, spec: &ModelSpec, args: &BenchArgs) -> Result<(), ToolError> {
    let ceiling_tflops = ops.ceiling_tflops()?;
    let chunk = if args.chunk == 0 { ops.preferred_chunk_tokens() } else { args.chunk };
    let weights = random::weights(&mut ops, spec)?;
    let weight_bytes = ops.memory_bytes().map(|(now, _)| now);
    let longest = args.tokens.iter().copied().max().unwrap_or(1);
    let mut forward = Forward::with_weights(ops, spec, weights, chunk.min(longest))?;
    let inv_freq = inverse_frequencies(&spec.rope, spec.head_dim);
    let projections = projections(&mut forward.ops, spec, args.decoder_projections)?;
    let reconstruct = FullKv::new(&mut forward.ops, heads(spec), &inv_freq, projections)?;
    if args.driven {
        return driven(&mut forward, &reconstruct, spec, args);
    }
    for &tokens in &args.tokens {
        let mut bench =
            Bench { forward: &mut forward, reconstruct: &reconstruct, spec, args, ids: ids(tokens, spec) };
        for row in bench.rows(ceiling_tflops, weight_bytes)? {
            print(&row, args.json)?;
        }
    }
    Ok(())
}

/// A decoder's own key and value projections, or none.
fn projections<O: Measured>(
    ops: &mut O,
    spec: &ModelSpec,
    wanted: bool,
) -> Result<Vec<Option<Arc<O::Weight>>>, ToolError> {
    let rows = 2 * spec.n_kv_heads * spec.head_dim;
    let one = |layer: usize| {
        let weight =
            wanted.then(|| ops.linear_weight(rows, spec.hidden, spec.attention_bias, 5000 + layer as u64));
        Ok(weight.transpose()?.map(Arc::new))
    };
    (0..spec.n_layers).map(one).collect()
}

/// One run per line of standard input.
fn driven<O: Measured>(
    forward: &mut Forward<O>,
    reconstruct: &FullKv<O>,
    spec: &ModelSpec,
    args: &BenchArgs,
) -> Result<(), ToolError> {
    say(&format!("{{\"ready\":\"{}\"}}", forward.ops.describe()))?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let order = line.split_once(' ').and_then(|(tokens, sink)| {
            Some((tokens.parse::<usize>().ok()?, SinkKind::from_str(sink.trim(), true).ok()?))
        });
        let Some((tokens, sink)) = order else {
            return Err(ToolError::Argument(format!("not an order: {line:?}")));
        };
        let run = Bench { forward, reconstruct, spec, args, ids: ids(tokens, spec) }.once(sink)?;
        say(&serde_json::to_string(&run)?)?;
    }
    Ok(())
}

struct Bench<'a, O: Measured> {
    forward: &'a mut Forward<O>,
    reconstruct: &'a FullKv<O>,
    spec: &'a ModelSpec,
    args: &'a BenchArgs,
    ids: Vec<u32>,
}

impl<O: Measured> Bench<'_, O> {
    fn rows(
        &mut self,
        ceiling_tflops: Option<f64>,
        weight_bytes: Option<usize>,
    ) -> Result<Vec<Row>, ToolError> {
        let sinks = self.args.sink.clone();
        let mut runs: Vec<Vec<Run>> = sinks.iter().map(|_| Vec::new()).collect();
        self.forward.ops.reset_peak();
        for round in 0..=self.args.runs {
            for (kind, runs) in sinks.iter().zip(&mut runs) {
                let run = self.once(*kind)?;
                if round > 0 {
                    runs.push(run);
                }
            }
        }
        let peak = self.forward.ops.memory_bytes().map(|(_, peak)| peak);
        let mut rows = Vec::new();
        for (kind, runs) in sinks.iter().zip(&runs) {
            self.forward.ops.profile(true);
            self.once(*kind)?;
            let stages = self.forward.ops.stage_times()?;
            self.forward.ops.profile(false);
            rows.push(self.row(*kind, runs, stages, ceiling_tflops, peak, weight_bytes));
        }
        Ok(rows)
    }

    fn once(&mut self, kind: SinkKind) -> Result<Run, ToolError> {
        let counting = match kind {
            SinkKind::Null => None,
            SinkKind::Tcp => Some(Arc::new(CountingSink::start(self.args.connections)?)),
        };
        let target = counting.clone().map(|sink| Target {
            sink,
            tokens: 0..self.ids.len(),
            block_tokens: DEFAULT_BLOCK_TOKENS as usize,
            dtypes: vec![self.dtype(); self.spec.n_layers].into(),
        });
        let cancel = CancellationToken::new();
        let start = Instant::now();
        let mut sequence = self.forward.begin(self.ids.len(), self.reconstruct)?;
        for chunk in self.ids.chunks(self.forward.chunk_tokens()) {
            self.forward
                .chunk(&mut sequence, chunk, self.reconstruct, target.as_ref(), &cancel)
                .map_err(failed)?;
        }
        self.forward.ops.finish_computing()?;
        let computed = start.elapsed();
        self.forward.ops.synchronize()?;
        if let Some(sink) = &counting {
            sink.commit()?;
        }
        let total = start.elapsed();
        let payload_bytes = counting.map_or(Ok(0), |sink| sink.finish().map(|(_, bytes)| bytes))?;
        Ok(Run {
            total_ms: total.as_secs_f64() * 1e3,
            commit_lag_ms: (total - computed).as_secs_f64() * 1e3,
            payload_bytes,
        })
    }

    fn row(
        &self,
        kind: SinkKind,
        runs: &[Run],
        stages: Option<StageTimes>,
        ceiling_tflops: Option<f64>,
        peak: Option<usize>,
        weight_bytes: Option<usize>,
    ) -> Row {
        let tokens = self.ids.len();
        let times = sorted(runs.iter().map(|run| run.total_ms));
        let median_ms = times[times.len() / 2];
        let rate = |ms: f64| tokens as f64 / ms * 1e3;
        let tflops = shape::prefill_flops(self.spec, tokens) / median_ms / 1e9;
        let lags = sorted(runs.iter().map(|run| run.commit_lag_ms));
        let cache_bytes = self.spec.n_layers * 2 * self.spec.n_kv_heads * self.spec.head_dim * tokens * 2;
        Row {
            shape: self.spec.name.clone(),
            backend: self.forward.ops.describe(),
            tokens,
            chunk_tokens: self.forward.chunk_tokens(),
            sink: format!("{kind:?}").to_lowercase(),
            runs: runs.len(),
            tokens_per_s: [rate(median_ms), rate(times[times.len() - 1]), rate(times[0])],
            median_ms,
            tflops,
            tflops_whole_model: shape::whole_model_flops(self.spec, tokens) / median_ms / 1e9,
            share_of_ceiling: ceiling_tflops.map(|ceiling| tflops / ceiling),
            ceiling_tflops,
            commit_lag_ms: lags[lags.len() / 2],
            payload_bytes: runs[0].payload_bytes,
            stages,
            peak_device_bytes: peak,
            peak_beyond_weights_and_cache_bytes: peak
                .zip(weight_bytes)
                .map(|(peak, weights)| peak.saturating_sub(weights + cache_bytes)),
        }
    }

    fn dtype(&self) -> Dtype {
        match self.args.cache_dtype {
            CacheElements::F32 => Dtype::F32,
            CacheElements::F16 => Dtype::F16,
            CacheElements::Bf16 => Dtype::Bf16,
        }
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    if values.is_empty() {
        values.push(f64::NAN);
    }
    values.sort_by(f64::total_cmp);
    values
}

fn ids(tokens: usize, spec: &ModelSpec) -> Vec<u32> {
    let mut rng = rand::rng();
    let limit = u32::try_from(spec.vocab_size).unwrap_or(u32::MAX);
    (0..tokens).map(|_| rng.random_range(0..limit)).collect()
}

pub(super) fn failed(error: ForwardError) -> ToolError {
    match error {
        ForwardError::Ops(error) => error.into(),
        other => ToolError::Argument(other.to_string()),
    }
}

fn print(row: &Row, json: bool) -> Result<(), ToolError> {
    if json {
        return Ok(say(&serde_json::to_string(row)?)?);
    }
    let [median, low, high] = row.tokens_per_s;
    say(&format!(
        "{} {} tokens={} chunk={} sink={}: {median:.0} tok/s ({low:.0}..{high:.0}), {:.1} ms, {:.1} TFLOP/s ({:.1} whole \
         model), commit {:.2} ms after computing, payload {} MiB",
        row.shape,
        row.backend,
        row.tokens,
        row.chunk_tokens,
        row.sink,
        row.median_ms,
        row.tflops,
        row.tflops_whole_model,
        row.commit_lag_ms,
        row.payload_bytes >> 20,
    ))?;
    if let Some(stages) = &row.stages {
        say(&format!("    {stages:?}"))?;
    }
    if let (Some(peak), Some(beyond)) = (row.peak_device_bytes, row.peak_beyond_weights_and_cache_bytes) {
        say(&format!("    peak {} MiB, beyond weights and cache {} MiB", peak >> 20, beyond >> 20))?;
    }
    Ok(())
}
