//! `pd-bridge field-test`: does a bridged answer come from the passage?

mod file;
mod runs;
mod score;
mod table;

use super::ask::time;
use super::exec::cancel_on_signal;
use super::nodes::{Heard, LISTEN};
use super::{BusCliError, OperatorArgs};
use clap::Args;
use file::{Checked, FieldTest};
use runs::{Cell, NodeReport, Way};
use shared::bus::NodeId;
use std::io::{IsTerminal as _, Write as _, stderr, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub(crate) use file::FileError;

/// A passage and questions about it.
#[derive(Debug, Args)]
pub(crate) struct FieldTestArgs {
    /// TOML file with the passage and the questions
    file: PathBuf,
    /// Nodes to ask; every node that is heard, if none is named
    #[arg(value_name = "NODE")]
    nodes: Vec<NodeId>,
    /// Show every answer below the table
    #[arg(long, conflicts_with = "json")]
    answers: bool,
    /// Print JSON: everything that was asked, answered and measured
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    operator: OperatorArgs,
}

/// Asks, scores and prints the table. Exit code 0 says that everything was answered, right or wrong; 1 that something
/// was not; 130 that it was cancelled.
///
/// # Errors
/// [`BusCliError`].
pub(super) async fn run(args: FieldTestArgs) -> Result<ExitCode, BusCliError> {
    let test = Arc::new(FieldTest::read(&args.file)?);
    let operator = args.operator.operator().await?;
    let mut nodes = args.nodes;
    if nodes.is_empty() {
        nodes = Heard::listen(operator.bus(), LISTEN).await?.alive();
    }
    nodes.sort();
    nodes.dedup();
    let cancel = CancellationToken::new();
    tokio::spawn(cancel_on_signal(cancel.clone()));
    let mut running = JoinSet::new();
    for node in nodes {
        let (test, operator, cancel) = (test.clone(), operator.clone(), cancel.clone());
        running.spawn(async move { runs::run(&test, &operator, node, &cancel, progress).await });
    }
    let mut reports = running.join_all().await;
    reports.sort_by(|a, b| a.node.cmp(&b.node));
    let shown = if args.json {
        serde_json::to_string_pretty(&runs::json(&test, &reports)).map_err(std::io::Error::other)? + "\n"
    } else {
        table::render(&test, &reports, args.answers)
    };
    stdout().write_all(shown.as_bytes())?;
    Ok(match reports.iter().all(NodeReport::is_whole) {
        true => ExitCode::SUCCESS,
        false if cancel.is_cancelled() => ExitCode::from(130),
        false => ExitCode::FAILURE,
    })
}

/// A line for each answer, where somebody watches: a field test takes minutes.
fn progress(node: &NodeId, way: Way, question: &Checked, cell: &Cell) {
    if !stderr().is_terminal() {
        return;
    }
    let what = match &cell.result {
        Ok((answer, right)) => {
            let first = answer.ttft_ms.map_or("no token".to_owned(), time);
            format!("{}, {first}", if *right { "right" } else { "wrong" })
        }
        Err(error) => super::output::printable_lines(&error.to_string()),
    };
    let passage = if way.with_passage { "passage" } else { "no passage" };
    // A closed stderr loses nothing but this line.
    let _ = writeln!(stderr(), "{node}: {passage}, {:?}, {}: {what}", way.route, question.id);
}
