//! The objects of a completion.

use crate::http::logprobs::CompletionLogprobs;
use crate::http::usage::Usage;
use crate::http::voice::{ChunkFrame, Frames, Head, Voice, reason};
use crate::model::TextModel;
use crate::pipeline::{AnswerText, Finish, Piece};
use schemars::JsonSchema;
use serde::Serialize;
use shared::control::TokenLogprobs;
use shared::tokens::TokenIds;
use std::sync::Arc;

/// A whole completion.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Completion {
    id: String,
    /// `text_completion`
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    model: String,
    choices: Vec<CompletionChoice>,
    usage: Usage,
}

/// A part of a completion, as a stream sends it.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "written in pieces, described as one")]
pub(crate) struct CompletionChunk {
    id: String,
    /// `text_completion`
    object: String,
    /// Seconds since 1970.
    created: u64,
    model: String,
    choices: Vec<CompletionChoice>,
    /// Only with `stream_options.include_usage`: null but in the last part.
    #[schemars(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

/// One choice, or a part of one.
#[derive(Debug, Clone, Default, Serialize, JsonSchema)]
pub(crate) struct CompletionChoice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`; null in the parts before the last.
    finish_reason: Option<&'static str>,
}

/// A prompt that is repeated before its completion.
pub(super) struct Echo {
    /// As the client wrote it; prompts of token ids have none.
    pub(super) text: Option<String>,
    pub(super) ids: TokenIds,
}

/// Says completions.
pub(super) struct CompletionVoice {
    model: Arc<TextModel>,
    head: Head,
    frame: Option<ChunkFrame>,
    include_usage: bool,
    /// One for each prompt, or none.
    echoes: Vec<Echo>,
    scored: bool,
    /// Whole answers: what was said so far. Streams: what is to be said.
    choices: Vec<CompletionChoice>,
    /// Characters of each choice's echo.
    base_chars: Vec<u32>,
}

impl CompletionVoice {
    pub(super) fn new(
        model: Arc<TextModel>,
        head: Head,
        choices: usize,
        echoes: Vec<Echo>,
        scored: bool,
        stream: bool,
        include_usage: bool,
    ) -> Self {
        let head = Head { id: format!("cmpl-{}", head.id), ..head };
        Self {
            frame: stream.then(|| ChunkFrame::new(&head, "text_completion", include_usage)),
            model,
            head,
            include_usage,
            echoes,
            scored,
            choices: (0..choices)
                .map(|index| CompletionChoice { index, ..CompletionChoice::default() })
                .collect(),
            base_chars: vec![0; choices],
        }
    }

    fn choices_of(&self, prompt: usize) -> std::ops::Range<usize> {
        let n = self.choices.len() / self.echoes.len().max(1);
        prompt * n..(prompt + 1) * n
    }

    /// Says the prompt before its choices.
    fn echo(&mut self, prompt: usize, scores: Option<Vec<TokenLogprobs>>, out: &mut Frames) {
        let Some(echo) = self.echoes.get(prompt) else { return };
        let tokenizer = &self.model.tokenizer;
        let mut answer = AnswerText::of_prompt(tokenizer);
        let mut scores: Vec<_> = scores.map_or_else(Vec::new, |s| s.into_iter().map(Some).collect());
        scores.insert(0, None);
        // What the tokenizer can't decode has no text.
        let mut piece = answer.push(&echo.ids, scores).unwrap_or_default().piece;
        let rest = answer.finish().unwrap_or_default().piece;
        piece.text.push_str(&rest.text);
        piece.tokens.extend(rest.tokens);
        if let Some(text) = &echo.text {
            piece.text.clone_from(text);
        }
        let chars = u32::try_from(piece.text.chars().count()).unwrap_or(u32::MAX);
        for choice in self.choices_of(prompt) {
            self.add(choice, &piece);
            self.base_chars[choice] = chars;
            self.flush(choice, out);
        }
    }

    fn add(&mut self, index: usize, piece: &Piece) {
        let choice = &mut self.choices[index];
        choice.text.push_str(&piece.text);
        if self.scored {
            let logprobs = choice.logprobs.get_or_insert_default();
            logprobs.extend(&self.model.tokenizer, &piece.tokens, self.base_chars[index]);
        }
    }

    /// Sends what a stream's choice has to say.
    fn flush(&mut self, index: usize, out: &mut Frames) {
        if let Some(frame) = &self.frame {
            frame.choice(&self.choices[index], out);
            self.choices[index] = CompletionChoice { index, ..CompletionChoice::default() };
        }
    }
}

impl Voice for CompletionVoice {
    fn started(&mut self, prompt: usize, out: &mut Frames) {
        if !self.scored {
            self.echo(prompt, None, out);
        }
    }

    fn prompt(&mut self, prompt: usize, scores: Vec<TokenLogprobs>, out: &mut Frames) {
        self.echo(prompt, Some(scores), out);
    }

    fn said(&mut self, choice: usize, piece: Piece, out: &mut Frames) {
        self.add(choice, &piece);
        self.flush(choice, out);
    }

    fn finished(&mut self, choice: usize, finish: Finish, out: &mut Frames) {
        self.choices[choice].finish_reason = Some(reason(finish));
        self.flush(choice, out);
    }

    fn ended(&mut self, usage: &Usage, out: &mut Frames) {
        match &self.frame {
            Some(frame) => {
                if self.include_usage {
                    frame.usage(usage, out);
                }
                out.done();
            }
            None => out.body(&Completion {
                id: self.head.id.clone(),
                object: "text_completion",
                created: self.head.created_unix_s,
                model: self.head.model.clone(),
                choices: std::mem::take(&mut self.choices),
                usage: *usage,
            }),
        }
    }
}
