//! Following both workers from `generate` to the end of the answer.

use super::attempt::{Attempt, Stop, WINDOW_EVENTS};
use super::bridge::{Bridge, BridgeEvent, abort_transfer};
use super::choices::{Choices, News};
use super::guard::DecodeGuard;
use super::{Event, FailureKind, Finish};
use crate::deadlines;
use crate::fleet::DecodeLink;
use crate::live;
use crate::metrics::{Stage, Times};
use crate::record;
use shared::control::{
    DecodeEvent, DecodeReceipt, DecodeRequest, EventStream, Incoming, Require, TokenLogprobs, WorkerErrorCode,
};
use shared::verdict::{Verdict, VerdictKind};
use shared::wire::AbortCode;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};

/// The report of a finished transfer normally arrives long before the first token; if not, it is worth
/// this wait to have its times in the verdict.
const REPORT_WAIT: Duration = Duration::from_millis(2);
/// Longest turn of one prompt on the decoder.
const CHUNK_TOKENS: u32 = 4096;

/// A request that both workers are at.
pub(super) struct Running<'a> {
    pub(super) decoder: &'a DecodeLink,
    pub(super) guard: &'a mut DecodeGuard,
    pub(super) events: EventStream<DecodeEvent>,
    pub(super) bridge: Option<Bridge>,
    /// Requests ahead on the decoder.
    pub(super) queue: u32,
}

