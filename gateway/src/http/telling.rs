//! The events of all prompts of one request, told by the endpoint's voice.

use super::usage::Usage;
use super::voice::{Frames, Voice};
use crate::pipeline::{Context, Event, Failure, FailureKind, Running};
use futures_util::StreamExt as _;
use futures_util::stream::{BoxStream, SelectAll, select_all};
use shared::verdict::{Parties, Verdict, VerdictKind};
use std::sync::Arc;
use std::time::Instant;

/// The events of all prompts.
enum Events {
    /// Of a single prompt.
    One(Running),
    /// With the prompt that each is of.
    Several(SelectAll<Numbered>),
}

type Numbered = BoxStream<'static, (usize, Event)>;

impl Events {
    fn of(mut prompts: Vec<Running>) -> Self {
        if prompts.len() == 1
            && let Some(one) = prompts.pop()
        {
            return Self::One(one);
        }
        let numbered = prompts.into_iter().enumerate();
        Self::Several(select_all(numbered.map(|(i, events)| events.map(move |event| (i, event)).boxed())))
    }

    async fn next(&mut self) -> Option<(usize, Event)> {
        match self {
            Self::One(events) => Some((0, events.next().await?)),
            Self::Several(events) => events.next().await,
        }
    }
}

/// A request that is being answered.
pub(super) struct Telling {
    events: Events,
    voice: Box<dyn Voice>,
    ctx: Arc<Context>,
    request_id: String,
    verdicts: Vec<Option<Arc<Verdict>>>,
    choices_per_prompt: usize,
    open_choices: usize,
    completion_tokens: u64,
    /// What is ready to be sent.
    pub(super) frames: Frames,
}

/// What one event did.
pub(super) enum Step {
    /// Reading a prompt.
    Progress { done_tokens: u32, total_tokens: u32 },
    /// A prompt's verdict came in.
    Started,
    /// Something was said, with the time when the decoder's message came in.
    Said(Option<Instant>),
    /// The answer is complete.
    Over,
    /// There is no answer, or no more of it.
    Failed(Box<Failure>),
}

impl Telling {
    /// Tells the events of one request per prompt.
    pub(super) fn new(
        running: Vec<Running>,
        choices_per_prompt: u32,
        ctx: Arc<Context>,
        request_id: String,
        voice: Box<dyn Voice>,
    ) -> Self {
        let prompts = running.len();
        Self {
            events: Events::of(running),
            voice,
            ctx,
            request_id,
            verdicts: vec![None; prompts],
            choices_per_prompt: choices_per_prompt as usize,
            open_choices: prompts * choices_per_prompt as usize,
            completion_tokens: 0,
            frames: Frames::default(),
        }
    }

    /// Tells the next event.
    pub(super) async fn step(&mut self) -> Step {
        let Some((prompt, event)) = self.events.next().await else {
            return Step::Failed(Box::new(vanished()));
        };
        let choice_of = |choice: u32| prompt * self.choices_per_prompt + choice as usize;
        match event {
            Event::Progress { done_tokens, total_tokens } => Step::Progress { done_tokens, total_tokens },
            Event::Started(verdict) => {
                self.verdicts[prompt] = Some(verdict);
                self.keep_merged();
                self.voice.started(prompt, &mut self.frames);
                Step::Started
            }
            Event::Prompt(scores) => {
                self.voice.prompt(prompt, scores, &mut self.frames);
                Step::Said(None)
            }
            Event::Text { choice, piece, arrived } => {
                self.voice.said(choice_of(choice), piece, &mut self.frames);
                Step::Said(Some(arrived))
            }
            Event::Finished { choice, finish, completion_tokens } => {
                self.completion_tokens += u64::from(completion_tokens);
                self.voice.finished(choice_of(choice), finish, &mut self.frames);
                self.open_choices -= 1;
                if self.open_choices > 0 {
                    return Step::Said(None);
                }
                let usage = self.usage();
                self.voice.ended(&usage, &mut self.frames);
                Step::Over
            }
            Event::Failed(mut failure) => {
                failure.verdict.request_id.clone_from(&self.request_id);
                self.ctx.verdicts.put(Arc::new((*failure.verdict).clone()));
                Step::Failed(Box::new(failure))
            }
        }
    }

