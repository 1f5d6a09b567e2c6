//! Child processes of the tests: started, waited for, killed, measured.

use crate::paths;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

/// Longest start: a model is loaded, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(180);

/// A running program that ends with this value.
#[derive(Debug)]
pub struct Process {
    child: Child,
    lines: Mutex<mpsc::Receiver<String>>,
    log: tempfile::NamedTempFile,
    _stdin: Option<ChildStdin>,
}

/// Where a worker listens, from its first line.
#[derive(Debug, Clone, Deserialize)]
pub struct Addresses {
    /// Control port.
    pub control: String,
    /// Bulk port of a decode worker.
    pub bulk: Option<String>,
}

impl Process {
    /// Starts a release binary. Its stderr goes to a file that a panic shows the end of.
    #[must_use]
    pub fn start(program: &str, args: &[String]) -> Self {
        Self::start_in(None, program, args)
    }

    /// The same, inside a network namespace.
    #[must_use]
    pub fn start_in(netns: Option<&str>, program: &str, args: &[String]) -> Self {
        let program = paths::bin(program);
        let Some(netns) = netns else { return Self::start_at(&program, args) };
        // `ip` becomes the program, so that its process is ours.
        let exec = ["netns", "exec", netns, program.to_str().unwrap()].map(str::to_owned);
        Self::start_at(Path::new("ip"), &[&exec[..], args].concat())
    }

    /// Starts any program.
    #[must_use]
    pub fn start_at(program: &Path, args: &[String]) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.reopen().unwrap());
        command.env_remove("RUST_LOG");
        let mut child = command.spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (tx, lines) = mpsc::channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|l| tx.send(l)));
        let stdin = child.stdin.take();
        Self { child, lines: Mutex::new(lines), log, _stdin: stdin }
    }

    /// The next line on stdout.
    #[must_use]
    pub fn line(&self) -> String {
        match self.lines.lock().unwrap().recv_timeout(START_LIMIT) {
            Ok(line) => line,
            Err(e) => panic!("no line on stdout ({e}); stderr ends with:\n{}", self.log_tail()),
        }
    }

    /// Lines on stdout that nobody has read yet.
    #[must_use]
    pub fn more_lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().try_iter().collect()
    }

    /// The addresses that a worker prints when it is ready.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        let line = self.line();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("first line {line:?}: {e}"))
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(i32::try_from(self.pid()).unwrap()), signal);
    }

    /// Kills it and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for its end; `None` after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<std::process::ExitStatus> {
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        None
    }

    /// Everything on stderr so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log.path()).unwrap_or_default()
    }

    /// The last lines of stderr.
    #[must_use]
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(25)..].join("\n")
    }

    /// A field of `/proc/PID/status` in bytes (`VmRSS`, `VmHWM`); `None` where there is no such file.
    #[must_use]
    pub fn memory_bytes(&self, field: &str) -> Option<u64> {
        memory_bytes(self.pid(), field)
    }

    /// Open sockets; `None` where the system does not say.
    #[must_use]
    pub fn sockets(&self) -> Option<usize> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).ok()?;
        let is_socket =
            |p: PathBuf| std::fs::read_link(p).is_ok_and(|t| t.to_string_lossy().starts_with("socket:"));
        Some(fds.filter_map(|e| Some(is_socket(e.ok()?.path()))).filter(|s| *s).count())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln_tail(&self.log_tail(), self.pid());
        }
        self.kill();
    }
}

#[allow(clippy::print_stderr, reason = "the end of a child's log belongs to a test's failure report")]
fn eprintln_tail(tail: &str, pid: u32) {
    eprintln!("--- stderr of process {pid} ---\n{tail}");
}

/// A field of `/proc/PID/status` in bytes.
#[must_use]
pub fn memory_bytes(pid: u32, field: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Whether a process exists and is no zombie.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Direct and indirect children of a process.
#[must_use]
pub fn descendants(pid: u32) -> Vec<u32> {
    let direct = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(Result::ok);
    let children: Vec<u32> = direct
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|text| text.split_whitespace().filter_map(|w| w.parse().ok()).collect::<Vec<u32>>())
        .collect();
    let deeper: Vec<u32> = children.iter().flat_map(|c| descendants(*c)).collect();
    [children, deeper].concat()
}
