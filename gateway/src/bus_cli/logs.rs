//! `pd-bridge logs`.

use super::exec::show;
use super::{BusCliError, OperatorArgs};
use clap::Args;
use shared::bus::{Action, Exit, LogsSpec, NodeId, WINDOW_BYTES};
use std::process::ExitCode;
use tokio_util::sync::CancellationToken;

/// Which lines.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Name of the node, as `pd-bridge nodes` shows it
    node: NodeId,
    /// Go on with new lines until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// How many of the last lines
    #[arg(short = 'n', long, default_value_t = 200)]
    lines: u32,
    #[command(flatten)]
    operator: OperatorArgs,
}

/// Shows them.
///
/// # Errors
/// [`BusCliError`].
pub(super) async fn run(args: LogsArgs) -> Result<ExitCode, BusCliError> {
    let operator = args.operator.operator().await?;
    let cancel = CancellationToken::new();
    let signal = cancel.clone();
    tokio::spawn(async move {
        shared::settings::shutdown_signal(false).await;
        signal.cancel();
    });
    let spec = LogsSpec { lines: args.lines, follow: args.follow, window_bytes: WINDOW_BYTES };
    let exit = show(&operator, &args.node, Action::Logs(spec), false, &cancel).await?;
    // Ctrl-C is how following ends.
    Ok(if args.follow && matches!(exit, Exit::Cancelled {}) { ExitCode::SUCCESS } else { exit.code().into() })
}
