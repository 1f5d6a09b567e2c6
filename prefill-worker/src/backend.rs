//! Choosing what computes.

use shared::spec::ModelSpec;
use shared::weights::TensorSource;

use crate::cpu::CpuOps;
use crate::cuda::{self, CudaOptions};
use crate::engine::AnyForward;
use crate::forward::Forward;
use crate::model::LoadError;
use crate::ops::{Ops, OpsError};
use crate::settings::BackendChoice;

/// What a backend is opened with.
#[derive(Debug, Clone)]
pub struct BackendOptions {
    /// Which one.
    pub choice: BackendChoice,
    /// Threads of the CPU backend; 0 is one per core.
    pub threads: usize,
    /// Tokens per chunk; `None` leaves it to the backend.
    pub chunk_tokens: Option<usize>,
    /// Options of the CUDA backend.
    pub cuda: CudaOptions,
}

/// Opens the chosen backend and puts the model on it. The text says what was chosen and why.
///
/// # Errors
/// [`LoadError`]: no usable GPU where one was demanded, or a model that cannot be read or does not fit.
pub fn load(
    options: &BackendOptions,
    spec: &ModelSpec,
    source: &dyn TensorSource,
) -> Result<(Box<dyn AnyForward>, String), LoadError> {
    let cpu = |reason: String| on(CpuOps::new(options.threads)?, options, &reason, spec, source);
    match options.choice {
        BackendChoice::Cpu => cpu("as configured".into()),
        BackendChoice::Cuda => on(cuda::open(&options.cuda)?, options, "as configured", spec, source),
        BackendChoice::Auto => match cuda::open(&options.cuda) {
            Ok(ops) => on(ops, options, "a usable GPU was found", spec, source),
            Err(reason) => cpu(format!("no usable GPU: {}", brief(&reason))),
        },
    }
}

fn on<O: Ops>(
    ops: O,
    options: &BackendOptions,
    reason: &str,
    spec: &ModelSpec,
    source: &dyn TensorSource,
) -> Result<(Box<dyn AnyForward>, String), LoadError> {
    let about = format!("{}: {reason}", ops.describe());
    let chunk_tokens = options.chunk_tokens.unwrap_or_else(|| ops.preferred_chunk_tokens());
    let forward = Forward::load(ops, spec, source, chunk_tokens)?;
    Ok((Box::new(forward), about))
}

/// The first line of an error, short enough for a greeting.
fn brief(error: &OpsError) -> String {
    error.to_string().lines().next().unwrap_or_default().chars().take(200).collect()
}
