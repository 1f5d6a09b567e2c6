//! One try at answering a request on one decoder.

use super::bridge::{Bridge, abort_transfer};
use super::choose::{Chosen, Peer};
use super::follow::Running;
use super::running::Said;
use super::{Context, Failure, FailureKind, Job};
use crate::deadlines;
use crate::fleet::{DecodeLink, PrefillLink};
use crate::live::{Stage, Watched};
use crate::metrics::Times;
use crate::planner::Plan;
use shared::control::{
    ControlError, DecodeEvent, DecodeRequest, EventStream, GenerateSpec, PrefillReport, Require,
    TransferOffer, WorkerError, WorkerErrorCode,
};
use shared::keys::BlockKey;
use shared::trace::{self, Span};
use shared::verdict::{Parties, Planned, Verdict, VerdictKind};
use shared::wire::AbortCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Token messages of one answer that may wait here for a slow client. So many more round trips than tokens would it take
/// before the wait for news of them slowed a decoder down.
pub(super) const WINDOW_EVENTS: u32 = 64;

/// One try.
pub(super) struct Attempt<'a> {
    pub(super) ctx: &'a Context,
    pub(super) job: &'a Job,
    pub(super) out: &'a Said,
    pub(super) watched: &'a Watched,
    /// Name towards the workers: a second try must not meet the remains of the first.
    pub(super) worker_id: String,
    pub(super) retry: bool,
    pub(super) prompt_tokens: u32,
    pub(super) parties: Parties,
    pub(super) planned: Planned,
    /// What the gateway itself knows of a broken transfer.
    pub(super) broken: Option<AbortCode>,
    pub(super) report: Option<PrefillReport>,
    /// A decoder has said that it holds the prompt.
    taken_on: bool,
    /// Keys of the prompt's full blocks on this decoder.
    pub(super) keys: Arc<[BlockKey]>,
    /// Once the first token exists: what the client was told.
    pub(super) told: Option<Arc<Verdict>>,
    /// What is known of where the time goes; `decode` at the end only.
    pub(super) times: Times,
    /// When the first token came.
    pub(super) begun: Option<Instant>,
    /// From asking the decoder for the answer to its end.
    decode_span: Span,
}

/// How a try ended.
pub(super) enum Outcome {
    /// Answered to the end, or as far as a stop text.
    Answered,
    /// Failed for good.
    Failed(Failure),
    /// A worker was lost before the client was told anything.
    Lost {
        failure: Failure,
        /// After a decoder had said that it holds the prompt.
        was_taken_on: bool,
    },
}

/// Why a try ended early.
pub(super) enum Stop {
    Failed(FailureKind),
    Lost(FailureKind),
}

impl From<FailureKind> for Stop {
    fn from(kind: FailureKind) -> Self {
        Self::Failed(kind)
    }
}

impl<'a> Attempt<'a> {
    pub(super) fn new(
        ctx: &'a Context,
        job: &'a Job,
        out: &'a Said,
        watched: &'a Watched,
        number: u32,
    ) -> Self {
        let worker_id =
            if number == 0 { job.worker_id.clone() } else { format!("{}.{number}", job.worker_id) };
        Self {
            ctx,
            job,
            out,
            watched,
            worker_id,
            retry: number > 0,
            prompt_tokens: u32::try_from(job.tokens.len()).unwrap_or(u32::MAX),
            parties: Parties { request_id: job.request_id.clone(), ..Parties::default() },
            planned: Planned::Native { reason: String::new() },
            broken: None,
            report: None,
            taken_on: false,
            keys: Arc::default(),
            told: None,
            times: Times::default(),
            begun: None,
            decode_span: Span::default(),
        }
    }

    /// Runs to the end. `last` is what the metrics count the request as.
    pub(super) async fn run(mut self, last: &mut Arc<Verdict>) -> Outcome {
        match self.answer(last).await {
            Ok(()) => {
                let decode = self.begun.map(|at| at.elapsed()).unwrap_or_default();
                self.ctx.metrics.vllm.spent(Times { decode, ..self.times });
                Outcome::Answered
            }
            Err(Stop::Failed(kind)) => Outcome::Failed(self.failure(kind)),
            Err(Stop::Lost(kind)) => {
                Outcome::Lost { failure: self.failure(kind), was_taken_on: self.taken_on }
            }
        }
    }