impl Attempt<'_> {
    /// Follows both workers until the answer is complete.
    pub(super) async fn follow(&mut self, mut run: Running<'_>, last: &mut Arc<Verdict>) -> Result<(), Stop> {
        let mut choices = Choices::new(&self.ctx.model.tokenizer, &self.job.spec);
        let mut receipt: Option<Box<DecodeReceipt>> = None;
        let mut prompt_scores: Vec<TokenLogprobs> = Vec::new();
        let mut unconfirmed = 0;
        let mut previous: Option<std::time::Instant> = None;
        let mut deadline = Instant::now() + self.prompt_wait(&run, self.prompt_tokens);
        // One timer for all waits. Deadlines move on with every token, so it is set anew only when it fires too early
        // or would fire too late.
        let mut timer = pin!(sleep_until(deadline));
        loop {
            if deadline < timer.deadline() {
                timer.as_mut().reset(deadline);
            }
            let event = tokio::select! {
                biased;
                event = run.events.next() => event,
                news = next_of(&mut run.bridge) => {
                    if let Some(left) = self.bridge_news(&run, news).await? {
                        deadline = Instant::now() + self.prompt_wait(&run, left);
                    }
                    continue;
                }
                () = &mut timer => {
                    if deadline <= Instant::now() {
                        return Err(FailureKind::Timeout("the decode worker").into());
                    }
                    timer.as_mut().reset(deadline);
                    continue;
                }
            };
            let now = Instant::now();
            let event = match event {
                Some(Incoming::Event(event)) => event,
                Some(Incoming::Binary(_)) => {
                    return Err(FailureKind::Protocol("a binary message".to_owned()).into());
                }
                None if previous.is_none() || self.job.whole => {
                    return Err(Stop::Lost(FailureKind::DecodeWorkerLost));
                }
                None => return Err(FailureKind::DecodeWorkerLost.into()),
            };
            match event {
                DecodeEvent::Progress { done_tokens, total_tokens } => {
                    deadline = now + self.prompt_wait(&run, total_tokens.saturating_sub(done_tokens));
                    self.watched.progress(live::Stage::Native, done_tokens, total_tokens);
                    self.out.push(Event::Progress { done_tokens, total_tokens });
                }
                DecodeEvent::Started(r) => receipt = Some(r),
                DecodeEvent::PromptLogprobs { logprobs } => {
                    deadline = now + self.prompt_wait(&run, self.prompt_tokens);
                    prompt_scores.extend(logprobs);
                }
                DecodeEvent::Token { choice, ids, logprobs } => {
                    unconfirmed += 1;
                    if unconfirmed >= WINDOW_EVENTS / 2 {
                        let (request_id, events) = (self.worker_id.clone(), std::mem::take(&mut unconfirmed));
                        run.decoder.client.notify(&DecodeRequest::Read { request_id, events });
                    }
                    let arrived = run.events.arrived();
                    match previous.replace(arrived) {
                        None => {
                            *last = self.started(&mut run, receipt.as_deref(), &mut prompt_scores).await?
                        }
                        Some(earlier) => {
                            self.ctx.metrics.between_tokens(arrived - earlier);
                        }
                    }
                    if self.job.spec.max_new_tokens == Some(0) {
                        // The guard is dropped unended, which cancels the rest.
                        self.end_empty(&mut choices);
                        return Ok(());
                    }
                    deadline = now + deadlines::next_token(run.decoder.rates().decode_tokens_per_s);
                    let Some(news) = choices.tokens(choice, &ids, logprobs)? else { continue };
                    self.ctx.metrics.generated(u64::from(news.used));
                    record::current().generated(u64::from(news.used));
                    self.watched.tokens(news.used);
                    self.times.completion_tokens += u64::from(news.used);
                    let ended = news.end.is_some();
                    self.tell(choice, news, run.events.arrived());
                    if choices.all_ended() {
                        return Ok(());
                    }
                    if ended {
                        let request_id = self.worker_id.clone();
                        run.decoder.client.notify(&DecodeRequest::StopChoice { request_id, choice });
                    }
                }
                DecodeEvent::Finished { choice, reason, completion_tokens, decode_ms } => {
                    if previous.is_none() {
                        previous = Some(run.events.arrived());
                        *last = self.started(&mut run, receipt.as_deref(), &mut prompt_scores).await?;
                    }
                    if self.job.spec.max_new_tokens == Some(0) {
                        self.end_empty(&mut choices);
                        return Ok(());
                    }
                    let news = choices.finished(choice, reason, completion_tokens)?;
                    if choices.all_reported() {
                        run.guard.ended();
                        self.ctx.metrics.stage_ms(Stage::Decode, decode_ms);
                    }
                    if let Some(news) = news {
                        self.tell(choice, news, run.events.arrived());
                    }
                    if choices.all_ended() {
                        return Ok(());
                    }
                }
                DecodeEvent::Error(error) => {
                    run.guard.ended();
                    return Err(match error.code {
                        WorkerErrorCode::BridgeRequired => {
                            let reason = self.broken.map_or(error.message, |code| code.as_str().to_owned());
                            FailureKind::Refused(reason)
                        }
                        _ => FailureKind::Worker(error),
                    }
                    .into());
                }
                other => return Err(FailureKind::Protocol(format!("{other:?} while generating")).into()),
            }
        }
    }

    /// Takes news from the prefill worker; returns the prompt positions still to wait for.
    async fn bridge_news(&mut self, run: &Running<'_>, news: BridgeEvent) -> Result<Option<u32>, Stop> {
        if self.told.is_some() {
            // The decoder has all it needed and the client has been told: the bridge's end changes nothing.
            if let BridgeEvent::Done(report) = news {
                self.report = Some(report);
            }
            return Ok(None);
        }
        match news {
            BridgeEvent::Progress(done_tokens, total_tokens) => {
                self.watched.progress(live::Stage::Prefill, done_tokens, total_tokens);
                self.out.push(Event::Progress { done_tokens, total_tokens });
                Ok(Some(total_tokens.saturating_sub(done_tokens)))
            }
            BridgeEvent::Done(report) => {
                self.watched.transferred(&report);
                self.report = Some(report);
                Ok(None)
            }
            BridgeEvent::Broken(abort) => {
                tracing::warn!(request_id = %self.job.request_id, %abort, "bridge broken");
                self.broken = Some(abort.code);
                let worker_lost = abort.code == AbortCode::ConnectionLost;
                abort_transfer(run.decoder, &self.worker_id, abort);
                let required = self.job.require != Require::Nothing;
                if worker_lost && required && !self.retry && self.told.is_none() {
                    return Err(Stop::Lost(FailureKind::Refused("connection_lost".to_owned())));
                }
                Ok(Some(self.prompt_tokens))
            }
        }
    }

    /// The first token exists: says what happened.
    async fn started(
        &mut self,
        run: &mut Running<'_>,
        receipt: Option<&DecodeReceipt>,
        prompt_scores: &mut Vec<TokenLogprobs>,
    ) -> Result<Arc<Verdict>, Stop> {
        let ttft = self.job.arrived.elapsed();
        let receipt = receipt.ok_or_else(|| FailureKind::Protocol("tokens without a receipt".to_owned()))?;
        if receipt.bridged_tokens > 0 && self.report.is_none() {
            let late = timeout(REPORT_WAIT, async {
                loop {
                    if let BridgeEvent::Done(report) = next_of(&mut run.bridge).await {
                        return report;
                    }
                }
            });
            self.report = late.await.ok();
            if let Some(report) = &self.report {
                self.watched.transferred(report);
            }
        }
        let mut verdict =
            Verdict::from_receipt(&self.planned, receipt, self.report.as_ref(), self.parties.clone());
        if verdict.verdict == VerdictKind::Failed
            && receipt.transfer_failure.is_none()
            && let Some(code) = self.broken
        {
            verdict.reason = Some(code.as_str().to_owned());
        }
        verdict.ttft_ms = Some(ttft.as_secs_f64() * 1000.0);
        if !verdict.is_consistent() || verdict.prompt_tokens != self.prompt_tokens {
            return Err(FailureKind::Protocol("the decoder's receipt does not add up".to_owned()).into());
        }
        let metrics = &self.ctx.metrics;
        metrics.started(&verdict, ttft);
        let record = record::current();
        record.started(ttft);
        let queue = record.queue_wait() + Duration::from_secs_f64(receipt.queue_ms.max(0.0) / 1000.0);
        self.times = Times { queue, prefill: ttft.saturating_sub(queue), ..Times::default() };
        self.begun = Some(std::time::Instant::now());
        metrics.stage_ms(Stage::Queue, receipt.queue_ms);
        metrics.stage_ms(Stage::Wait, receipt.wait_ms);
        metrics.stage_ms(Stage::Ingest, receipt.ingest_ms);
        metrics.stage_ms(Stage::DecoderPrefill, receipt.prefill_ms);
        if let Some(report) = &self.report {
            metrics.stage_ms(Stage::Prefill, report.prefill_ms);
            metrics.stage_ms(Stage::Transfer, report.transfer_ms);
        }
        run.decoder.seen.insert(&self.keys);
        let verdict = Arc::new(verdict);
        self.ctx.verdicts.put(verdict.clone());
        self.watched.started(&verdict);
        self.told = Some(verdict.clone());
        self.out.push(Event::Started(verdict.clone()));
        if self.job.spec.prompt_logprobs.is_some() {
            if prompt_scores.len() + 1 != self.job.tokens.len() {
                let what = "log probabilities of another number of prompt tokens".to_owned();
                return Err(FailureKind::Protocol(what).into());
            }
            self.out.push(Event::Prompt(std::mem::take(prompt_scores)));
        }
        Ok(verdict)
    }

    /// Only the prompt was of interest.
    fn end_empty(&self, choices: &mut Choices) {
        for choice in choices.end_empty() {
            self.out.push(Event::Finished { choice, finish: Finish::Length, completion_tokens: 0 });
        }
    }

    fn tell(&self, choice: u32, news: News, arrived: std::time::Instant) {
        if !news.piece.is_empty() {
            self.out.push(Event::Text { choice, piece: news.piece, arrived });
        }
        if let Some((finish, completion_tokens)) = news.end {
            self.ctx.metrics.vllm.finished(finish == Finish::Length, completion_tokens);
            self.out.push(Event::Finished { choice, finish, completion_tokens });
        }
    }

    /// Longest wait for the prompt, `left` positions of which are to be computed by someone.
    fn prompt_wait(&self, run: &Running<'_>, left: u32) -> Duration {
        // Both sides in a row is the worst case: a transfer that fails at its end, then the decoder alone.
        // Prompts take turns by chunk, so a request ahead in the decoder's queue delays this one by at most
        // this one's own length, or by one chunk where that is longer.
        let queued = u64::from(run.queue) * u64::from(self.prompt_tokens.max(CHUNK_TOKENS));
        let native = deadlines::prompt(self.prompt_tokens, queued, run.decoder.rates().prefill_tokens_per_s);
        let bridge = run.bridge.as_ref().map_or(Duration::ZERO, |bridge| {
            let (rate, queued) = bridge.outlook();
            deadlines::prompt(left, queued, rate)
        });
        native + bridge
    }
}

async fn next_of(bridge: &mut Option<Bridge>) -> BridgeEvent {
    match bridge {
        Some(bridge) => bridge.next().await,
        None => std::future::pending().await,
    }
}
