//! One JSON line per request, written by a thread of its own: a slow disk never slows an answer.

use prometheus::IntCounter;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Lines that may wait for the disk; further ones are dropped and counted.
const BACKLOG: usize = 8192;
/// How long a line may stay in the buffer.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);
/// A file is opened anew this often, so that one that was moved away is let go.
const REOPEN_INTERVAL: Duration = Duration::from_secs(10);

/// Where the lines go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// Standard output.
    Stdout,
    /// The end of a file.
    File(PathBuf),
}

/// The log; clones write to the same place.
#[derive(Debug, Clone)]
pub(crate) struct AccessLog {
    lines: SyncSender<String>,
    dropped: IntCounter,
}

impl AccessLog {
    /// Opens the target and starts the writer, which ends with the last clone.
    ///
    /// # Errors
    /// The file can't be opened, or no thread started.
    pub(crate) fn start(target: Target, dropped: IntCounter) -> std::io::Result<(Self, Writer)> {
        let out = Out::open(&target)?;
        let (lines, queue) = sync_channel(BACKLOG);
        let thread = std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || write_all(&queue, out, &target))?;
        Ok((Self { lines, dropped }, Writer(thread)))
    }

    /// Adds a line.
    pub(crate) fn write(&self, line: String) {
        if self.lines.try_send(line).is_err() {
            self.dropped.inc();
        }
    }
}

/// The writing thread.
#[derive(Debug)]
pub(crate) struct Writer(std::thread::JoinHandle<()>);

impl Writer {
    /// Waits until all lines are written, no longer than `limit`; the last clone of the log must be gone by then.
    pub(crate) async fn finish(self, limit: Duration) {
        let end = Instant::now() + limit;
        while !self.0.is_finished() && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

enum Out {
    Stdout(std::io::Stdout),
    File(BufWriter<File>),
}

impl Out {
    fn open(target: &Target) -> std::io::Result<Self> {
        Ok(match target {
            Target::Stdout => Self::Stdout(std::io::stdout()),
            Target::File(path) => {
                Self::File(BufWriter::new(OpenOptions::new().create(true).append(true).open(path)?))
            }
        })
    }

    fn as_write(&mut self) -> &mut dyn Write {
        match self {
            Self::Stdout(out) => out,
            Self::File(out) => out,
        }
    }
}

fn write_all(queue: &Receiver<String>, mut out: Out, target: &Target) {
    let mut opened = Instant::now();
    let mut flushed = Instant::now();
    loop {
        let line = queue.recv_timeout(FLUSH_INTERVAL);
        if let Ok(line) = &line
            && let Err(error) = writeln!(out.as_write(), "{line}")
        {
            tracing::error!(%error, "access log");
        }
        if flushed.elapsed() >= FLUSH_INTERVAL || line.is_err() {
            flushed = Instant::now();
            if let Err(error) = out.as_write().flush() {
                tracing::error!(%error, "access log");
            }
        }
        if line == Err(RecvTimeoutError::Disconnected) {
            return;
        }
        if opened.elapsed() > REOPEN_INTERVAL && matches!(target, Target::File(_)) {
            opened = Instant::now();
            match Out::open(target) {
                Ok(new) => out = new,
                Err(error) => tracing::error!(%error, "access log"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_reach_the_file_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("access.log");
        let dropped = IntCounter::new("x", "y").unwrap();
        let (log, writer) = AccessLog::start(Target::File(file.clone()), dropped).unwrap();
        for i in 0..100 {
            log.write(i.to_string());
        }
        drop(log);
        writer.finish(Duration::from_secs(5)).await;
        let text = std::fs::read_to_string(file).unwrap();
        assert_eq!(
            text.lines().map(str::to_owned).collect::<Vec<_>>(),
            (0..100).map(|i| i.to_string()).collect::<Vec<_>>()
        );
    }
}