    async fn answer(&mut self, last: &mut Arc<Verdict>) -> Result<(), Stop> {
        let planning = Span::below("plan", trace::current().as_ref());
        let chosen = self.choose().await?;
        let Chosen { decoder, mut guard, max_new_tokens, queue, keys, peer, plan, events } = chosen;
        self.keys = keys;
        self.taken_on = true;
        drop(planning);
        let mut bridge = None;
        match plan {
            Plan::Refuse(reason) => return Err(FailureKind::Refused(reason.as_str().to_owned()).into()),
            Plan::Native(reason) => self.planned = Planned::Native { reason: reason.as_str().to_owned() },
            Plan::Warm => self.planned = Planned::Warm,
            Plan::Bridge { start, end } => {
                self.planned = Planned::Bridge;
                if let Some(peer) = peer {
                    bridge = self.open_bridge(&decoder, peer, start, end).await?;
                }
            }
        }
        self.watched.workers(self.parties.prefill.as_deref(), self.parties.decode.as_deref());
        self.watched.enter(if bridge.is_some() { Stage::Prefill } else { Stage::Native });
        let events = match events {
            Some(events) => events,
            None => self.generate(&decoder, max_new_tokens, bridge.as_ref()).await?,
        };
        let run = Running { decoder: &decoder, guard: &mut guard, events, bridge, queue };
        Box::pin(self.follow(run, last)).await
    }

    /// Refuses what the decoder can't hold; returns the room for the answer.
    pub(super) fn check_size(&self, decoder: &DecodeLink) -> Result<u32, FailureKind> {
        let (vocab, max_tokens) = (decoder.hello.vocab_size, decoder.hello.max_tokens);
        if let Some(&id) = self.job.tokens.iter().find(|id| **id >= vocab) {
            return Err(FailureKind::BadToken(id));
        }
        let room = max_tokens.saturating_sub(self.prompt_tokens);
        if room == 0 {
            return Err(FailureKind::TooLong { prompt_tokens: self.prompt_tokens, max_tokens });
        }
        // The first token is computed with the prompt, wanted or not.
        Ok(self.job.spec.max_new_tokens.map_or(room, |wanted| wanted.clamp(1, room)))
    }

    pub(super) async fn prepare(&self, decoder: &DecodeLink) -> Result<EventStream<DecodeEvent>, Stop> {
        let request = DecodeRequest::Prepare {
            request_id: self.worker_id.clone(),
            tokens: self.job.tokens.clone(),
            constraint: self.job.spec.constraint.as_ref().map(|shaped| shaped.constraint.clone()),
        };
        decoder.client.request(&request).await.map_err(lost)
    }

    /// The answer to `prepare`: resident positions and requests ahead.
    pub(super) async fn prepared(
        &self,
        decoder: &DecodeLink,
        mut answer: EventStream<DecodeEvent>,
    ) -> Result<(u32, u32), Stop> {
        let limit = deadlines::exchange(self.prompt_tokens);
        let answered = tokio::time::timeout(limit, answer.only()).await;
        match answered.unwrap_or(Err(ControlError::Timeout(limit))).map_err(lost)? {
            DecodeEvent::Prepared { resident_tokens, queue, rates } => {
                decoder.learn(rates);
                Ok((resident_tokens, queue))
            }
            DecodeEvent::Error(error) => Err(match &self.job.spec.constraint {
                Some(shaped) if error.code == WorkerErrorCode::InvalidRequest => {
                    FailureKind::BadConstraint { param: shaped.param, message: error.message }
                }
                _ => FailureKind::Worker(error),
            }
            .into()),
            other => Err(FailureKind::Protocol(format!("{other:?} as the answer to prepare")).into()),
        }
    }

    /// Opens the transfer and starts the prefill. `None` when that failed and the decoder may go on alone.
    async fn open_bridge(
        &mut self,
        decoder: &Arc<DecodeLink>,
        peer: Peer,
        start: u32,
        end: u32,
    ) -> Result<Option<Bridge>, Stop> {
        self.parties.prefill = Some(peer.0.hello.node.clone());
        let offer = match self.open_transfer(decoder, &peer.0, start, end).await? {
            Ok(offer) => offer,
            Err(error) => {
                // Too large for the decoder's store, or for what others leave of it at present.
                let code = match error.code {
                    WorkerErrorCode::TooLong | WorkerErrorCode::Busy => AbortCode::OverBudget,
                    _ => AbortCode::Internal,
                };
                self.broken = Some(code);
                return self.go_on_alone(code.as_str()).map(|()| None);
            }
        };
        self.parties.transport = Some("tcp".to_owned());
        match Bridge::start(peer, decoder, &self.worker_id, &self.job.tokens, self.keys.clone(), offer).await
        {
            Ok(bridge) => Ok(Some(bridge)),
            Err(abort) => {
                self.broken = Some(abort.code);
                abort_transfer(decoder, &self.worker_id, abort);
                if self.job.require != Require::Nothing && !self.retry {
                    return Err(Stop::Lost(FailureKind::Refused("connection_lost".to_owned())));
                }
                self.go_on_alone("connection_lost").map(|()| None)
            }
        }
    }

