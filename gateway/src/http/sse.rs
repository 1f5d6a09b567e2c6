//! Server-sent events of one answer. Every token's bytes are handed to the connection when they exist.

use super::error::ApiError;
use super::telling::{Step, Telling};
use super::write_clock::WriteClock;
use bytes::Bytes;
use shared::verdict::Verdict;
use std::convert::Infallible;
use std::pin::Pin;
use std::time::{Duration, Instant};
use tokio::time::Sleep;

/// How often progress is told before the answer begins.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// The body of a streamed answer.
pub(super) struct SseBody {
    telling: Telling,
    clock: WriteClock,
    /// The headers said `pending`, and the verdict has not been told yet.
    owes_verdict: bool,
    last_progress: Option<Instant>,
    quiet: Quiet,
    over: bool,
}

/// Notices silence, without a timer per token.
struct Quiet {
    interval: Duration,
    next_look: Pin<Box<Sleep>>,
    said_something: bool,
}

impl SseBody {
    /// A body whose headers hold the verdict, or (`early`) will hold it itself.
    /// After `keep_alive` of silence at most, a comment tells the client and all proxies that the answer goes on.
    pub(super) fn new(telling: Telling, early: bool, clock: WriteClock, keep_alive: Duration) -> Self {
        let quiet = Quiet::new(keep_alive / 2);
        Self { telling, clock, owes_verdict: early, last_progress: None, quiet, over: false }
    }

    /// The stream of pieces. Dropping it (the client has left) drops the event receivers, which ends the request.
    pub(super) fn into_stream(self) -> impl futures_util::Stream<Item = Result<Bytes, Infallible>> + Send {
        futures_util::stream::unfold(self, |mut body| async move {
            let piece = body.next().await?;
            Some((Ok(piece), body))
        })
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(piece) = self.telling.frames.pop() {
                self.quiet.said_something = true;
                return Some(piece);
            }
            if self.over {
                return None;
            }
            self.step().await;
        }
    }

    async fn step(&mut self) {
        let step = tokio::select! {
            biased;
            step = self.telling.step() => step,
            () = self.quiet.lasted() => return self.telling.frames.comment("keep-alive"),
        };
        match step {
            Step::Progress { done_tokens, total_tokens } => {
                if self.last_progress.is_none_or(|at| at.elapsed() >= PROGRESS_INTERVAL) {
                    self.last_progress = Some(Instant::now());
                    self.telling.frames.comment(&format!("prefill {done_tokens}/{total_tokens}"));
                }
            }
            Step::Started => {
                if let (true, Some(verdict)) = (self.owes_verdict, self.telling.verdict()) {
                    self.tell(&verdict);
                }
            }
            Step::Said(arrived) => {
                if let Some(arrived) = arrived {
                    self.clock.expect(arrived);
                }
            }
            Step::Over => self.over = true,
            Step::Failed(failure) => {
                if self.owes_verdict {
                    self.tell(&failure.verdict);
                }
                self.telling.fail(&ApiError::from(&failure.kind));
                self.over = true;
            }
        }
    }

    /// The verdict goes before the first token.
    fn tell(&mut self, verdict: &Verdict) {
        self.owes_verdict = false;
        self.telling.frames.comment_first(&format!("x-pd-bridge {}", verdict.to_header_value()));
    }
}

impl Quiet {
    fn new(interval: Duration) -> Self {
        Self { interval, next_look: Box::pin(tokio::time::sleep(interval)), said_something: false }
    }

    /// Resolves when nothing was said for an interval.
    async fn lasted(&mut self) {
        loop {
            self.next_look.as_mut().await;
            self.next_look.as_mut().reset(tokio::time::Instant::now() + self.interval);
            if !std::mem::take(&mut self.said_something) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn silence_is_noticed_within_two_intervals() {
        let interval = Duration::from_millis(40);
        let mut quiet = Quiet::new(interval);
        let begun = tokio::time::Instant::now();
        quiet.said_something = true;
        quiet.lasted().await;
        assert!(begun.elapsed() >= 2 * interval);
        quiet.lasted().await;
        assert!(begun.elapsed() >= 3 * interval);
    }
}
