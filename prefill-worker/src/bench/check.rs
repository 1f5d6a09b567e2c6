//! `pd-prefill check-kernels`.

use std::path::PathBuf;

use clap::Args;

use super::{ToolError, say};
use crate::cuda::{CheckReport, CheckScope, CudaOptions, check_compile, check_device};

/// Arguments of `check-kernels`.
#[derive(Debug, Args)]
pub struct CheckKernelsArgs {
    /// Folder with libnvrtc, searched before the usual places; may be repeated.
    #[arg(long)]
    nvrtc_dir: Vec<PathBuf>,
    /// Architectures to compile for.
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90a,sm_121")]
    arch: Vec<String>,
    /// Run on the GPU too.
    #[arg(long)]
    device: bool,
    /// Skip the compile check.
    #[arg(long)]
    no_compile: bool,
    /// Small shapes only, for use under a memory checker.
    #[arg(long)]
    quick: bool,
    /// Leave out what runs through cublasLt, for use under a race checker.
    #[arg(long)]
    own_kernels_only: bool,
    /// Seed of the random inputs; another one every time if left out.
    #[arg(long)]
    seed: Option<u64>,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &CheckKernelsArgs) -> Result<(), ToolError> {
    let mut reports = Vec::new();
    let mut outcome = Ok(());
    if !args.no_compile {
        reports.extend(check_compile(&args.nvrtc_dir, &args.arch)?);
    }
    if args.device {
        let seed = args.seed.unwrap_or_else(rand::random);
        say(&format!("seed {seed}"))?;
        let options = CudaOptions { library_dirs: args.nvrtc_dir.clone(), ..CudaOptions::default() };
        let scope = CheckScope { quick: args.quick, own_kernels_only: args.own_kernels_only };
        outcome = check_device(&options, seed, scope, &mut reports);
    }
    for report in &reports {
        say(&line(report, args.json)?)?;
    }
    outcome?;
    match reports.iter().filter(|report| !report.passed).count() {
        0 => Ok(say(&format!("{} checks passed", reports.len()))?),
        failed => Err(ToolError::ChecksFailed(failed, reports.len())),
    }
}

fn line(report: &CheckReport, json: bool) -> Result<String, ToolError> {
    if json {
        return Ok(serde_json::to_string(report)?);
    }
    let verdict = if report.passed { "ok  " } else { "FAIL" };
    Ok(format!("{verdict} error {:.2e} (limit {:.1e})  {}", report.error, report.limit, report.name))
}