    fn go_on_alone(&self, reason: &str) -> Result<(), Stop> {
        match self.job.require {
            Require::Nothing => Ok(()),
            Require::Any | Require::Complete => Err(FailureKind::Refused(reason.to_owned()).into()),
        }
    }

    async fn open_transfer(
        &self,
        decoder: &DecodeLink,
        prefill: &PrefillLink,
        token_start: u32,
        token_end: u32,
    ) -> Result<Result<TransferOffer, WorkerError>, Stop> {
        let idle = deadlines::transfer_idle(
            self.prompt_tokens,
            prefill.load.tokens(),
            prefill.rates().prefill_tokens_per_s,
        );
        let request = DecodeRequest::OpenTransfer {
            request_id: self.worker_id.clone(),
            token_start,
            token_end,
            idle_timeout_ms: millis(idle),
        };
        match self.call(decoder, &request).await? {
            DecodeEvent::Offer(offer) => Ok(Ok(offer)),
            DecodeEvent::Error(error) => Ok(Err(error)),
            other => Err(FailureKind::Protocol(format!("{other:?} as the answer to open_transfer")).into()),
        }
    }

    pub(super) async fn generate(
        &mut self,
        decoder: &DecodeLink,
        max_new_tokens: u32,
        bridge: Option<&Bridge>,
    ) -> Result<EventStream<DecodeEvent>, Stop> {
        let (rate, queued) = bridge.map_or((0.0, 0), Bridge::outlook);
        let answer = &self.job.spec;
        let mut stop_token_ids = answer.stop_token_ids.clone();
        if !answer.ignore_eos {
            stop_token_ids.extend(&self.ctx.model.spec.eos_token_ids);
        }
        let spec = GenerateSpec {
            request_id: self.worker_id.clone(),
            max_new_tokens,
            sampling: answer.sampling.clone(),
            stop_token_ids,
            require: self.job.require,
            transfer_timeout_ms: millis(deadlines::prompt(self.prompt_tokens, queued, rate)),
            choices: answer.choices,
            logprobs: answer.logprobs,
            prompt_logprobs: answer.prompt_logprobs,
            window: WINDOW_EVENTS,
        };
        self.decode_span = Span::below("decode", trace::current().as_ref());
        let request = DecodeRequest::Generate(spec);
        trace::scope(self.decode_span.context(), decoder.client.request(&request)).await.map_err(lost)
    }

    async fn call(&self, decoder: &DecodeLink, request: &DecodeRequest) -> Result<DecodeEvent, Stop> {
        decoder.client.call(request, deadlines::exchange(self.prompt_tokens)).await.map_err(lost)
    }

    fn failure(&self, kind: FailureKind) -> Failure {
        if let Some(told) = &self.told {
            return Failure { kind, verdict: Box::new((**told).clone()) };
        }
        let (verdict, reason) = match (&kind, &self.planned) {
            (FailureKind::Refused(reason), _) => (VerdictKind::Refused, reason.clone()),
            (_, Planned::Bridge) => (VerdictKind::Failed, kind.code().to_owned()),
            _ => (VerdictKind::Native, kind.code().to_owned()),
        };
        let verdict =
            Verdict::without_receipt(verdict, Some(reason), self.parties.clone(), self.prompt_tokens);
        Failure { kind, verdict: Box::new(verdict) }
    }
}

fn lost(error: ControlError) -> Stop {
    match error {
        ControlError::Timeout(_) => Stop::Failed(FailureKind::Timeout("the decode worker")),
        ControlError::Unexpected(message) => Stop::Failed(FailureKind::Protocol(message)),
        _ => Stop::Lost(FailureKind::DecodeWorkerLost),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
