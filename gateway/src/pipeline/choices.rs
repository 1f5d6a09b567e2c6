//! The choices of one answer: each with its own text, its own stop strings and its own end.

use super::FailureKind;
use super::spec::{AnswerSpec, Finish, Piece};
use super::text::{AnswerText, Said};
use shared::control::{FinishReason, TokenLogprobs};
use shared::tokenizer::{Tokenizer, TokenizerError};

/// All choices of one request.
pub(super) struct Choices {
    list: Vec<Choice>,
    scored: bool,
}

struct Choice {
    text: AnswerText,
    completion_tokens: u32,
    /// Tokens of pieces that had nothing to tell yet.
    untold: u32,
    /// The client has its end.
    ended: bool,
    /// The decoder has reported its end.
    reported: bool,
}

/// What a message of the decoder means for a choice.
#[derive(Debug, PartialEq)]
pub(super) struct News {
    pub(super) piece: Piece,
    /// Tokens of the answer in the message.
    pub(super) used: u32,
    /// Why the choice is complete now, and its tokens.
    pub(super) end: Option<(Finish, u32)>,
}

impl Choices {
    pub(super) fn new(tokenizer: &Tokenizer, spec: &AnswerSpec) -> Self {
        let choice = || Choice {
            text: AnswerText::new(tokenizer, spec),
            completion_tokens: 0,
            untold: 0,
            ended: false,
            reported: false,
        };
        Self {
            list: std::iter::repeat_with(choice).take(spec.choices as usize).collect(),
            scored: spec.logprobs.is_some(),
        }
    }

    /// Tokens of a choice; `None` for one that the client has the end of.
    ///
    /// # Errors
    /// [`FailureKind::Protocol`] for a choice that was not asked for or missing log probabilities.
    pub(super) fn tokens(
        &mut self,
        index: u32,
        ids: &[u32],
        logprobs: Vec<TokenLogprobs>,
    ) -> Result<Option<News>, FailureKind> {
        if self.scored && logprobs.len() != ids.len() {
            return Err(FailureKind::Protocol("tokens without their log probabilities".to_owned()));
        }
        let choice = self.choice(index)?;
        if choice.ended {
            return Ok(None);
        }
        let said = choice.text.push(ids, logprobs.into_iter().map(Some).collect()).map_err(|e| text(&e))?;
        choice.completion_tokens += said.used;
        Ok(Some(choice.news(said, None)))
    }

    /// The decoder has ended a choice; `None` when the client has its end already.
    ///
    /// # Errors
    /// [`FailureKind::Protocol`] for a choice that was not asked for or ended before.
    pub(super) fn finished(
        &mut self,
        index: u32,
        reason: FinishReason,
        counted: u32,
    ) -> Result<Option<News>, FailureKind> {
        let choice = self.choice(index)?;
        if std::mem::replace(&mut choice.reported, true) {
            return Err(FailureKind::Protocol(format!("choice {index} ended twice")));
        }
        if choice.ended {
            return Ok(None);
        }
        choice.completion_tokens = counted;
        let said = choice.text.finish().map_err(|e| text(&e))?;
        let finish = match reason {
            FinishReason::Length => Finish::Length,
            FinishReason::Stop => Finish::Stop,
        };
        Ok(Some(choice.news(said, Some(finish))))
    }

    /// Ends every choice before its first token.
    pub(super) fn end_empty(&mut self) -> impl Iterator<Item = u32> {
        self.list.iter_mut().for_each(|c| c.ended = true);
        0..u32::try_from(self.list.len()).unwrap_or(u32::MAX)
    }

    /// The client has every end.
    pub(super) fn all_ended(&self) -> bool {
        self.list.iter().all(|c| c.ended)
    }

    /// The decoder has reported every end, so it holds nothing any more.
    pub(super) fn all_reported(&self) -> bool {
        self.list.iter().all(|c| c.reported)
    }

    fn choice(&mut self, index: u32) -> Result<&mut Choice, FailureKind> {
        let choice = self.list.get_mut(index as usize);
        choice.ok_or_else(|| FailureKind::Protocol(format!("choice {index} was not asked for")))
    }
}

impl Choice {
    fn news(&mut self, said: Said, finish: Option<Finish>) -> News {
        let finish = if said.stopped { Some(Finish::Stop) } else { finish };
        self.ended = finish.is_some();
        self.untold += said.used;
        let mut piece = said.piece;
        if !piece.is_empty() {
            piece.used = std::mem::take(&mut self.untold);
        }
        News { piece, used: said.used, end: finish.map(|f| (f, self.completion_tokens)) }
    }
}

fn text(error: &TokenizerError) -> FailureKind {
    FailureKind::Text(error.to_string())
}
