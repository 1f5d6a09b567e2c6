//! Random weights of a shape, made where the backend can make them fastest.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use shared::spec::ModelSpec;
use shared::weights::HostTensor;

use crate::cpu::CpuOps;
use crate::cuda::{CudaOps, StageTimes};
use crate::model::{Weights, heads};
use crate::ops::{Heads, HostLinear, LayerParams, LayerWeights, Ops, OpsError, RestWeights};

/// A backend that can be measured: makes weights that were never on disk, and reports what it used.
pub(super) trait Measured: Ops {
    fn linear_weight(
        &mut self,
        rows: usize,
        columns: usize,
        bias: bool,
        seed: u64,
    ) -> Result<Self::Weight, OpsError>;
    fn embedding_weight(&mut self, vocab: usize, hidden: usize, seed: u64) -> Result<Self::Weight, OpsError>;

    /// Waits for computing, not for pieces on their way.
    fn finish_computing(&mut self) -> Result<(), OpsError>;

    /// Device memory taken now and at most.
    fn memory_bytes(&self) -> Option<(usize, usize)> {
        None
    }

    /// Starts a new memory peak.
    fn reset_peak(&mut self) {}

    /// Turns stage times on or off.
    fn profile(&mut self, _on: bool) {}

    /// Stage times since the last call.
    fn stage_times(&mut self) -> Result<Option<StageTimes>, OpsError> {
        Ok(None)
    }

    /// Rate of a large matrix product, in TFLOP/s.
    fn ceiling_tflops(&mut self) -> Result<Option<f64>, OpsError> {
        Ok(None)
    }
}

impl Measured for CudaOps {
    fn linear_weight(
        &mut self,
        rows: usize,
        columns: usize,
        bias: bool,
        seed: u64,
    ) -> Result<Self::Weight, OpsError> {
        self.random_linear(rows, columns, bias, seed)
    }

    fn embedding_weight(&mut self, vocab: usize, hidden: usize, seed: u64) -> Result<Self::Weight, OpsError> {
        self.random_embedding(vocab, hidden, seed)
    }

    fn finish_computing(&mut self) -> Result<(), OpsError> {
        CudaOps::finish_computing(self)
    }

    fn memory_bytes(&self) -> Option<(usize, usize)> {
        let usage = self.usage();
        Some((usage.device_bytes, usage.peak_device_bytes))
    }

    fn reset_peak(&mut self) {
        CudaOps::reset_peak(self);
    }

    fn profile(&mut self, on: bool) {
        CudaOps::profile(self, on);
    }

    fn stage_times(&mut self) -> Result<Option<StageTimes>, OpsError> {
        self.take_stage_times().map(Some)
    }

    fn ceiling_tflops(&mut self) -> Result<Option<f64>, OpsError> {
        self.measure_product((8192, 8192, 8192), false, 10).map(|rate| Some(rate.tflops))
    }
}

impl Measured for CpuOps {
    fn linear_weight(
        &mut self,
        rows: usize,
        columns: usize,
        bias: bool,
        seed: u64,
    ) -> Result<Self::Weight, OpsError> {
        let weights = vec![uniform(rows, columns, (3.0 / columns as f32).sqrt(), seed)];
        let biases = if bias {
            vec![HostTensor::F32 { shape: vec![rows], data: vec![0.0; rows] }]
        } else {
            Vec::new()
        };
        self.upload_linear(HostLinear { weights, biases })
    }

    fn embedding_weight(&mut self, vocab: usize, hidden: usize, seed: u64) -> Result<Self::Weight, OpsError> {
        self.upload_embedding(uniform(vocab, hidden, 1.7, seed))
    }

    fn finish_computing(&mut self) -> Result<(), OpsError> {
        self.synchronize()
    }
}

/// Every weight of a prefill of this shape.
pub(super) fn weights<O: Measured>(ops: &mut O, spec: &ModelSpec) -> Result<Weights<O>, OpsError> {
    let ones = || HostTensor::F32 { shape: vec![spec.hidden], data: vec![1.0; spec.hidden] };
    let (full, width) = (heads(spec), spec.n_heads * spec.head_dim);
    let mut seed = 1000;
    let mut linear = |ops: &mut O, rows, columns, bias| {
        seed += 1;
        ops.linear_weight(rows, columns, bias, seed)
    };
    let mut layers = Vec::new();
    for layer in 0..spec.n_layers {
        let last = layer + 1 == spec.n_layers;
        let heads = Heads { n_heads: if last { 0 } else { full.n_heads }, ..full };
        let attention_norm = ops.upload_norm(ones())?;
        let qkv = linear(ops, heads.columns(), spec.hidden, spec.attention_bias)?;
        let rest = if last {
            None
        } else {
            Some(RestWeights {
                output: linear(ops, spec.hidden, width, false)?,
                mlp_norm: ops.upload_norm(ones())?,
                gate_up: linear(ops, 2 * spec.intermediate, spec.hidden, spec.mlp_bias)?,
                down: linear(ops, spec.hidden, spec.intermediate, spec.mlp_bias)?,
            })
        };
        layers.push(LayerWeights { attention_norm, qkv, heads, rest });
    }
    let embedding = ops.embedding_weight(spec.vocab_size, spec.hidden, 999)?;
    let params = LayerParams { rms_norm_eps: spec.rms_norm_eps, window_tokens: None };
    Ok(Weights { embedding, layers, params })
}

fn uniform(rows: usize, columns: usize, bound: f32, seed: u64) -> HostTensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let data = (0..rows * columns).map(|_| bound * (2.0 * rng.random::<f32>() - 1.0)).collect();
    HostTensor::F32 { shape: vec![rows, columns], data }
}
