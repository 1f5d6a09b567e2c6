//! One job on the engine thread, step by step.

use super::job::Job;
use super::policy::{Action, Need};
use super::{Engine, EngineError, JobEvent};
use crate::rates::MeasuredRates;
use shared::control::FinishReason;
use shared::keys::BlockKey;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Free places in the event queue below which a job pauses: one step sends at most three events.
const MIN_QUEUE_ROOM: usize = 4;
/// Answer tokens a new cache has room for; it grows beyond.
const ANSWER_ROOM_TOKENS: usize = 256;
/// Prompt tokens after which unused memory is given back.
const RELEASE_EVERY_PROMPT_TOKENS: usize = 2048;
/// Answer tokens after which unused memory is given back.
const RELEASE_EVERY_TOKENS: u32 = 256;

pub(super) struct Active<E: Engine> {
    job: Job,
    phase: Phase,
    sequence: Option<E::Sequence>,
    /// What the cache holds, and what it is to hold: the prompt, then the answer.
    tokens: Vec<u32>,
    exports: Exports,
    completion_tokens: u32,
    prefill: Duration,
    decode_began: Instant,
    decode_ms: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Queued,
    Prefill,
    /// The last of `tokens` is not in the cache yet.
    Decode,
    Finish(FinishReason),
    Done,
}

/// How far the job's blocks are in the store.
struct Exports {
    /// Keys of the blocks looked at.
    keys: Vec<BlockKey>,
    /// The store has no room; later blocks would be unreachable anyway.
    ended: bool,
}

impl<E: Engine> Active<E> {
    pub(super) fn new(job: Job) -> Self {
        let exports = Exports { keys: Vec::new(), ended: false };
        Self {
            phase: Phase::Queued,
            sequence: None,
            tokens: job.prompt.to_vec(),
            exports,
            completion_tokens: 0,
            prefill: Duration::ZERO,
            decode_began: Instant::now(),
            decode_ms: 0.0,
            job,
        }
    }

