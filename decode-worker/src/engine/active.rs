//! One request on the engine thread: its prompt, then its answers.

use super::choice::Choice;
use super::exports::Exports;
use super::job::Job;
use super::policy::{Action, Need};
use super::{Engine, EngineError, JobEvent};
use crate::rates::MeasuredRates;
use crate::sampler::log_probabilities;
use shared::control::TokenLogprobs;
use std::time::{Duration, Instant};

/// Answer tokens a new cache has room for; it grows beyond.
const ANSWER_ROOM_TOKENS: usize = 256;
/// Prompt tokens after which unused memory is given back.
const RELEASE_EVERY_PROMPT_TOKENS: usize = 2048;

pub(super) struct Active<E: Engine> {
    job: Job,
    phase: Phase,
    /// The prompt's cache, until the answers take it over.
    sequence: Option<E::Sequence>,
    exports: Exports,
    prompt_logprobs: Vec<TokenLogprobs>,
    choices: Vec<Choice<E>>,
    prefill: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waits for memory.
    Queued,
    Prompt,
    Answers,
    Done,
}

impl<E: Engine> Active<E> {
    pub(super) fn new(job: Job) -> Self {
        Self {
            phase: Phase::Queued,
            sequence: None,
            exports: Exports::default(),
            prompt_logprobs: Vec::new(),
            choices: Vec::new(),
            prefill: Duration::ZERO,
            job,
        }
    }

