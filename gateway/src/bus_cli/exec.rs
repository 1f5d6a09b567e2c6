//! `pd-bridge exec`.

use super::following::Following;
use super::nodes::{Heard, LISTEN};
use super::output::Lines;
use super::{BusCliError, OperatorArgs, Target};
use clap::Args;
use shared::bus::{Action, ExecSpec, Exit, Frame, NodeId, Operator, WINDOW_BYTES};
use std::io::{stderr, stdout};
use std::process::ExitCode;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Where the bus or a node failed, as opposed to the program.
const FAILED: u8 = 125;

/// A program to run.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Name of the node, as `pd-bridge nodes` shows it
    #[arg(required_unless_present = "all")]
    node: Option<NodeId>,
    /// Run it on every node that is heard
    #[arg(long, conflicts_with = "node")]
    all: bool,
    /// End it after this time, e.g. 500ms, 30s, 5m; a node's own limit may be shorter
    #[arg(long, default_value = "30s", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    operator: OperatorArgs,
    /// Program and arguments; no shell is involved
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

impl ExecArgs {
    fn target(&self) -> Target {
        match &self.node {
            Some(node) => Target::One(node.clone()),
            None => Target::All,
        }
    }
}

/// Runs it and shows its output. The exit code is the program's, or the worst of all; 125 where a node or the bus
/// failed, 124 after a timeout.
///
/// # Errors
/// [`BusCliError`].
pub(super) async fn run(args: ExecArgs) -> Result<ExitCode, BusCliError> {
    let target = args.target();
    let operator = args.operator.operator().await?;
    let nodes = match target {
        Target::One(node) => vec![node],
        Target::All => Heard::listen(operator.bus(), LISTEN).await?.alive(),
    };
    let spec = ExecSpec {
        argv: args.command,
        timeout_ms: u64::try_from(args.timeout.as_millis()).unwrap_or(u64::MAX),
        window_bytes: WINDOW_BYTES,
    };
    let cancel = CancellationToken::new();
    tokio::spawn(cancel_on_signal(cancel.clone()));
    let named = args.all;
    let mut running = JoinSet::new();
    for node in nodes {
        running.spawn(one(operator.clone(), node, spec.clone(), named, cancel.clone()));
    }
    let codes = running.join_all().await;
    Ok(ExitCode::from(codes.into_iter().max().unwrap_or(FAILED)))
}

/// Ctrl-C ends the program over there first; a second one leaves at once.
pub(super) async fn cancel_on_signal(cancel: CancellationToken) {
    shared::settings::shutdown_signal(false).await;
    cancel.cancel();
    shared::settings::shutdown_signal(false).await;
    std::process::exit(130);
}

async fn one(operator: Operator, node: NodeId, spec: ExecSpec, named: bool, cancel: CancellationToken) -> u8 {
    match show(&operator, &node, Action::Exec(spec), named, &cancel).await {
        Ok(Exit::Code { code }) => Exit::Code { code }.code(),
        Ok(exit) => {
            say(&node, &exit);
            exit.code()
        }
        Err(error) => {
            say(&node, &error);
            FAILED
        }
    }
}

/// Starts a command and shows its output to the end.
///
/// # Errors
/// [`BusCliError`].
pub(super) async fn show(
    operator: &Operator,
    node: &NodeId,
    action: Action,
    named: bool,
    cancel: &CancellationToken,
) -> Result<Exit, BusCliError> {
    let mut following = Following::start(operator, node, action, cancel).await?;
    let (mut out, mut err) = (Lines::new(node, named), Lines::new(node, named));
    loop {
        // A pipe that nobody reads blocks this thread and with it the credits: that is the point.
        match following.next().await? {
            Frame::Stdout(bytes) => tokio::task::block_in_place(|| out.write(&bytes, &mut stdout().lock()))?,
            Frame::Stderr(bytes) => tokio::task::block_in_place(|| err.write(&bytes, &mut stderr().lock()))?,
            Frame::End(end) => {
                out.finish(&mut stdout().lock())?;
                err.finish(&mut stderr().lock())?;
                return Ok(end.exit);
            }
        }
    }
}

#[allow(clippy::print_stderr, reason = "the operator reads what became of a command")]
fn say(node: &NodeId, what: &dyn std::fmt::Display) {
    eprintln!("pd-bridge: {node}: {what}");
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit_s = match unit {
        "ms" => 1e-3,
        "s" | "" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("`{text}` has no unit of ms, s, m or h")),
    };
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is no time"))?;
    Duration::try_from_secs_f64(number * unit_s).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("2"), Ok(Duration::from_secs(2)));
        for bad in ["", "s", "5d", "-1s", "1e99h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
