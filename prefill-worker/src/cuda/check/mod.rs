//! Checks of the kernels: that they compile for every architecture, and that they compute what a float64 reference
//! computes, on fresh random inputs, with outputs and unused memory poisoned beforehand.

mod attention;
mod elementwise;
mod linear;
mod reference;
mod sample;

use std::path::PathBuf;

use serde::Serialize;

use super::sources::all_units;
use super::{CudaOps, CudaOptions, Precision, library, nvrtc};
use crate::ops::OpsError;

/// Outcome of one check.
#[derive(Debug, Clone, Serialize)]
pub struct CheckReport {
    /// What was checked, with its shape.
    pub name: String,
    /// `‖out − reference‖ / ‖reference‖`; 0 where equality was checked.
    pub error: f64,
    /// Largest error allowed.
    pub limit: f64,
    /// Within the limit and free of NaN.
    pub passed: bool,
}

/// What to leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CheckScope {
    /// Small shapes only, for checkers that slow kernels down a thousandfold.
    pub quick: bool,
    /// Leave out what runs through cublasLt, whose own kernels alarm race checkers.
    pub own_kernels_only: bool,
}

impl CheckReport {
    pub(super) fn new(name: String, error: f64, limit: f64) -> Self {
        Self { name, error, limit, passed: error <= limit }
    }
}

/// Compiles every kernel for the named architectures; needs NVRTC, no GPU.
///
/// # Errors
/// [`OpsError`] with the compiler's log for the first kernel that does not compile, or when NVRTC is missing.
pub fn check_compile(nvrtc_dirs: &[PathBuf], architectures: &[String]) -> Result<Vec<CheckReport>, OpsError> {
    library::preload_nvrtc(nvrtc_dirs)?;
    let mut reports = Vec::new();
    for architecture in architectures {
        for unit in all_units(architecture) {
            let cubin = nvrtc::compile(unit.name, &unit.source(), &unit.options(architecture))?;
            let name =
                format!("{architecture} {} {} ({} bytes)", unit.name, unit.defines.join(" "), cubin.len());
            reports.push(CheckReport::new(name, 0.0, 0.0));
        }
    }
    Ok(reports)
}

/// Runs every kernel of the device against its reference and appends to `reports` as it goes.
///
/// # Errors
/// [`OpsError`] when the device itself fails; a wrong result is a report that did not pass.
pub fn check_device(
    options: &CudaOptions,
    seed: u64,
    scope: CheckScope,
    reports: &mut Vec<CheckReport>,
) -> Result<(), OpsError> {
    for precision in [Precision::Bf16, Precision::F16] {
        let mut ops = CudaOps::open(&CudaOptions { precision, ..options.clone() })?;
        reports.extend(elementwise::check(&mut ops, seed)?);
        reports.extend(attention::check(&mut ops, seed, scope.quick)?);
        if scope.own_kernels_only {
            continue;
        }
        reports.extend(linear::check(&mut ops, seed)?);
        if precision == Precision::Bf16 && ops.facts().capability >= (8, 9) {
            drop(ops);
            let mut ops = CudaOps::open(&CudaOptions { precision: Precision::Fp8, ..options.clone() })?;
            reports.extend(linear::check_fp8(&mut ops, seed)?);
        }
    }
    Ok(())
}
