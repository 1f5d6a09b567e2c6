//! Server-sent events of one answer. Every token's bytes are handed to the connection when they exist.

use super::error::ApiError;
use super::shape::{Shape, usage};
use super::write_clock::WriteClock;
use crate::pipeline::Event;
use bytes::Bytes;
use serde_json::Value;
use shared::verdict::Verdict;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often progress is told before the answer begins.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

/// The body of a streamed answer.
pub(super) struct SseBody {
    events: mpsc::Receiver<Event>,
    shape: Shape,
    include_usage: bool,
    clock: WriteClock,
    /// The headers said `pending`, so the verdict goes into the body.
    early: bool,
    verdict: Option<Box<Verdict>>,
    last_progress: Option<Instant>,
    ready: VecDeque<Bytes>,
    over: bool,
}

impl SseBody {
    /// A body whose headers hold the verdict already.
    pub(super) fn after_verdict(
        verdict: Box<Verdict>,
        events: mpsc::Receiver<Event>,
        shape: Shape,
        include_usage: bool,
        clock: WriteClock,
    ) -> Self {
        let mut body = Self::new(events, shape, include_usage, clock);
        body.early = false;
        body.begin(verdict);
        body
    }

    /// A body that begins before the verdict is known.
    pub(super) fn early(
        events: mpsc::Receiver<Event>,
        shape: Shape,
        include_usage: bool,
        clock: WriteClock,
    ) -> Self {
        Self::new(events, shape, include_usage, clock)
    }

    fn new(events: mpsc::Receiver<Event>, shape: Shape, include_usage: bool, clock: WriteClock) -> Self {
        Self {
            events,
            shape,
            include_usage,
            clock,
            early: true,
            verdict: None,
            last_progress: None,
            ready: VecDeque::new(),
            over: false,
        }
    }

    /// The stream of pieces. Dropping it (the client has left) drops the event receiver, which ends the request.
    pub(super) fn into_stream(self) -> impl futures_util::Stream<Item = Result<Bytes, Infallible>> + Send {
        futures_util::stream::unfold(self, |mut body| async move {
            let piece = body.next().await?;
            Some((Ok(piece), body))
        })
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            if self.over {
                return None;
            }
            match self.events.recv().await {
                Some(event) => self.take(event),
                None => self.fail(&ApiError::internal("the request ended without an answer")),
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Progress { done_tokens, total_tokens } => {
                if self.last_progress.is_none_or(|at| at.elapsed() >= PROGRESS_INTERVAL) {
                    self.last_progress = Some(Instant::now());
                    self.ready.push_back(Bytes::from(format!(": prefill {done_tokens}/{total_tokens}\n\n")));
                }
            }
            Event::Started(verdict) => self.begin(verdict),
            Event::Text { text, arrived } => {
                self.clock.expect(arrived);
                self.data(&self.shape.text_chunk(&text));
            }
            Event::Finished { finish_reason, completion_tokens } => {
                self.data(&self.shape.last_chunk(finish_reason));
                if self.include_usage
                    && let Some(verdict) = &self.verdict
                {
                    self.data(&self.shape.usage_chunk(&usage(verdict, completion_tokens)));
                }
                self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                self.over = true;
            }
            Event::Failed(failure) => {
                if self.early && self.verdict.is_none() {
                    self.verdict_comment(&failure.verdict);
                }
                self.fail(&ApiError::from(&failure.kind));
            }
        }
    }

    fn begin(&mut self, verdict: Box<Verdict>) {
        if self.early {
            self.verdict_comment(&verdict);
        }
        self.verdict = Some(verdict);
        if let Some(chunk) = self.shape.first_chunk() {
            self.data(&chunk);
        }
    }

    fn verdict_comment(&mut self, verdict: &Verdict) {
        self.ready.push_back(Bytes::from(format!(": x-pd-bridge {}\n\n", verdict.to_header_value())));
    }

    /// An error in mid-stream, in the form that SDKs understand, then the end.
    fn fail(&mut self, error: &ApiError) {
        self.data(&error.body());
        self.over = true;
    }

    fn data(&mut self, value: &Value) {
        self.ready.push_back(Bytes::from(format!("data: {value}\n\n")));
    }
}
