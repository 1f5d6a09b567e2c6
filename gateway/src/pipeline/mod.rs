//! The life of one request: prepare, plan, bridge, decode; with cancel, deadlines and one retry.
//!
//! A request reports [`Event`]s and runs as its events are read. When its [`Running`] is dropped (the client has left) the
//! guards it holds cancel on both workers.

mod attempt;
mod bridge;
mod choices;
mod choose;
mod failure;
mod follow;
mod guard;
mod running;
mod spec;
mod stop;
mod text;

pub(crate) use failure::{Failure, FailureKind};
pub(crate) use running::Running;
pub(crate) use spec::{AnswerSpec, Finish, Piece, ScoredToken, Shaped};
pub(crate) use text::AnswerText;

use crate::fleet::Fleet;
use crate::live::{Live, Watched};
use crate::metrics::Metrics;
use crate::model::TextModel;
use crate::planner::Route;
use crate::record::{self, Record};
use crate::verdicts::VerdictStore;
use attempt::{Attempt, Outcome};
use running::Said;
use shared::control::{Require, TokenLogprobs};
use shared::tokens::TokenIds;
use shared::verdict::{Parties, Verdict, VerdictKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// The client gets the answer as a whole: until it is complete, nothing of it is told and it can be had anew.
    pub(crate) whole: bool,
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
    Started(Arc<Verdict>),
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
pub(crate) fn start<P: Send + 'static>(ctx: Arc<Context>, job: Job, permit: P) -> Running {
    let said = Arc::new(Said::default());
    let out = said.clone();
    let record = record::current();
    let work = record::scope(record.clone(), async move {
        let _permit = permit;
        let _in_flight = InFlight::new(&ctx.metrics);
        let prompt_tokens = u32::try_from(job.tokens.len()).unwrap_or(u32::MAX);
        let watched = ctx.live.begin(&job.request_id, prompt_tokens, job.arrived);
        ctx.metrics.vllm.asked(job.spec.choices, job.spec.max_new_tokens);
        let last = Verdict::without_receipt(
            VerdictKind::Native,
            Some("client_gone".to_owned()),
            Parties { request_id: job.request_id.clone(), ..Parties::default() },
            prompt_tokens,
        );
        let mut end = End { ctx: &ctx, record, arrived: job.arrived, last: Arc::new(last), over: false };
        run(&ctx, &job, &out, &watched, &mut end.last).await;
        end.over = true;
    });
    Running::new(said, work)
}

/// Tries of a request that no decoder has taken on yet: a worker that ends may be found again, and lost again, before it
/// stops listening.
const MAX_TRIES: u32 = 5;
/// Pause before a third try, and longer before each further one.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Tries once, and once more if a worker was lost before the client was told of any token. What no decoder has taken on is
/// tried more often: it can't be what the workers die of.
async fn run(ctx: &Context, job: &Job, out: &Said, watched: &Watched, last: &mut Arc<Verdict>) {
    let (mut number, mut taken_on) = (0, 0);
    let outcome = loop {
        let held = Said::default();
        let say_to = if job.whole { &held } else { out };
        let outcome = Attempt::new(ctx, job, say_to, watched, number).run(last).await;
        if matches!(outcome, Outcome::Answered) {
            out.take_over(&held);
        }
        let Outcome::Lost { failure, was_taken_on } = &outcome else { break outcome };
        number += 1;
        taken_on += u32::from(*was_taken_on);
        if taken_on > 1 || number == MAX_TRIES {
            break outcome;
        }
        tracing::warn!(request_id = %job.request_id, reason = failure.kind.code(), "worker lost, trying again");
        ctx.metrics.retries.inc();
        tokio::time::sleep(RETRY_PAUSE * (number - 1)).await;
    };
    if matches!(outcome, Outcome::Answered) {
        watched.answered();
    }
    if let Outcome::Lost { failure, .. } | Outcome::Failed(failure) = outcome {
        watched.failed(&failure.verdict);
        tracing::warn!(request_id = %job.request_id, code = failure.kind.code(), error = %failure.kind, "request failed");
        ctx.metrics.vllm.failed();
        *last = Arc::new((*failure.verdict).clone());
        ctx.verdicts.put(last.clone());
        out.push(Event::Failed(failure));
    }
}

/// Counts a request's end, however it comes.
struct End<'a> {
    ctx: &'a Context,
    record: Arc<Record>,
    arrived: Instant,
    /// What the metrics count the request as.
    last: Arc<Verdict>,
    /// It came to its own end; otherwise the client left.
    over: bool,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        if !self.over {
            tracing::debug!(request_id = %self.last.request_id, "client left");
            self.record.left();
            self.ctx.metrics.vllm.aborted();
        }
        self.ctx.metrics.ended(&self.last, self.arrived.elapsed());
        self.record.ended(&self.last);
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