    /// Nobody waits for it any more, or it is finished.
    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Done || self.job.cancel.is_cancelled() || self.job.events.is_closed()
    }

    pub(super) fn need(&self, engine: &E) -> Need {
        if self.job.events.capacity() < MIN_QUEUE_ROOM {
            return Need::Blocked;
        }
        match self.phase {
            Phase::Queued | Phase::Prefill => Need::Prefill,
            Phase::Decode => Need::Decode { export: self.has_export(engine) },
            Phase::Finish(_) | Phase::Done => Need::Finish,
        }
    }

    pub(super) fn cache_bytes(&self, engine: &E) -> u64 {
        self.sequence.as_ref().map_or(0, |sequence| engine.sequence_bytes(sequence))
    }

    /// Does one step; an engine failure ends the job.
    pub(super) fn step(&mut self, engine: &E, action: Action, rates: &MeasuredRates) {
        let done = match (action, self.phase) {
            (Action::Prefill { max_tokens }, Phase::Queued | Phase::Prefill) => {
                self.prefill_step(engine, max_tokens, rates)
            }
            (Action::Decode, Phase::Decode) => self.decode_step(engine, rates),
            (Action::Export, Phase::Decode) => self.export_block(engine),
            (Action::Finish, Phase::Finish(reason)) => self.finish_step(engine, reason),
            // The need changed within the round, as when an answer ended before its export.
            _ => Ok(()),
        };
        if let Err(error) = done {
            tracing::error!(%error, "engine");
            self.send(JobEvent::Failed(error));
            self.phase = Phase::Done;
        }
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
        let (done, total) = (engine.len(&sequence), self.job.prompt.len());
        // Chunks end at multiples of their size, so that a prompt is cut alike with and without a hit. The
        // last prompt token goes alone: its logits are needed.
        let end =
            if done + 1 < total { ((done / max_tokens + 1) * max_tokens).min(total - 1) } else { total };
        let last = end == total;
        let start = Instant::now();
        let logits = engine.forward(&mut sequence, &self.tokens[done..end], last)?;
        let took = start.elapsed();
        self.prefill += took;
        rates.prefilled(end - done, took);
        self.sequence = Some(sequence);
        match logits {
            Some(logits) if last => self.started(logits),
            _ => {
                if done / RELEASE_EVERY_PROMPT_TOKENS < end / RELEASE_EVERY_PROMPT_TOKENS {
                    engine.release_unused_memory()?;
                }
                self.send(JobEvent::Progress(end as u32));
                // Now rather than between two tokens of the answer, and not lost if the request ends early.
                while self.has_export(engine) {
                    self.export_block(engine)?;
                }
                Ok(())
            }
        }
    }

    /// Turns what is there already into a cache and lets go of it.
    fn begin(&mut self, engine: &E) -> Result<E::Sequence, EngineError> {
        self.phase = Phase::Prefill;
        self.job.receipt.queue_ms = ms(self.job.submitted.elapsed());
        let start = Instant::now();
        let capacity = self.job.prompt.len() + ANSWER_ROOM_TOKENS.min(self.job.max_new_tokens as usize);
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

    fn started(&mut self, logits: Vec<f32>) -> Result<(), EngineError> {
        self.job.receipt.prefill_ms = ms(self.prefill);
        self.send(JobEvent::Started(Box::new(self.job.receipt.clone())));
        self.decode_began = Instant::now();
        if self.job.max_new_tokens == 0 {
            self.phase = Phase::Finish(FinishReason::Length);
            return Ok(());
        }
        self.choose(logits)
    }

    fn decode_step(&mut self, engine: &E, rates: &MeasuredRates) -> Result<(), EngineError> {
        let (Some(sequence), Some(&token)) = (&mut self.sequence, self.tokens.last()) else { return Ok(()) };
        let start = Instant::now();
        let logits = engine.forward(sequence, &[token], true)?.unwrap_or_default();
        rates.decoded(start.elapsed());
        if self.completion_tokens.is_multiple_of(RELEASE_EVERY_TOKENS) {
            engine.release_unused_memory()?;
        }
        self.choose(logits)
    }

    fn choose(&mut self, mut logits: Vec<f32>) -> Result<(), EngineError> {
        let token = self.job.sampler.sample(&mut logits, None);
        let token = token.ok_or_else(|| EngineError("the model's logits are not numbers".to_owned()))?;
        self.decode_ms = ms(self.decode_began.elapsed());
        if self.job.stop_token_ids.contains(&token) {
            self.phase = Phase::Finish(FinishReason::Stop);
            return Ok(());
        }
        self.completion_tokens += 1;
        self.send(JobEvent::Token(token));
        if self.completion_tokens >= self.job.max_new_tokens {
            self.phase = Phase::Finish(FinishReason::Length);
        } else {
            self.tokens.push(token);
            self.phase = Phase::Decode;
        }
        Ok(())
    }

    /// One block per step, so that others get their turn; the end is announced when all are in the store,
    /// because the next turn of the conversation may follow at once.
    fn finish_step(&mut self, engine: &E, reason: FinishReason) -> Result<(), EngineError> {
        if self.has_export(engine) {
            return self.export_block(engine);
        }
        self.send(JobEvent::Finished {
            reason,
            completion_tokens: self.completion_tokens,
            decode_ms: self.decode_ms,
        });
        self.phase = Phase::Done;
        Ok(())
    }

    fn has_export(&self, engine: &E) -> bool {
        let cached = self.sequence.as_ref().map_or(0, |sequence| engine.len(sequence));
        !self.exports.ended && (self.exports.keys.len() + 1) * self.job.library.block_tokens <= cached
    }

    /// Brings the next full block into the store, skipping those that are there.
    fn export_block(&mut self, engine: &E) -> Result<(), EngineError> {
        let block_tokens = self.job.library.block_tokens;
        while self.has_export(engine) {
            let Some(sequence) = &self.sequence else { break };
            let before = &self.exports.keys;
            let (start, end) = (before.len() * block_tokens, (before.len() + 1) * block_tokens);
            let last = before.last().unwrap_or(&self.job.library.root);
            let key = last.next(&self.tokens[start..end]);
            let store = &self.job.library.store;
            let was_there = store.contains(&key);
            if !was_there && !store.insert_after(before, key, Arc::new(engine.export(sequence, start, end)?))
            {
                self.exports.ended = true;
            }
            self.exports.keys.push(key);
            if !was_there {
                break;
            }
        }
        Ok(())
    }

    /// The queue has room for a step's events, or the reader is gone and the job ends.
    fn send(&self, event: JobEvent) {
        let _ = self.job.events.try_send(event);
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