    /// The verdict, once every prompt has one.
    pub(super) fn verdict(&self) -> Option<Arc<Verdict>> {
        if let [Some(only)] = &self.verdicts[..]
            && only.request_id == self.request_id
        {
            return Some(only.clone());
        }
        let all = self.verdicts.iter().map(Option::as_deref).collect::<Option<Vec<_>>>()?;
        Some(Arc::new(merged(&all, &self.request_id)))
    }

    /// Tells that it ends here.
    pub(super) fn fail(&mut self, error: &super::error::ApiError) {
        self.voice.failed(error, &mut self.frames);
    }

    /// Each prompt's own verdict is kept under its own name already.
    fn keep_merged(&self) {
        if self.verdicts.len() > 1
            && let Some(verdict) = self.verdict()
        {
            self.ctx.verdicts.put(verdict);
        }
    }

    fn usage(&self) -> Usage {
        let known = || self.verdicts.iter().flatten();
        Usage::new(
            known().map(|v| u64::from(v.prompt_tokens)).sum(),
            known().map(|v| u64::from(v.cached_tokens)).sum(),
            self.completion_tokens,
        )
    }
}

/// One verdict for several prompts: sums of what was counted, and the word that claims least.
fn merged(all: &[&Verdict], request_id: &str) -> Verdict {
    let [first, rest @ ..] = all else {
        let parties = Parties { request_id: request_id.to_owned(), ..Parties::default() };
        return Verdict::without_receipt(VerdictKind::Native, None, parties, 0);
    };
    let mut sum = Verdict { request_id: request_id.to_owned(), ..(*first).clone() };
    for v in rest {
        sum.prompt_tokens = sum.prompt_tokens.saturating_add(v.prompt_tokens);
        sum.cached_tokens = sum.cached_tokens.saturating_add(v.cached_tokens);
        sum.bridged_tokens = sum.bridged_tokens.saturating_add(v.bridged_tokens);
        sum.native_tokens = sum.native_tokens.saturating_add(v.native_tokens);
        sum.blocks = sum.blocks.saturating_add(v.blocks);
        sum.payload_bytes = sum.payload_bytes.saturating_add(v.payload_bytes);
        sum.prefill_ms += v.prefill_ms;
        sum.transfer_ms += v.transfer_ms;
        sum.ingest_ms += v.ingest_ms;
        // Prompts run beside each other, so the slowest first token is the request's.
        sum.ttft_ms = sum.ttft_ms.into_iter().chain(v.ttft_ms).reduce(f64::max);
        sum.digest = None;
        if v.verdict != sum.verdict || v.reason != sum.reason {
            sum.verdict = weaker(sum.verdict, v.verdict);
            sum.reason = Some("several_prompts".to_owned());
        }
    }
    sum
}

fn weaker(a: VerdictKind, b: VerdictKind) -> VerdictKind {
    let rank = |kind| match kind {
        VerdictKind::Pending => 0,
        VerdictKind::Refused => 1,
        VerdictKind::Failed => 2,
        VerdictKind::Native => 3,
        VerdictKind::Warm => 4,
        VerdictKind::Partial => 5,
        VerdictKind::Complete => 6,
    };
    if rank(a) <= rank(b) { a } else { b }
}

/// The request's task ended without a last event, which only a panic in it could cause.
fn vanished() -> Failure {
    let verdict =
        Verdict::without_receipt(VerdictKind::Native, Some("internal".to_owned()), Parties::default(), 0);
    let kind = FailureKind::Text("the request ended without an answer".to_owned());
    Failure { kind, verdict: Box::new(verdict) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_verdicts_become_one_that_adds_up() {
        let verdict = |kind, reason: Option<&str>, cached, native| Verdict {
            cached_tokens: cached,
            native_tokens: native,
            bridged_tokens: cached,
            prompt_tokens: cached + native,
            ..Verdict::without_receipt(kind, reason.map(str::to_owned), Parties::default(), 0)
        };
        let complete = verdict(VerdictKind::Complete, None, 9, 1);
        let native = verdict(VerdictKind::Native, Some("short_prompt"), 0, 4);
        let one = merged(&[&complete, &native], "r");
        assert!(one.is_consistent());
        assert_eq!((one.prompt_tokens, one.cached_tokens, one.request_id.as_str()), (14, 9, "r"));
        assert_eq!((one.verdict, one.reason.as_deref()), (VerdictKind::Native, Some("several_prompts")));
        let same = merged(&[&native, &native], "r");
        assert_eq!((same.verdict, same.reason.as_deref()), (VerdictKind::Native, Some("short_prompt")));
    }
}
