//! Token ids to the text of an answer: detokenizing, stop strings, and which tokens the released text holds.

use super::spec::{AnswerSpec, Piece, ScoredToken};
use super::stop::StopMatcher;
use shared::control::TokenLogprobs;
use shared::tokenizer::{Detokenizer, Tokenizer, TokenizerError};
use std::collections::VecDeque;

/// The text side of one choice.
pub(crate) struct AnswerText {
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
    /// Whether tokens are reported beside the text.
    scored: bool,
    /// Bytes of text known so far, released or held.
    known_bytes: usize,
    known_chars: u32,
    released_bytes: usize,
    /// Tokens whose text is not complete yet.
    open: Vec<ScoredToken>,
    /// Tokens with the end of their text in bytes, in order, not released yet.
    held: VecDeque<(usize, ScoredToken)>,
}

/// What tokens gave.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Said {
    pub(crate) piece: Piece,
    /// A stop string completed: the answer ends after the piece.
    pub(crate) stopped: bool,
    /// Tokens used, less than all after a stop string.
    pub(crate) used: u32,
}

impl AnswerText {
    pub(crate) fn new(tokenizer: &Tokenizer, spec: &AnswerSpec) -> Self {
        let scored = spec.logprobs.is_some() || spec.prompt_logprobs.is_some();
        Self::with(tokenizer, spec.stops.clone(), spec.keep_special, scored)
    }

    /// Text of a prompt: no stop strings.
    pub(crate) fn of_prompt(tokenizer: &Tokenizer) -> Self {
        Self::with(tokenizer, Vec::new(), false, true)
    }

    fn with(tokenizer: &Tokenizer, stops: Vec<String>, keep_special: bool, scored: bool) -> Self {
        let detokenizer =
            if keep_special { tokenizer.detokenizer_with_special() } else { tokenizer.detokenizer() };
        Self {
            detokenizer: Some(detokenizer),
            stops: StopMatcher::new(stops),
            scored,
            known_bytes: 0,
            known_chars: 0,
            released_bytes: 0,
            open: Vec::new(),
            held: VecDeque::new(),
        }
    }

    /// Adds tokens in order; `scores` has one for each or is empty.
    pub(crate) fn push(
        &mut self,
        ids: &[u32],
        scores: Vec<Option<TokenLogprobs>>,
    ) -> Result<Said, TokenizerError> {
        let mut said = Said::default();
        let mut scores = scores.into_iter();
        for &id in ids {
            let Some(detokenizer) = &mut self.detokenizer else { break };
            let text = detokenizer.push(id)?;
            said.used += 1;
            if self.scored {
                let score = scores.next().flatten();
                self.open.push(ScoredToken { id, score, offset_chars: self.known_chars });
            }
            if self.add(&text, &mut said) {
                break;
            }
        }
        Ok(said)
    }

    /// The rest of the text when the decoder has ended the answer. A stop string may complete in it.
    pub(crate) fn finish(&mut self) -> Result<Said, TokenizerError> {
        let rest = self.detokenizer.take().map_or_else(|| Ok(String::new()), Detokenizer::finish)?;
        let mut said = Said::default();
        if !self.add(&rest, &mut said) {
            let held = self.stops.finish();
            self.released_bytes += held.len();
            said.piece.text.push_str(&held);
            self.close();
            self.release(&mut said.piece);
        }
        Ok(said)
    }

    /// Adds text that has become certain; says whether the answer ends.
    fn add(&mut self, text: &str, said: &mut Said) -> bool {
        if text.is_empty() {
            return false;
        }
        self.known_bytes += text.len();
        self.known_chars += u32::try_from(text.chars().count()).unwrap_or(u32::MAX);
        self.close();
        let released = self.stops.push(text);
        self.released_bytes += released.text.len();
        said.piece.text.push_str(&released.text);
        said.stopped = released.stopped;
        self.release(&mut said.piece);
        released.stopped
    }

    /// The open tokens' text is known now.
    fn close(&mut self) {
        let end = self.known_bytes;
        self.held.extend(self.open.drain(..).map(|token| (end, token)));
    }

    fn release(&mut self, piece: &mut Piece) {
        while let Some((_, token)) = self.held.pop_front_if(|(end, _)| *end <= self.released_bytes) {
            piece.tokens.push(token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One token per byte: id = byte.
    fn bytes() -> Tokenizer {
        let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let mut next = 256;
        let vocab: serde_json::Map<String, serde_json::Value> = (0..256u32)
            .map(|b| {
                let c = if printable(b) {
                    b
                } else {
                    next += 1;
                    next - 1
                };
                (char::from_u32(c).unwrap().to_string(), b.into())
            })
            .collect();
        let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let json = serde_json::json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        Tokenizer::from_json(json.to_string().as_bytes()).unwrap()
    }

    fn run(stops: &[&str], text: &str) -> (String, String, Vec<u32>, bool) {
        let stops = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut answer = AnswerText::with(&bytes(), stops, false, true);
        let (mut out, mut tokens, mut offsets, mut stopped) = (String::new(), vec![], vec![], false);
        let mut take = |said: Said| {
            out.push_str(&said.piece.text);
            for token in said.piece.tokens {
                tokens.push(u8::try_from(token.id).unwrap());
                offsets.push(token.offset_chars);
            }
            said.stopped
        };
        for byte in text.bytes() {
            stopped = take(answer.push(&[byte.into()], vec![]).unwrap());
            if stopped {
                break;
            }
        }
        if !stopped {
            stopped = take(answer.finish().unwrap());
        }
        (out, String::from_utf8(tokens).unwrap(), offsets, stopped)
    }

    #[test]
    fn tokens_and_text_are_released_together() {
        let (text, tokens, offsets, stopped) = run(&["END"], "aé🦀 ENX");
        assert_eq!((text.as_str(), tokens.as_str(), stopped), ("aé🦀 ENX", "aé🦀 ENX", false));
        assert_eq!(offsets, [0, 1, 1, 2, 2, 2, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn neither_text_nor_tokens_of_a_stop_string_leak() {
        assert_eq!(run(&["END"], "a END b"), ("a ".into(), "a ".into(), vec![0, 1], true));
        assert_eq!(run(&["🦀🦀"], "x🦀🦀y"), ("x".into(), "x".into(), vec![0], true));
        assert_eq!(run(&["zz", "é"], "xé"), ("x".into(), "x".into(), vec![0], true));
    }

    #[test]
    fn tokens_after_a_stop_string_are_not_used() {
        let mut answer = AnswerText::with(&bytes(), vec!["b".into()], false, false);
        let said = answer.push(&[97, 98, 99], vec![]).unwrap();
        assert_eq!((said.piece.text.as_str(), said.stopped, said.used), ("a", true, 2));
    }
}
