//! The engine thread's loop.

use super::active::Active;
use super::inspect::inspect;
use super::{Command, Engine, Gauges, policy, step};
use crate::rates::MeasuredRates;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

/// How often jobs that wait for their readers are looked at.
const BLOCKED_POLL: Duration = Duration::from_millis(2);

/// Decode passes after which unused memory is given back.
const RELEASE_EVERY_PASSES: usize = 256;

/// Serves jobs until told to stop or all handles are gone.
pub(super) fn run<E: Engine>(
    engine: &E,
    commands: &Receiver<Command>,
    gauges: &Gauges,
    rates: &MeasuredRates,
    sequence_bytes: u64,
) {
    let mut active: Vec<Active<E>> = Vec::new();
    let mut turn = 0_usize;
    let mut nothing_to_do = true;
    while take_commands(engine, commands, &mut active, nothing_to_do) {
        forget_finished(engine, &mut active);
        admit(engine, &mut active, sequence_bytes);
        publish(engine, &active, gauges);
        let mut tasks = Vec::new();
        for (request, job) in active.iter_mut().enumerate() {
            let needs = job.needs(engine).into_iter();
            tasks.extend(needs.map(|(choice, need)| ((request, choice), need)));
        }
        let needs: Vec<_> = tasks.iter().map(|(_, need)| *need).collect();
        let round = policy::round(&needs, rates.current(), engine.prefill_chunk_tokens(), turn);
        turn = turn.wrapping_add(1);
        nothing_to_do = round.decode.is_empty() && round.steps.is_empty();
        let address = |task: usize| tasks[task].0;
        let rows: Vec<_> = round.decode.into_iter().map(address).collect();
        let rows: Vec<_> = rows.into_iter().filter_map(|(request, c)| Some((request, c?))).collect();
        step::decode(engine, &mut active, &rows, rates);
        if !rows.is_empty() && turn.is_multiple_of(RELEASE_EVERY_PASSES) {
            release(engine);
        }
        for (task, action) in round.steps {
            let (request, choice) = address(task);
            let job = &mut active[request];
            if !job.is_over() {
                job.step(engine, choice, action, rates);
            }
        }
    }
}

/// Requests begin in order of arrival, while memory lasts. One that is alone always begins.
fn admit<E: Engine>(engine: &E, active: &mut [Active<E>], sequence_bytes: u64) {
    let mut claimed: u64 = active.iter().map(|job| job.claimed_bytes(engine)).sum();
    let mut anybody = active.iter().any(|job| !job.is_queued());
    for job in active.iter_mut().filter(|job| job.is_queued()) {
        claimed = claimed.saturating_add(job.planned_bytes(engine));
        if anybody && claimed > sequence_bytes {
            return;
        }
        job.admit();
        anybody = true;
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
    if active.len() < before {
        release(engine);
    }
}

fn release<E: Engine>(engine: &E) {
    if let Err(error) = engine.release_unused_memory() {
        tracing::warn!(%error, "releasing memory");
    }
}

fn publish<E: Engine>(engine: &E, active: &[Active<E>], gauges: &Gauges) {
    gauges.jobs.store(u32::try_from(active.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
    let bytes = active.iter().map(|job| job.cache_bytes(engine)).sum();
    gauges.sequence_bytes.store(bytes, Ordering::Relaxed);
}
