//! The process around a command.

use super::tree::{self, end_descendants};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Gid, Uid};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use std::io::{BufRead as _, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

/// First argument of this program when it is the process around a command.
pub(crate) const CONTAIN: &str = "contain-command";
/// As shells say it.
const CANT_START: u8 = 126;

/// What holds a command. All limits are inherited and can't be raised again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Containment {
    /// Program, resolved.
    pub(crate) program: PathBuf,
    /// What the program sees as its own name.
    pub(crate) arg0: PathBuf,
    /// Arguments.
    pub(crate) args: Vec<String>,
    /// Whom to become; `None` stays.
    pub(crate) user: Option<(u32, u32)>,
    /// Where to run.
    pub(crate) working_dir: PathBuf,
    /// Processes of the user, whoever started them.
    pub(crate) max_processes: u64,
    /// Address space of each process.
    pub(crate) max_memory_bytes: u64,
    /// Processor time of each process.
    pub(crate) max_cpu_s: u64,
    /// Size of each file written.
    pub(crate) max_file_bytes: u64,
}

/// Longest order, in bytes: more than any command that an agent takes.
const MAX_ORDER_BYTES: u64 = 4 << 20;

/// Waits for an order, runs that one command inside limits, and ends like it. Standard input must be a pipe that the
/// agent holds: when it closes, everything here ends, however the agent ended.
pub(crate) fn contain() -> ExitCode {
    match wait_and_run() {
        Ok(Some(status)) => end_like(status),
        // The agent has ended and needs no spare any more.
        Ok(None) => ExitCode::SUCCESS,
        Err(message) => refuse(&message),
    }
}

fn wait_and_run() -> Result<Option<WaitStatus>, String> {
    rustix::process::setsid().map_err(|e| format!("no session of its own: {e}"))?;
    #[cfg(target_os = "linux")]
    {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(|e| e.to_string())?;
        rustix::thread::set_no_new_privs(true).map_err(|e| e.to_string())?;
    }
    let mut order = Vec::new();
    let reading = std::io::stdin().lock().take(MAX_ORDER_BYTES).read_until(b'\n', &mut order);
    reading.map_err(|e| format!("no order: {e}"))?;
    if order.is_empty() {
        return Ok(None);
    }
    let spec = serde_json::from_slice(&order).map_err(|_| "this is no command for people".to_owned())?;
    run(&spec).map(Some)
}

fn run(spec: &Containment) -> Result<WaitStatus, String> {
    if let Some((uid, gid)) = spec.user {
        become_user(uid, gid).map_err(|e| format!("can't become user {uid}: {e}"))?;
    }
    std::env::set_current_dir(&spec.working_dir)
        .map_err(|e| format!("{}: {e}", spec.working_dir.display()))?;
    // Before the limits: it counts as a process, too.
    end_with_the_agent();
    limit(spec)?;
    let child = Command::new(&spec.program)
        .arg0(&spec.arg0)
        .args(&spec.args)
        .stdin(Stdio::null())
        // Not this process' group: a command that signals its own group must not hit this one.
        .process_group(0)
        .spawn()
        .map_err(|e| format!("{}: {e}", spec.program.display()))?;
    let status = reap_until(child.id())?;
    // Without a child there is no descendant: whoever lost its parent is a child of this reaper.
    if waitpid(None, Some(WaitPidFlag::WNOHANG)) != Err(nix::errno::Errno::ECHILD) {
        end_descendants(std::process::id());
        while waitpid(None, Some(WaitPidFlag::WNOHANG)).is_ok_and(|s| s != WaitStatus::StillAlive) {}
    }
    Ok(status)
}

fn become_user(uid: u32, gid: u32) -> nix::Result<()> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    #[cfg(not(target_os = "macos"))]
    nix::unistd::setgroups(&[gid])?;
    nix::unistd::setgid(gid)?;
    nix::unistd::setuid(uid)
}

fn limit(spec: &Containment) -> Result<(), String> {
    let limits = [
        (Resource::Core, 0),
        (Resource::Nproc, spec.max_processes),
        (Resource::As, spec.max_memory_bytes),
        (Resource::Cpu, spec.max_cpu_s),
        (Resource::Fsize, spec.max_file_bytes),
    ];
    for (resource, limit) in limits {
        let both = Rlimit { current: Some(limit), maximum: Some(limit) };
        match setrlimit(resource, both) {
            Ok(()) => {}
            // macOS knows the limit on address space but does not take it.
            Err(_) if cfg!(target_os = "macos") && resource == Resource::As => {}
            Err(e) => return Err(format!("limit {resource:?} to {limit}: {e}")),
        }
    }
    Ok(())
}

fn end_with_the_agent() {
    std::thread::spawn(|| {
        let mut sink = [0; 64];
        let mut lifeline = std::io::stdin().lock();
        while lifeline.read(&mut sink).is_ok_and(|n| n > 0) {}
        end_descendants(std::process::id());
        std::process::exit(i32::from(CANT_START));
    });
}

/// Waits for everybody, as the reaper must, until the command itself has ended.
fn reap_until(pid: u32) -> Result<WaitStatus, String> {
    loop {
        match waitpid(None, None) {
            Ok(status @ (WaitStatus::Exited(who, _) | WaitStatus::Signaled(who, ..)))
                if u32::try_from(who.as_raw()) == Ok(pid) =>
            {
                return Ok(status);
            }
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(format!("waiting for the command: {e}")),
        }
    }
}

fn end_like(status: WaitStatus) -> ExitCode {
    match status {
        WaitStatus::Exited(_, code) => ExitCode::from(u8::try_from(code & 0xff).unwrap_or(CANT_START)),
        WaitStatus::Signaled(_, signal, _) => {
            tree::signal(std::process::id(), signal);
            // A signal that was not deadly after all.
            tree::signal(std::process::id(), Signal::SIGKILL);
            ExitCode::from(CANT_START)
        }
        _ => ExitCode::from(CANT_START),
    }
}

#[allow(clippy::print_stderr, reason = "the operator reads what this process says")]
fn refuse(message: &str) -> ExitCode {
    eprintln!("pd-agent: {message}");
    ExitCode::from(CANT_START)
}
