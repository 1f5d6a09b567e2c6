//! Commands: taken from the bus, believed, allowed, run, written down.

mod allow;
mod ask;
mod audit;
mod exec;
mod intake;
mod memory;
mod rules;
mod session;
mod tail;

pub(crate) use audit::private_dir;
pub(crate) use intake::{Intake, IntakeError};
pub(crate) use rules::{CommandRules, Rules};
