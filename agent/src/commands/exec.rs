//! Runs a program inside its containment and passes its output on.

use super::allow::Approved;
use super::rules::Rules;
use super::session::{Limits, Outlet};
use crate::process::{Containers, Containment, Nursery, end_descendants, signal_descendants};
use bytes::BytesMut;
use nix::sys::signal::Signal;
use shared::bus::{Exit, Frame, MAX_CHUNK_BYTES};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Child;

/// A program that was asked to end gets this long before it is killed.
const GRACE: Duration = Duration::from_secs(1);
/// After killing, how long the process around it may take to notice.
const NOTICE: Duration = Duration::from_secs(2);

/// Containers whose programs see what these rules say.
pub(super) fn containers(rules: &Rules, nursery: Nursery) -> Containers {
    let mut env = vec![("PATH", rules.path.clone().into()), ("LANG", "C.UTF-8".into())];
    if let Some(user) = &rules.user {
        let (home, name) = (user.home.clone().into(), user.name.clone());
        env.extend([("HOME", home), ("USER", name.clone().into()), ("LOGNAME", name.into())]);
    }
    Containers::new(nursery, env)
}

/// Runs it to its end, one way or another; nothing of it is left then.
pub(super) async fn run(
    rules: &Rules,
    containers: &Containers,
    approved: Approved,
    outlet: &mut Outlet,
    limits: &mut Limits,
) -> Exit {
    // The pipe is held to the end: its closing is the end of the container.
    let (mut child, lifeline) = match containers.run(&containment(rules, approved)).await {
        Ok(started) => started,
        Err(error) => return Exit::Failed { message: format!("can't be started: {error}") },
    };
    let nursery = containers.nursery();
    let pid = child.id();
    let exit = tokio::select! {
        exit = follow(&mut child, nursery, outlet) => exit,
        exit = limits.reached() => exit,
    };
    let is_asked_first = matches!(exit, Exit::Cancelled {} | Exit::TimedOut {});
    end(child, is_asked_first).await;
    drop(lifeline);
    nursery.forget(pid);
    // A container that ended by itself, with a code, has seen to it that nobody is left.
    if !matches!(exit, Exit::Code { .. }) {
        nursery.sweep();
    }
    exit
}

fn containment(rules: &Rules, approved: Approved) -> Containment {
    let user = rules.user.as_ref().filter(|_| nix::unistd::geteuid().is_root());
    Containment {
        program: approved.program,
        arg0: approved.arg0,
        args: approved.args,
        user: user.map(|u| (u.uid, u.gid)),
        working_dir: rules.working_dir.clone(),
        max_processes: rules.limits.max_processes,
        max_memory_bytes: rules.limits.max_memory_bytes,
        max_cpu_s: rules.limits.max_cpu_s,
        max_file_bytes: rules.limits.max_file_bytes,
    }
}

/// Passes output on until the program and everything it started are gone.
async fn follow(child: &mut Child, nursery: &Nursery, outlet: &mut Outlet) -> Exit {
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let (mut out, mut err) = (BytesMut::new(), BytesMut::new());
    let mut status = None;
    while stdout.is_some() || stderr.is_some() {
        let room = outlet.room().await.min(MAX_CHUNK_BYTES);
        let frame = tokio::select! {
            read = read(&mut stdout, &mut out, room) => read.map(|()| Frame::Stdout(out.split().freeze())),
            read = read(&mut stderr, &mut err, room) => read.map(|()| Frame::Stderr(err.split().freeze())),
            ended = child.wait(), if status.is_none() => {
                // Whoever got away from a container that was killed may hold the pipes open.
                if ended.as_ref().map_or(true, |status| status.code().is_none()) {
                    nursery.sweep();
                }
                status = Some(ended);
                continue;
            }
        };
        if let Some(frame) = frame
            && !outlet.send(frame).await
        {
            return Exit::OutputLimit {};
        }
    }
    let status = match status {
        Some(status) => status,
        None => child.wait().await,
    };
    status.map_or_else(|e| Exit::Failed { message: e.to_string() }, exit_of)
}

/// Reads a piece; `None`, and no more reader, at the end. Waits for ever without a reader.
async fn read(from: &mut Option<impl AsyncRead + Unpin>, into: &mut BytesMut, most: usize) -> Option<()> {
    let Some(reader) = from else { return std::future::pending().await };
    into.reserve(most);
    match reader.take(most as u64).read_buf(into).await {
        Ok(n) if n > 0 => Some(()),
        _ => {
            *from = None;
            None
        }
    }
}

fn exit_of(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code { code },
        (None, Some(signal)) => Exit::Signal { signal },
        (None, None) => Exit::Failed { message: status.to_string() },
    }
}

/// Ends the program, everything below it, and the process around it.
async fn end(mut child: Child, is_asked_first: bool) {
    let Some(pid) = child.id() else { return };
    if is_asked_first {
        signal_descendants(pid, Signal::SIGTERM);
        if tokio::time::timeout(GRACE, child.wait()).await.is_ok() {
            return;
        }
    }
    // Looking for processes blocks a little; nothing else may wait for that.
    let _ = tokio::task::spawn_blocking(move || end_descendants(pid)).await;
    if tokio::time::timeout(NOTICE, child.wait()).await.is_err() {
        let _ = child.kill().await;
    }
}
