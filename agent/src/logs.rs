//! The last log lines, of this agent and of the workers that it runs.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io::IsTerminal as _;
use std::sync::Arc;
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Longer lines are cut.
const MAX_LINE_BYTES: usize = 4096;
/// Bytes kept, whatever the number of lines.
const MAX_BYTES: usize = 4 << 20;

/// A bounded number of lines; clones share them.
#[derive(Debug, Clone)]
pub(crate) struct LogRing(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    lines: Mutex<Lines>,
    /// Number of the next line.
    next: watch::Sender<u64>,
    max_lines: usize,
}

#[derive(Debug, Default)]
struct Lines {
    lines: VecDeque<String>,
    bytes: usize,
    /// Number of the first line that is kept.
    first: u64,
}

impl LogRing {
    /// Keeps at most that many lines.
    pub(crate) fn new(max_lines: usize) -> Self {
        Self(Arc::new(Shared {
            lines: Mutex::default(),
            next: watch::channel(0).0,
            max_lines: max_lines.max(1),
        }))
    }

    /// Adds a line; one without its line break.
    pub(crate) fn push(&self, line: &str) {
        let end = line.floor_char_boundary(MAX_LINE_BYTES.min(line.len()));
        let line = line[..end].to_owned();
        let mut kept = self.0.lines.lock();
        kept.bytes += line.len();
        kept.lines.push_back(line);
        while kept.lines.len() > self.0.max_lines || kept.bytes > MAX_BYTES {
            let dropped = kept.lines.pop_front().map_or(0, |l| l.len());
            kept.bytes -= dropped;
            kept.first += 1;
        }
        self.0.next.send_replace(kept.first + kept.lines.len() as u64);
    }

    /// Number of the line that is `back` lines before the next one, as far as lines are kept.
    pub(crate) fn last(&self, back: usize) -> u64 {
        let kept = self.0.lines.lock();
        kept.first + kept.lines.len().saturating_sub(back) as u64
    }

    /// Some lines from number `from` on: their text, how many were dropped before them, and the number to go on with.
    pub(crate) fn read(&self, from: u64, max_bytes: usize) -> (String, u64, u64) {
        let kept = self.0.lines.lock();
        let start = from.max(kept.first);
        let (mut text, mut next) = (String::new(), start);
        let skip = usize::try_from(start - kept.first).unwrap_or(usize::MAX);
        for line in kept.lines.iter().skip(skip) {
            if !text.is_empty() && text.len() + line.len() + 1 > max_bytes {
                break;
            }
            text.push_str(line);
            text.push('\n');
            next += 1;
        }
        (text, start - from, next)
    }

    /// Waits for a line with this number.
    pub(crate) async fn wait_for(&self, number: u64) {
        let mut next = self.0.next.subscribe();
        if next.wait_for(|next| *next > number).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Starts logging to stderr and to the ring.
pub(crate) fn init(json: bool, ring: &LogRing) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Tee(ring.clone()));
    let builder = builder.with_ansi(std::io::stderr().is_terminal());
    let _ = if json { builder.json().try_init() } else { builder.try_init() };
}

struct Tee(LogRing);

impl<'a> MakeWriter<'a> for Tee {
    type Writer = TeeWriter<'a>;
    fn make_writer(&'a self) -> Self::Writer {
        TeeWriter(&self.0)
    }
}

/// Gets each event in one piece.
struct TeeWriter<'a>(&'a LogRing);

impl std::io::Write for TeeWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for line in String::from_utf8_lossy(bytes).lines() {
            self.0.push(line);
        }
        std::io::stderr().write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_keeps_the_last_lines_and_tells_what_was_dropped() {
        let ring = LogRing::new(3);
        (0..5).for_each(|i| ring.push(&i.to_string()));
        assert_eq!(ring.read(0, 1000), ("2\n3\n4\n".into(), 2, 5));
        assert_eq!(ring.read(ring.last(2), 1000), ("3\n4\n".into(), 0, 5));
        assert_eq!(ring.read(2, 3), ("2\n".into(), 0, 3));
        assert_eq!(ring.read(5, 1000), (String::new(), 0, 5));
        assert_eq!(ring.last(100), 2);
    }

    #[test]
    fn bytes_are_bounded_too() {
        let ring = LogRing::new(usize::MAX);
        (0..2000).for_each(|_| ring.push(&"ä".repeat(3000)));
        let kept = ring.0.lines.lock();
        assert!(kept.bytes <= MAX_BYTES && kept.lines.iter().all(|l| l.len() <= MAX_LINE_BYTES));
    }

    #[tokio::test]
    async fn a_reader_is_woken_by_the_next_line() {
        let ring = LogRing::new(3);
        let waiting = tokio::spawn({
            let ring = ring.clone();
            async move { ring.wait_for(0).await }
        });
        ring.push("x");
        waiting.await.unwrap();
    }
}