    /// Nobody waits for it any more, or it is finished.
    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Done || self.job.cancel.is_cancelled() || self.job.events.is_closed()
    }

    pub(super) fn is_queued(&self) -> bool {
        self.phase == Phase::Queued
    }

    /// Memory was found for it.
    pub(super) fn admit(&mut self) {
        self.phase = Phase::Prompt;
    }

    /// What it needs next: for the prompt (no number), or for one of its answers.
    pub(super) fn needs(&mut self, engine: &E) -> Vec<(Option<usize>, Need)> {
        if self.phase != Phase::Queued && !self.job.has_room() {
            return Vec::new();
        }
        match self.phase {
            Phase::Queued | Phase::Done => Vec::new(),
            Phase::Prompt => vec![(None, Need::Prefill)],
            Phase::Answers => {
                let job = &self.job;
                self.choices.iter_mut().enumerate().map(|(i, c)| (Some(i), c.need(engine, job))).collect()
            }
        }
    }

    /// Bytes of its caches and of what it keeps for later.
    pub(super) fn cache_bytes(&self, engine: &E) -> u64 {
        let prompt = self.sequence.as_ref().map_or(0, |sequence| engine.sequence_bytes(sequence));
        let kept: usize = self.prompt_logprobs.iter().map(|p| size_of_val(p) + size_of_val(&p.top[..])).sum();
        prompt + kept as u64 + self.choices.iter().map(|choice| choice.cache_bytes(engine)).sum::<u64>()
    }

    /// Bytes that it was promised, or has if that is more. Nothing before it is admitted.
    pub(super) fn claimed_bytes(&self, engine: &E) -> u64 {
        match self.phase {
            Phase::Queued | Phase::Done => 0,
            Phase::Prompt => self.planned_bytes(engine),
            Phase::Answers => {
                let each = engine.planned_bytes(self.capacity_tokens());
                self.choices.iter().filter(|c| !c.is_done()).map(|c| c.cache_bytes(engine).max(each)).sum()
            }
        }
    }

    /// Bytes that its caches will take when all its answers begin.
    pub(super) fn planned_bytes(&self, engine: &E) -> u64 {
        engine.planned_bytes(self.capacity_tokens()).saturating_mul(self.job.samplers.len() as u64)
    }

    /// Does one step of the prompt (no number) or of an answer; an engine failure ends the request.
    pub(super) fn step(&mut self, engine: &E, choice: Option<usize>, action: Action, rates: &MeasuredRates) {
        let answer = choice.and_then(|i| self.choices.get_mut(i));
        let done = match (action, answer) {
            (Action::Prefill { max_tokens }, None) => self.prefill_step(engine, max_tokens, rates),
            (Action::Export, Some(answer)) => answer.export(engine, &self.job),
            (Action::Finish, Some(answer)) => answer.finish(engine, &self.job),
            _ => Ok(()),
        };
        self.settle(done);
    }

    /// Hands out what the next pass needs for one answer.
    pub(super) fn take_row(&mut self, choice: usize) -> Option<(E::Sequence, u32)> {
        if self.is_over() { None } else { self.choices.get_mut(choice)?.take_row() }
    }

    /// Takes back what was handed out, with the logits that the pass gave.
    pub(super) fn stepped(&mut self, choice: usize, sequence: E::Sequence, logits: Vec<f32>) {
        if let Some(answer) = self.choices.get_mut(choice) {
            let done = answer.stepped(sequence, logits, &self.job);
            self.settle(done);
        }
    }

    /// Ends the request with an error.
    pub(super) fn fail(&mut self, error: EngineError) {
        self.settle(Err(error));
    }

    fn settle(&mut self, done: Result<(), EngineError>) {
        if let Err(error) = done {
            if self.phase != Phase::Done {
                tracing::error!(%error, "engine");
                self.job.send(JobEvent::Failed(error));
            }
            self.phase = Phase::Done;
        } else if self.phase == Phase::Answers && self.choices.iter().all(Choice::is_done) {
            self.phase = Phase::Done;
        }
    }

    fn capacity_tokens(&self) -> usize {
        self.job.prompt.len() + ANSWER_ROOM_TOKENS.min(self.job.max_new_tokens as usize)
    }

    fn prefill_step(
        &mut self,
        engine: &E,
        max_tokens: usize,
        rates: &MeasuredRates,
    ) -> Result<(), EngineError> {
        let mut sequence = match self.sequence.take() {
            Some(sequence) => sequence,
            None => self.begin(engine)?,
        };
        let prompt = self.job.prompt.clone();
        let (done, total) = (engine.len(&sequence), prompt.len());
        // Chunks end at multiples of their size, so that a prompt is cut alike with and without a hit. The
        // last prompt token goes alone: its logits are needed.
        let end =
            if done + 1 < total { ((done / max_tokens + 1) * max_tokens).min(total - 1) } else { total };
        let start = Instant::now();
        let logits = match self.job.prompt_logprobs {
            Some(top) if end < total => {
                let (known, mut next) = (&mut self.prompt_logprobs, done);
                engine.forward_every(&mut sequence, &prompt[done..end], &mut |logits| {
                    next += 1;
                    known.push(log_probabilities(logits, prompt[next], top));
                })?;
                None
            }
            _ => engine.forward(&mut sequence, &prompt[done..end], end == total)?,
        };
        let took = start.elapsed();
        self.prefill += took;
        rates.prefilled(end - done, took);
        if let Some(logits) = logits {
            return self.begin_answers(engine, sequence, &logits);
        }
        if done / RELEASE_EVERY_PROMPT_TOKENS < end / RELEASE_EVERY_PROMPT_TOKENS {
            engine.release_unused_memory()?;
        }
        self.job.send(JobEvent::Progress(end as u32));
        // Now rather than between two tokens of the answer, and not lost if the request ends early.
        while self.exports.has_next(end, &self.job.library) {
            self.exports.bring_next(engine, &sequence, &prompt, &self.job.library)?;
        }
        self.sequence = Some(sequence);
        Ok(())
    }

    /// Turns what is there already into a cache and lets go of it.
    fn begin(&mut self, engine: &E) -> Result<E::Sequence, EngineError> {
        self.job.receipt.queue_ms = ms(self.job.submitted.elapsed());
        let start = Instant::now();
        let capacity = self.capacity_tokens();
        let served = std::mem::take(&mut self.job.served);
        let sequence = if served.blocks.is_empty() {
            engine.new_sequence(capacity)
        } else {
            let blocks: Vec<_> = served.blocks.iter().map(|block| &**block).collect();
            engine.import(&blocks, capacity)?
        };
        self.job.receipt.ingest_ms = ms(start.elapsed());
        Ok(sequence)
    }

    /// The prompt is in: every answer gets a cache that begins with it, and its first token.
    fn begin_answers(
        &mut self,
        engine: &E,
        sequence: E::Sequence,
        logits: &[f32],
    ) -> Result<(), EngineError> {
        self.phase = Phase::Answers;
        self.job.receipt.prefill_ms = ms(self.prefill);
        self.job.send(JobEvent::Started(Box::new(self.job.receipt.clone())));
        if self.job.prompt_logprobs.is_some() {
            self.job.send(JobEvent::PromptLogprobs(std::mem::take(&mut self.prompt_logprobs)));
        }
        let mut samplers = std::mem::take(&mut self.job.samplers);
        let last = samplers.pop();
        let mut sequences: Vec<_> = samplers.iter().map(|_| engine.fork(&sequence)).collect();
        sequences.push(sequence);
        samplers.extend(last);
        for ((index, sampler), sequence) in (0..).zip(samplers).zip(sequences) {
            let exports = self.exports.clone();
            let mut choice = Choice::new(index, sampler, sequence, exports, &self.job);
            if self.job.max_new_tokens > 0 {
                choice.choose(logits.to_vec(), &self.job)?;
            }
            self.choices.push(choice);
        }
        Ok(())
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
