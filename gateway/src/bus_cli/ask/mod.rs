//! `pd-bridge ask`.

mod answer;
mod question;
mod show;

use super::exec::{cancel_on_signal, duration};
use super::nodes::{Heard, LISTEN};
use super::{BusCliError, OperatorArgs};
use clap::Args;
use shared::bus::{NodeId, Operator};
use std::io::{IsTerminal as _, Write as _, stdout};
use std::process::ExitCode;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub(super) use answer::{Answer, AskError};
pub(super) use question::{Question, Route};
pub(super) use show::{Row, render, time};

/// A question for models.
#[derive(Debug, Args)]
pub(crate) struct AskArgs {
    /// The node, as `pd-bridge nodes` shows it (not with --all), and the question
    #[arg(required = true, num_args = 1..=2, value_name = "[NODE] QUESTION")]
    words: Vec<String>,
    /// Ask every node that is heard
    #[arg(long)]
    all: bool,
    /// Give up after this time, e.g. 30s, 5m; a node's own limit may be shorter
    #[arg(long, default_value = "5m", value_parser = duration)]
    timeout: Duration,
    /// Longest answer
    #[arg(long, default_value_t = 256)]
    max_tokens: u32,
    /// Who is to read the prompt
    #[arg(long, value_enum, default_value = "auto")]
    route: Route,
    /// Print JSON: one array
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    operator: OperatorArgs,
}

impl AskArgs {
    /// The one node, or none for all; and the question.
    fn target(&self) -> Result<(Option<NodeId>, &str), BusCliError> {
        match (self.all, &self.words[..]) {
            (true, [question]) => Ok((None, question)),
            (false, [node, question]) => Ok((Some(NodeId::new(node)?), question)),
            (true, _) => Err(BusCliError::Usage("with --all, give the question alone, in quotes")),
            (false, _) => Err(BusCliError::Usage("give a node and a question, or --all and a question")),
        }
    }
}

/// Asks and shows the answers. Exit code 0 says that every node answered, 1 that one did not, 130 that it was cancelled.
///
/// # Errors
/// [`BusCliError`].
pub(super) async fn run(args: AskArgs) -> Result<ExitCode, BusCliError> {
    let (node, text) = args.target()?;
    let question = Question {
        messages: vec![("user", text.to_owned())],
        max_tokens: args.max_tokens,
        route: args.route,
        timeout: args.timeout,
    };
    let operator = args.operator.operator().await?;
    let nodes = match node {
        Some(node) => vec![node],
        None => Heard::listen(operator.bus(), LISTEN).await?.alive(),
    };
    let cancel = CancellationToken::new();
    tokio::spawn(cancel_on_signal(cancel.clone()));
    let rows = ask_all(&operator, nodes, question, &cancel).await;
    let shown = if args.json {
        let rows: Vec<_> = rows.iter().map(Row::json).collect();
        serde_json::to_string_pretty(&rows).map_err(std::io::Error::other)? + "\n"
    } else {
        render(&rows, terminal_width())
    };
    stdout().write_all(shown.as_bytes())?;
    Ok(match rows.iter().all(|row| row.result.is_ok()) {
        true => ExitCode::SUCCESS,
        false if cancel.is_cancelled() => ExitCode::from(130),
        false => ExitCode::FAILURE,
    })
}

/// Columns of the terminal on stdout, if it is one.
fn terminal_width() -> Option<usize> {
    stdout().is_terminal().then(textwrap::termwidth)
}

/// All nodes at once; rows in the order of names.
async fn ask_all(
    operator: &Operator,
    nodes: Vec<NodeId>,
    question: Question,
    cancel: &CancellationToken,
) -> Vec<Row> {
    let mut asking = JoinSet::new();
    for node in nodes {
        let (operator, question, cancel) = (operator.clone(), question.clone(), cancel.clone());
        asking.spawn(async move {
            let result = question.put(&operator, &node, &cancel).await;
            Row { node, result }
        });
    }
    let mut rows = asking.join_all().await;
    rows.sort_by(|a, b| a.node.cmp(&b.node));
    rows
}
