//! `pd-agent`: one per machine. Says on the bus how the machine is, and runs what its own configuration allows an
//! operator to ask for.

mod beat;
mod commands;
mod logs;
mod machine;
mod process;
mod run;
mod settings;
mod state;
mod workers;

use clap::Parser;
use settings::AgentArgs;
use shared::settings::EXIT_BAD_SETTING;
use std::process::ExitCode;

/// Says on the bus how this machine is, and takes signed commands that its configuration allows.
#[derive(Debug, Parser)]
#[command(name = "pd-agent", version, about)]
struct Cli {
    #[command(flatten)]
    agent: AgentArgs,
}

fn main() -> ExitCode {
    // Not part of the command line for people: this program is also what it runs commands in.
    if std::env::args_os().nth(1).is_some_and(|a| a == process::CONTAIN) {
        return process::contain();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let code = if error.use_stderr() { ExitCode::from(EXIT_BAD_SETTING) } else { ExitCode::SUCCESS };
            // A closed stdout or stderr leaves nothing to be done.
            let _ = error.print();
            return code;
        }
    };
    match run::run(cli.agent) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

#[allow(clippy::print_stderr, reason = "the last words of a command line program")]
fn fail(error: &run::RunError) -> ExitCode {
    eprintln!("pd-agent: {error}");
    ExitCode::from(if matches!(error, run::RunError::Settings(_)) { EXIT_BAD_SETTING } else { 1 })
}
