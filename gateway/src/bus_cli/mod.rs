//! The operator's commands: see the nodes, run something on them, ask their models, drain them, read their logs.

mod ask;
mod drain;
mod exec;
mod field_test;
mod following;
mod logs;
mod nodes;
mod output;
mod settings;

use clap::Subcommand;
use shared::bus::{BusError, NodeId, OperatorError};
use shared::settings::SettingsError;
use std::process::ExitCode;

pub(crate) use settings::OperatorArgs;

/// What an operator can do over the bus.
#[derive(Debug, Subcommand)]
pub(crate) enum OperatorCommand {
    /// List the machines on the bus
    Nodes(nodes::NodesArgs),
    /// Run a program on a node, or on all; its own configuration says what it allows
    Exec(exec::ExecArgs),
    /// Send no new work to a node
    Drain(drain::NodeArgs),
    /// Send work to a drained node again
    Resume(drain::NodeArgs),
    /// Show the log of a node's agent and of the workers it runs
    Logs(logs::LogsArgs),
    /// Ask the model of a node, or of all, and show the answers side by side
    Ask(ask::AskArgs),
    /// Ask every node questions about a passage, bridged and natively, and score the answers
    FieldTest(field_test::FieldTestArgs),
}

/// Why an operator's command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BusCliError {
    /// A bad setting.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// No connection.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// The bus refuses a subscription.
    #[error("bus: {0}")]
    Subscribe(#[from] async_nats::SubscribeError),
    /// The node refuses, is not there, or its output was lost.
    #[error(transparent)]
    Operator(#[from] OperatorError),
    /// Nobody was heard.
    #[error("no node was heard within {0:?}; does any agent run, and may this login listen?")]
    Nobody(std::time::Duration),
    /// A name that stands for no node.
    #[error(transparent)]
    Node(#[from] shared::bus::IdError),
    /// Arguments that make no sense together.
    #[error("{0}")]
    Usage(&'static str),
    /// A field test that can't be used.
    #[error(transparent)]
    FieldTest(#[from] field_test::FileError),
    /// Output can't be written.
    #[error("output: {0}")]
    Io(#[from] std::io::Error),
}

impl BusCliError {
    /// Whether the settings are at fault.
    pub(crate) fn is_bad_setting(&self) -> bool {
        matches!(self, Self::Settings(_) | Self::Node(_) | Self::Usage(_) | Self::FieldTest(_))
    }
}

/// Runs one of them.
///
/// # Errors
/// [`BusCliError`].
pub(crate) async fn run(command: OperatorCommand) -> Result<ExitCode, BusCliError> {
    match command {
        OperatorCommand::Nodes(args) => nodes::run(args).await,
        OperatorCommand::Exec(args) => exec::run(args).await,
        OperatorCommand::Drain(args) => drain::run(args, true).await,
        OperatorCommand::Resume(args) => drain::run(args, false).await,
        OperatorCommand::Logs(args) => logs::run(args).await,
        OperatorCommand::Ask(args) => ask::run(args).await,
        OperatorCommand::FieldTest(args) => field_test::run(args).await,
    }
}

/// Which nodes a command is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    One(NodeId),
    All,
}
