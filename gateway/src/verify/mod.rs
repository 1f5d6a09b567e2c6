//! `pd-bridge verify`: the receipt for correctness, over the real programs and the real wire.
//!
//! 1. The decoder computes a prompt natively and writes down its attention inputs and its cache.
//! 2. The prefill worker turns those same inputs into a cache. Compared with the decoder's own, any
//!    difference is the reconstruction's alone: this is what pass or fail depends on.
//! 3. A fresh decoder gets the prompt through a bridge and writes down its cache: the same comparison
//!    end to end, where the two engines' forward passes differ too.
//! 4. Both generate greedily; tokens are compared one by one, and the first-token distributions by KL divergence.

mod compare;
mod dump;
mod report;
mod session;

use crate::model::TextModel;
use crate::up::{ChildError, ChildSpec};
use clap::Args;
use report::Report;
use session::Session;
use shared::control::{ControlError, WorkerError};
use std::path::PathBuf;
use std::process::ExitCode;

/// Tokens generated from each cache.
const GREEDY_TOKENS: u32 = 64;

/// Arguments of `pd-bridge verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// GGUF file or model directory
    #[arg(long, env = "PD_BRIDGE_MODEL")]
    model: PathBuf,
    /// Text to use as the prompt
    #[arg(long)]
    prompt_file: PathBuf,
    /// Element type of the decoder's cache: f32, f16, bf16 [default: the decoder's]
    #[arg(long)]
    cache_dtype: Option<String>,
    /// Engine of the prefill worker: auto, cuda, cpu [default: auto]
    #[arg(long)]
    prefill_backend: Option<String>,
    /// Use only the first tokens of the prompt
    #[arg(long)]
    max_prompt_tokens: Option<usize>,
    /// One JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Why nothing could be said.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VerifyError {
    /// A file can't be read, or the folder for dumps can't be made.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The model can't be used.
    #[error("model: {0}")]
    Model(#[from] shared::model::ModelError),
    /// The prompt can't be used.
    #[error("prompt: {0}")]
    Prompt(String),
    /// A worker did not start.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// A worker's connection failed.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A worker reported an error.
    #[error("{step}: {error}")]
    Worker {
        /// What it was asked.
        step: &'static str,
        /// What it said.
        error: WorkerError,
    },
    /// A worker's answer makes no sense here.
    #[error("{step}: {message}")]
    Unexpected {
        /// What was asked.
        step: &'static str,
        /// What came.
        message: String,
    },
    /// A dump lacks something or has another shape.
    #[error("{file}: {message}")]
    Dump {
        /// File name.
        file: String,
        /// What is wrong.
        message: String,
    },
}

/// Runs the comparison and prints it; the exit code is 1 when the same-input bound fails.
///
/// # Errors
/// [`VerifyError`] when there is nothing to compare.
pub(crate) async fn run(args: VerifyArgs) -> Result<ExitCode, VerifyError> {
    let report = Box::pin(measure(&args)).await?;
    print(&if args.json { report.to_json() } else { report.to_table() });
    Ok(if report.passes() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn measure(args: &VerifyArgs) -> Result<Report, VerifyError> {
    let model = TextModel::open(&args.model, None)?;
    let file = |path: &PathBuf, source| VerifyError::File { path: path.clone(), source };
    let text = std::fs::read_to_string(&args.prompt_file).map_err(|e| file(&args.prompt_file, e))?;
    let mut tokens = model.tokenizer.encode(&text, true).map_err(|e| VerifyError::Prompt(e.to_string()))?;
    tokens.truncate(args.max_prompt_tokens.unwrap_or(usize::MAX));
    if tokens.len() < 2 {
        return Err(VerifyError::Prompt("at least two tokens are needed".to_owned()));
    }
    let folder = tempfile::tempdir().map_err(|e| file(&std::env::temp_dir(), e))?;
    let spec = |program: &'static str, name: &'static str| {
        let mut spec = ChildSpec::beside_this_program(program, name)?;
        spec.option("--model", Some(&args.model)).option("--inspect-dir", Some(folder.path()));
        Ok::<_, ChildError>(spec)
    };
    let mut decode = spec("pd-decode", "decode")?;
    decode.option("--cache-dtype", args.cache_dtype.as_ref());
    let mut prefill = spec("pd-prefill", "prefill")?;
    prefill.option("--backend", args.prefill_backend.as_ref());

    let mut session = Session::start(decode, &prefill, tokens.into()).await?;
    session.inspect_native("native.safetensors").await?;
    let native_tokens = session.generate("greedy-native", &model, false).await?;
    session.reconstruct("native.safetensors", "reconstructed.safetensors").await?;
    // A fresh decoder: its prefix store must not hold what the first one computed natively.
    session.restart_decoder().await?;
    let transfer = session.inspect_bridged("bridged.safetensors").await?;
    let bridged_tokens = session.generate("greedy-bridged", &model, true).await?;
    let layout = session.layout()?;
    let engines = session.engines();
    session.stop().await;

    let path = |name: &str| folder.path().join(name);
    let compared = tokio::task::spawn_blocking({
        let (native, same, bridged) =
            (path("native.safetensors"), path("reconstructed.safetensors"), path("bridged.safetensors"));
        move || -> Result<_, VerifyError> {
            let native = dump::Dump::open(&native)?;
            let same = compare::caches(&native, &dump::Dump::open(&same)?, &layout)?;
            let bridged = dump::Dump::open(&bridged)?;
            let end_to_end = compare::caches(&native, &bridged, &layout)?;
            Ok((same, end_to_end, compare::kl_divergence(&native.logits()?, &bridged.logits()?), layout))
        }
    });
    let compared = compared.await.map_err(|e| VerifyError::Prompt(e.to_string()))?;
    let (same_input, end_to_end, kl_first_token, layout) = compared?;
    Ok(Report::new(
        &layout,
        &model,
        engines,
        transfer,
        same_input,
        end_to_end,
        kl_first_token,
        &native_tokens,
        &bridged_tokens,
    ))
}

#[allow(clippy::print_stdout, reason = "the result that a command line program was run for")]
fn print(text: &str) {
    println!("{text}");
}
