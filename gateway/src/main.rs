//! OpenAI-compatible front door of pd-bridge.

mod bus_keys;
mod cli;
mod deadlines;
mod fleet;
mod http;
mod metrics;
mod model;
mod pipeline;
mod planner;
mod serve;
mod settings;
#[cfg(test)]
mod smoke;
mod up;
mod verdicts;
mod verify;

fn main() -> std::process::ExitCode {
    cli::main()
}
