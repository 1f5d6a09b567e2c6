//! One answer to a prompt.

use super::exports::Exports;
use super::job::Job;
use super::policy::Need;
use super::{Engine, EngineError, JobEvent};
use crate::constraint::Matcher;
use crate::sampler::{Sampler, log_probabilities};
use shared::control::FinishReason;
use std::time::{Duration, Instant};

/// Its state between two steps.
pub(super) struct Choice<E: Engine> {
    index: u32,
    sampler: Sampler,
    matcher: Option<Matcher>,
    state: State,
    sequence: Option<E::Sequence>,
    /// What the cache holds, and what it is to hold: the prompt, then the answer.
    tokens: Vec<u32>,
    exports: Exports,
    completion_tokens: u32,
    began: Instant,
    took: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The last of `tokens` is not in the cache yet.
    Decode,
    Finish(FinishReason),
    Done,
}

impl<E: Engine> Choice<E> {
    /// At the end of the prompt, whose cache is `sequence`.
    pub(super) fn new(
        index: u32,
        sampler: Sampler,
        sequence: E::Sequence,
        exports: Exports,
        job: &Job,
    ) -> Self {
        Self {
            index,
            sampler,
            matcher: job.constraint.clone(),
            state: State::Finish(FinishReason::Length),
            sequence: Some(sequence),
            tokens: job.prompt.to_vec(),
            exports,
            completion_tokens: 0,
            began: Instant::now(),
            took: Duration::ZERO,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// What it needs next. An answer that nobody wants to go on ends here.
    pub(super) fn need(&mut self, engine: &E, job: &Job) -> Need {
        if self.state == State::Decode && job.stops.is_stopped(self.index) {
            self.state = State::Finish(FinishReason::Stop);
        }
        match self.state {
            State::Decode => Need::Decode { export: self.has_export(engine, job) },
            State::Finish(_) => Need::Finish,
            State::Done => Need::Nothing,
        }
    }

    /// Hands out what the next pass needs, if it needs a pass.
    pub(super) fn take_row(&mut self) -> Option<(E::Sequence, u32)> {
        let &token = self.tokens.last()?;
        if self.state == State::Decode { Some((self.sequence.take()?, token)) } else { None }
    }

    /// Takes the sequence back after its pass and chooses the next token.
    pub(super) fn stepped(
        &mut self,
        sequence: E::Sequence,
        logits: Vec<f32>,
        job: &Job,
    ) -> Result<(), EngineError> {
        self.sequence = Some(sequence);
        self.choose(logits, job)
    }

    /// Chooses a token from the logits that follow the cache.
    pub(super) fn choose(&mut self, mut logits: Vec<f32>, job: &Job) -> Result<(), EngineError> {
        let failed = |e: &dyn std::fmt::Display| EngineError(e.to_string());
        // Filters and penalties change the logits; the model's own opinion is asked first.
        let raw = job.logprobs.map(|top| (logits.clone(), top));
        let allowed = self.matcher.as_mut().map(Matcher::mask).transpose().map_err(|e| failed(&e))?;
        let token = self.sampler.sample(&mut logits, allowed.as_ref());
        let token =
            token.ok_or_else(|| failed(&"no token may follow: the model's logits are not numbers"))?;
        self.took = self.began.elapsed();
        let ends_form = self.matcher.as_ref().is_some_and(|matcher| matcher.end_tokens().contains(&token));
        if ends_form || job.stop_token_ids.contains(&token) {
            self.state = State::Finish(FinishReason::Stop);
            return Ok(());
        }
        self.completion_tokens += 1;
        let logprobs = raw.map(|(raw, top)| log_probabilities(&raw, token, top));
        job.send(JobEvent::Token { choice: self.index, id: token, logprobs });
        if let Some(matcher) = &mut self.matcher {
            matcher.accept(token).map_err(|e| failed(&e))?;
        }
        if self.matcher.as_ref().is_some_and(Matcher::is_finished) {
            self.state = State::Finish(FinishReason::Stop);
        } else if self.completion_tokens >= job.max_new_tokens {
            self.state = State::Finish(FinishReason::Length);
        } else {
            self.tokens.push(token);
            self.state = State::Decode;
        }
        Ok(())
    }

    /// Brings one finished block to the store.
    pub(super) fn export(&mut self, engine: &E, job: &Job) -> Result<(), EngineError> {
        match &self.sequence {
            Some(sequence) => self.exports.bring_next(engine, sequence, &self.tokens, &job.library),
            None => Ok(()),
        }
    }

    /// One block per step, so that others get their turn; the end is announced when all are in the store,
    /// because the next turn of the conversation may follow at once.
    pub(super) fn finish(&mut self, engine: &E, job: &Job) -> Result<(), EngineError> {
        let State::Finish(reason) = self.state else { return Ok(()) };
        if self.has_export(engine, job) {
            return self.export(engine, job);
        }
        self.state = State::Done;
        self.sequence = None;
        job.send(JobEvent::Finished {
            choice: self.index,
            reason,
            completion_tokens: self.completion_tokens,
            decode_ms: self.took.as_secs_f64() * 1e3,
        });
        Ok(())
    }

    pub(super) fn cache_bytes(&self, engine: &E) -> u64 {
        self.sequence.as_ref().map_or(0, |sequence| engine.sequence_bytes(sequence))
    }

    fn has_export(&self, engine: &E, job: &Job) -> bool {
        let cached = self.sequence.as_ref().map_or(0, |sequence| engine.len(sequence));
        self.exports.has_next(cached, &job.library)
    }
}
