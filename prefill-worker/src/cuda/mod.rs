//! The CUDA backend: NVRTC kernels, cublasLt products, and an egress that streams the decoder's cache to the host
//! while the next layer computes.
//!
//! Nothing of CUDA is needed to build it. The driver, NVRTC and cublasLt are loaded at run time
//! ([`library::preload`]); without them [`open`] says in words what is missing.
//!
//! Arithmetic: weights and activations are 16-bit elements ([`Precision`]), products accumulate in f32, the residual
//! stream and every normalization are f32. Keys and values are kept as elements and cast to the decoder's dtype on
//! their way out.
#![allow(unsafe_code, reason = "calls into the CUDA driver, NVRTC and cublasLt")]

mod attention;
mod backend;
mod check;
mod cubin_cache;
mod device;
mod egress;
mod elementwise;
mod gemm;
mod handles;
mod library;
mod measure;
mod memory;
mod nvrtc;
mod ops_impl;
mod pinned;
mod profile;
mod sources;
mod staging;
mod tensor_map;
mod weights;

use std::path::PathBuf;

use clap::ValueEnum;
use serde::Deserialize;

pub use backend::{CudaOps, Usage};
pub use check::{CheckReport, CheckScope, check_compile, check_device};
pub use device::DeviceFacts;
pub use handles::{Buffer, Cache, Rope, Saved};
pub use measure::{AttentionShape, Rate};
pub use profile::StageTimes;
pub use weights::Weight;

use crate::ops::OpsError;

/// Element type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// bfloat16.
    #[default]
    Bf16,
    /// IEEE half.
    F16,
    /// bfloat16, with linear layers in FP8 E4M3: one scale per row of activations and one per output channel.
    Fp8,
}

/// Where and how to run.
#[derive(Debug, Clone)]
pub struct CudaOptions {
    /// Device number.
    pub device: usize,
    /// Element type.
    pub precision: Precision,
    /// Folder for compiled kernels; `None` compiles at every start.
    pub kernel_cache: Option<PathBuf>,
    /// Folders searched for NVRTC and cublasLt before the system's own.
    pub library_dirs: Vec<PathBuf>,
    /// Pinned host memory for pieces on their way to the network, in bytes.
    pub pinned_bytes: usize,
    /// Device memory for pieces that wait to be copied, in bytes; at most a 64th of the device's memory is taken.
    pub staging_bytes: usize,
    /// Workspace of the matrix products, in bytes.
    pub workspace_bytes: usize,
    /// Keep quantized weights packed on the device and expand them for each product. Without it they are expanded
    /// once, and kept packed only where they do not fit otherwise.
    pub keep_packed: bool,
    /// Largest chunk preferred, in tokens.
    pub chunk_tokens: usize,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            device: 0,
            precision: Precision::default(),
            kernel_cache: default_kernel_cache(),
            library_dirs: Vec::new(),
            pinned_bytes: 64 << 20,
            staging_bytes: 512 << 20,
            workspace_bytes: 64 << 20,
            keep_packed: false,
            chunk_tokens: 4096,
        }
    }
}

/// Opens a device and compiles (or loads) its kernels.
///
/// # Errors
/// [`OpsError::Unsupported`] with the reason in words when there is no usable driver, library or GPU.
pub fn open(options: &CudaOptions) -> Result<CudaOps, OpsError> {
    CudaOps::open(options)
}

/// `$XDG_CACHE_HOME/pd-bridge/kernels`, else below `$HOME/.cache`.
fn default_kernel_cache() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("pd-bridge").join("kernels"))
}
