//! Logs go to stderr; `RUST_LOG` chooses what.

use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;

/// Starts logging, as text or as one JSON object per line. Calling it twice changes nothing.
pub fn init_logging(json: bool) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Colours are for people; a file or a supervisor's pipe gets plain text.
    let builder = builder.with_ansi(std::io::stderr().is_terminal());
    // A second subscriber is refused; the first one stays, which is what a test process wants.
    let _ = if json { builder.json().try_init() } else { builder.try_init() };
}
