//! The command line: what `pd-bridge` can do, and its exit codes.

use crate::bus_cli::{self, OperatorCommand};
use crate::bus_keys::{self, BusKeysArgs};
use crate::serve::{ServeError, serve_forever};
use crate::settings::GatewayArgs;
use crate::up::{self, ChildError, UpArgs};
use crate::verify::{self, VerifyArgs};
use clap::{Parser, Subcommand};
use shared::settings::{EXIT_BAD_SETTING, init_logging};
use shared::trace;
use std::path::PathBuf;
use std::process::ExitCode;

/// One OpenAI endpoint over a prefill worker and a decode worker.
#[derive(Debug, Parser)]
#[command(name = "pd-bridge", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start everything on this machine: both workers and the gateway
    Up(Box<UpArgs>),
    /// Start the gateway alone, for workers that run elsewhere
    Gateway(Box<GatewayCommand>),
    /// Compare the prefill worker's caches with the decoder's own
    Verify(VerifyArgs),
    /// Prepare the message bus that agents and operators meet on
    #[command(subcommand)]
    Bus(BusCommand),
    #[command(flatten)]
    Operator(OperatorCommand),
}

#[derive(Debug, Subcommand)]
enum BusCommand {
    /// Make keys, certificates and the NATS server's configuration, or add a machine to them
    Keys(BusKeysArgs),
}

#[derive(Debug, clap::Args)]
struct GatewayCommand {
    /// TOML file; this program reads its `[gateway]` section
    #[arg(long, env = "PD_BRIDGE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    gateway: GatewayArgs,
}

/// Parses, runs, and turns the result into an exit code: 64 for a bad setting, 1 for any other failure.
pub(crate) fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let code = if error.use_stderr() { ExitCode::from(EXIT_BAD_SETTING) } else { ExitCode::SUCCESS };
            // A closed stdout or stderr leaves nothing to be done.
            let _ = error.print();
            return code;
        }
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&ServeError::Runtime(error)),
    };
    let result = runtime.block_on(async {
        match cli.command {
            Command::Up(args) => up::run(*args).await.map(|()| ExitCode::SUCCESS),
            Command::Gateway(command) => gateway(*command).await.map(|()| ExitCode::SUCCESS),
            Command::Verify(args) => {
                init_logging(false);
                verify::run(args).await.map_err(|e| ServeError::Verify(Box::new(e)))
            }
            Command::Bus(BusCommand::Keys(args)) => {
                bus_keys::run(&args).map(|()| ExitCode::SUCCESS).map_err(ServeError::from)
            }
            Command::Operator(command) => Ok(bus_cli::run(command).await?),
        }
    });
    // Blocking reads of stdin or a running tokenizer must not keep the process.
    runtime.shutdown_background();
    result.unwrap_or_else(|error| fail(&error))
}

/// Threads for half of the cores: what a request costs here is mostly waking up, and a wake-up on another core costs the
/// most. Long prompts are tokenized on threads of their own, and the other half is for the system's network and whatever
/// else runs on the machine. `TOKIO_WORKER_THREADS` says otherwise.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if std::env::var_os("TOKIO_WORKER_THREADS").is_none() {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        builder.worker_threads((cores / 2).max(1));
    }
    builder.enable_all().build()
}

async fn gateway(command: GatewayCommand) -> Result<(), ServeError> {
    let args = command.gateway.with_file(command.config.as_deref())?;
    init_logging(args.log_json.unwrap_or(false));
    let traces = trace::start("gateway.otlp_endpoint", "pd-bridge", args.otlp_endpoint.as_deref())?;
    let served = serve_forever(args.resolve()?).await;
    traces.finish_outside().await;
    served
}

#[allow(clippy::print_stderr, reason = "the last words of a command line program")]
fn fail(error: &ServeError) -> ExitCode {
    eprintln!("pd-bridge: {error}");
    let bad_setting = match error {
        ServeError::Settings(_) | ServeError::Child(ChildError::BadSetting { .. }) => true,
        ServeError::BusKeys(error) => error.is_bad_setting(),
        ServeError::Operator(error) => error.is_bad_setting(),
        _ => false,
    };
    ExitCode::from(if bad_setting { EXIT_BAD_SETTING } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
