//! OpenAI-compatible front door of pd-bridge.

mod access_log;
mod bus_cli;
mod bus_keys;
mod cli;
mod deadlines;
mod dialect;
mod discovery;
mod fleet;
mod http;
mod keys;
mod live;
mod metrics;
mod model;
mod open_files;
mod pipeline;
mod planner;
mod record;
mod serve;
mod settings;
#[cfg(test)]
mod smoke;
mod up;
mod verdicts;
mod verify;

/// A request makes and frees hundreds of small things on two threads, which this allocator does in a third of the time of
/// most systems' own; what is free goes back to the system within seconds.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> std::process::ExitCode {
    cli::main()
}
