//! Tools for a person at a terminal: kernel checks, kernel rates, whole-model rates, backend comparison.

mod check;
mod compare;
mod counting;
mod kernels;
mod model;
mod random;
mod shape;

use std::io::Write;

use clap::Subcommand;

pub use check::CheckKernelsArgs;
pub use compare::CompareArgs;
pub use kernels::BenchKernelsArgs;
pub use model::BenchArgs;

/// Tool subcommands of `pd-prefill`.
#[derive(Debug, Subcommand)]
pub enum ToolCommand {
    /// Compile every kernel; with --device also run each against a float64 reference.
    CheckKernels(CheckKernelsArgs),
    /// Prefill rate of a model shape with random weights, streaming its cache out or not.
    Bench(BenchArgs),
    /// The same prompts through several backends, every cache array compared.
    Compare(CompareArgs),
    /// Rates of the attention kernels and of the matrix products alone.
    BenchKernels(BenchKernelsArgs),
}

/// Why a tool failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// The backend refused or failed.
    #[error(transparent)]
    Ops(#[from] crate::ops::OpsError),
    /// Output could not be written, or a file not be read.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Output could not be encoded.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A check found a wrong result.
    #[error("{0} of {1} checks failed")]
    ChecksFailed(usize, usize),
    /// An argument makes no sense.
    #[error("{0}")]
    Argument(String),
}

/// Runs a tool; prints to standard output.
///
/// # Errors
/// [`ToolError`].
pub fn run_tool(command: ToolCommand) -> Result<(), ToolError> {
    match command {
        ToolCommand::CheckKernels(args) => check::run(&args),
        ToolCommand::Bench(args) => model::run(&args),
        ToolCommand::Compare(args) => compare::run(&args),
        ToolCommand::BenchKernels(args) => kernels::run(&args),
    }
}

/// One line on standard output, flushed, so that a watcher sees it at once.
fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}
