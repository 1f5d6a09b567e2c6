//! The engine thread's loop.

use super::active::Active;
use super::inspect::inspect;
use super::{Command, Engine, Gauges, policy};
use crate::rates::MeasuredRates;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

/// How often jobs that wait for their readers are looked at.
const BLOCKED_POLL: Duration = Duration::from_millis(2);

/// Serves jobs until told to stop or all handles are gone.
pub(super) fn run<E: Engine>(
    engine: &E,
    commands: &Receiver<Command>,
    gauges: &Gauges,
    rates: &MeasuredRates,
) {
    let mut active: Vec<Active<E>> = Vec::new();
    let mut turn = 0_usize;
    let mut nothing_to_do = true;
    while take_commands(engine, commands, &mut active, nothing_to_do) {
        forget_finished(engine, &mut active);
        publish(engine, &active, gauges);
        let needs: Vec<_> = active.iter().map(|job| job.need(engine)).collect();
        let steps = policy::round(&needs, rates.current(), engine.prefill_chunk_tokens(), turn);
        turn = turn.wrapping_add(1);
        nothing_to_do = steps.is_empty();
        for (index, action) in steps {
            let job = &mut active[index];
            if !job.is_over() {
                job.step(engine, action, rates);
            }
        }
    }
}

/// Takes what waits; with `idle`, waits for something. `false` ends the loop.
fn take_commands<E: Engine>(
    engine: &E,
    commands: &Receiver<Command>,
    active: &mut Vec<Active<E>>,
    idle: bool,
) -> bool {
    let mut first = if !idle {
        None
    } else if active.is_empty() {
        match commands.recv() {
            Ok(command) => Some(command),
            Err(_) => return false,
        }
    } else {
        match commands.recv_timeout(BLOCKED_POLL) {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    };
    loop {
        let command = match first.take() {
            Some(command) => command,
            None => match commands.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            },
        };
        match command {
            Command::Generate(job) => active.push(Active::new(*job)),
            Command::Inspect(job) => inspect(engine, *job),
            Command::Stop => return false,
        }
    }
}

fn forget_finished<E: Engine>(engine: &E, active: &mut Vec<Active<E>>) {
    let before = active.len();
    active.retain(|job| !job.is_over());
    if active.len() < before
        && let Err(error) = engine.release_unused_memory()
    {
        tracing::warn!(%error, "releasing memory");
    }
}

fn publish<E: Engine>(engine: &E, active: &[Active<E>], gauges: &Gauges) {
    gauges.jobs.store(u32::try_from(active.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
    let bytes = active.iter().map(|job| job.cache_bytes(engine)).sum();
    gauges.sequence_bytes.store(bytes, Ordering::Relaxed);
}
