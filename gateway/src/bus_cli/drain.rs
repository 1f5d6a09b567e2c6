//! `pd-bridge drain` and `pd-bridge resume`.

use super::{BusCliError, OperatorArgs};
use clap::Args;
use shared::bus::{Action, NodeId};
use std::process::ExitCode;

/// One node.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// Name of the node, as `pd-bridge nodes` shows it
    node: NodeId,
    #[command(flatten)]
    operator: OperatorArgs,
}

/// Tells the node; it tells everybody with its next heartbeat, which follows at once.
///
/// # Errors
/// [`BusCliError`].
pub(super) async fn run(args: NodeArgs, drain: bool) -> Result<ExitCode, BusCliError> {
    let operator = args.operator.operator().await?;
    let action = if drain { Action::Drain {} } else { Action::Resume {} };
    operator.send(&args.node, action).await?;
    Ok(ExitCode::SUCCESS)
}
