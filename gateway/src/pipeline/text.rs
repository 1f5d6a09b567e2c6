//! Token ids to the text of an answer: detokenizing and stop strings.

use super::stop::{Released, StopMatcher};
use shared::tokenizer::{Detokenizer, Tokenizer, TokenizerError};

/// The text side of one answer.
pub(super) struct AnswerText {
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
}

impl AnswerText {
    pub(super) fn new(tokenizer: &Tokenizer, stops: Vec<String>) -> Self {
        Self { detokenizer: Some(tokenizer.detokenizer()), stops: StopMatcher::new(stops) }
    }

    /// Adds ids in order; says how many of them were used, which is less than all after a stop string.
    pub(super) fn push(&mut self, ids: &[u32]) -> Result<(Released, u32), TokenizerError> {
        let mut out = Released { text: String::new(), stopped: false };
        let mut used = 0;
        for &id in ids {
            let Some(detokenizer) = &mut self.detokenizer else { break };
            let piece = detokenizer.push(id)?;
            used += 1;
            let released = self.stops.push(&piece);
            out.text.push_str(&released.text);
            if released.stopped {
                out.stopped = true;
                break;
            }
        }
        Ok((out, used))
    }

    /// The rest of the text when the decoder has ended the answer. A stop string may complete in it.
    pub(super) fn finish(&mut self) -> Result<Released, TokenizerError> {
        let rest = self.detokenizer.take().map_or_else(|| Ok(String::new()), Detokenizer::finish)?;
        let mut released = self.stops.push(&rest);
        if !released.stopped {
            released.text.push_str(&self.stops.finish());
        }
        Ok(released)
    }
}
