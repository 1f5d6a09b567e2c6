//! The life of one request: prepare, plan, bridge, decode; with cancel, deadlines and one retry.
//!
//! A request runs in a task of its own and reports [`Event`]s. When the receiver is dropped (the client
//! has left) the task is over at the next await, and the guards it holds cancel on both workers.

mod attempt;
mod bridge;
mod choices;
mod choose;
mod failure;
mod follow;
mod guard;
mod spec;
mod stop;
mod text;

pub(crate) use failure::{Failure, FailureKind};
pub(crate) use spec::{AnswerSpec, Finish, Piece, ScoredToken, Shaped};
pub(crate) use text::AnswerText;

use crate::fleet::Fleet;
use crate::live::{Live, Watched};
use crate::metrics::Metrics;
use crate::model::TextModel;
use crate::planner::Route;
use crate::record;
use crate::verdicts::VerdictStore;
use attempt::{Attempt, Outcome};
use shared::control::{Require, TokenLogprobs};
use shared::tokens::TokenIds;
use shared::verdict::{Parties, Verdict, VerdictKind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Events that may wait for a slow client before the request waits too.
const EVENT_BACKLOG: usize = 256;
/// Longest time that a client may leave a full backlog unread before its request ends.
const CLIENT_STALL: Duration = Duration::from_secs(60);

/// What every request needs.
pub(crate) struct Context {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) model: Arc<TextModel>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) verdicts: VerdictStore,
    /// What viewers of running requests see.
    pub(crate) live: Arc<Live>,
    pub(crate) min_bridge_tokens: u32,
    pub(crate) reconnect_wait: Duration,
}

/// A request to be answered.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// Name towards the client, who may have chosen it.
    pub(crate) request_id: String,
    /// Name towards the workers, unique.
    pub(crate) worker_id: String,
    /// The prompt.
    pub(crate) tokens: TokenIds,
    pub(crate) spec: AnswerSpec,
    pub(crate) require: Require,
    pub(crate) route: Route,
    /// When the request came in.
    pub(crate) arrived: Instant,
}

/// What happens to a request, in order: `Progress`*, `Started`, `Prompt`?, `Text`* with one `Finished` per choice;
/// `Failed` may come at any time and is the last.
#[derive(Debug)]
pub(crate) enum Event {
    /// The prompt is being read.
    Progress {
        /// Positions done.
        done_tokens: u32,
        /// Positions in all.
        total_tokens: u32,
    },
    /// The first token exists; the verdict is final.
    Started(Box<Verdict>),
    /// Log probabilities of the prompt's tokens from the second on, if asked for.
    Prompt(Vec<TokenLogprobs>),
    /// More of one choice; empty pieces are never sent.
    Text {
        /// Which choice.
        choice: u32,
        /// What is new.
        piece: Piece,
        /// When the decoder's message came in.
        arrived: Instant,
    },
    /// A choice is complete.
    Finished {
        /// Which choice.
        choice: u32,
        /// Why.
        finish: Finish,
        /// Its tokens.
        completion_tokens: u32,
    },
    /// There is no answer, or no more of it.
    Failed(Failure),
}

/// Starts a request. `permit` is held until it ends.
pub(crate) fn start<P: Send + 'static>(ctx: Arc<Context>, job: Job, permit: P) -> mpsc::Receiver<Event> {
    let (out, events) = mpsc::channel(EVENT_BACKLOG);
    let record = record::current();
    tokio::spawn(record::scope(record.clone(), async move {
        let _permit = permit;
        let _in_flight = InFlight::new(&ctx.metrics);
        let prompt_tokens = u32::try_from(job.tokens.len()).unwrap_or(u32::MAX);
        let watched = ctx.live.begin(&job.request_id, prompt_tokens, job.arrived);
        ctx.metrics.vllm.asked(job.spec.choices, job.spec.max_new_tokens);
        let mut last = Verdict::without_receipt(
            VerdictKind::Native,
            Some("client_gone".to_owned()),
            Parties { request_id: job.request_id.clone(), ..Parties::default() },
            prompt_tokens,
        );
        tokio::select! {
            () = out.closed() => {
                tracing::debug!(request_id = %job.request_id, "client left");
                record.left();
                ctx.metrics.vllm.aborted();
            }
            () = run(&ctx, &job, &out, &watched, &mut last) => {}
        }
        ctx.metrics.ended(&last, job.arrived.elapsed());
        record.ended(&last);
    }));
    events
}

/// Tries once, and once more if a worker was lost before any token went out.
async fn run(ctx: &Context, job: &Job, out: &mpsc::Sender<Event>, watched: &Watched, last: &mut Verdict) {
    let mut outcome = Attempt::new(ctx, job, out, watched, 0).run(last).await;
    if let Outcome::Lost(failure) = outcome {
        tracing::warn!(request_id = %job.request_id, reason = failure.kind.code(), "worker lost, trying again");
        ctx.metrics.retries.inc();
        outcome = Attempt::new(ctx, job, out, watched, 1).run(last).await;
    }
    if matches!(outcome, Outcome::Answered) {
        watched.answered();
    }
    if let Outcome::Lost(failure) | Outcome::Failed(failure) = outcome {
        watched.failed(&failure.verdict);
        tracing::warn!(request_id = %job.request_id, code = failure.kind.code(), error = %failure.kind, "request failed");
        ctx.metrics.vllm.failed();
        ctx.verdicts.put(&failure.verdict);
        *last = (*failure.verdict).clone();
        let _ = tokio::time::timeout(CLIENT_STALL, out.send(Event::Failed(failure))).await;
    }
}

/// Counts a request while it lives.
struct InFlight(prometheus::IntGauge);

impl InFlight {
    fn new(metrics: &Metrics) -> Self {
        metrics.in_flight.inc();
        Self(metrics.in_flight.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}
