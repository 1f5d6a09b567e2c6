//! Token ids to text, one at a time.

use super::{Tokenizer, TokenizerError};

/// Incremental decoder of one stream of ids.
///
/// Every piece is whole UTF-8, and all pieces together with [`Detokenizer::finish`] equal the decoding of all ids at
/// once.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Byte-level vocabularies: bytes of a character that is not complete yet.
    Bytes(Vec<u8>),
    /// Any other decoder: a window of ids whose first `context` ones have been emitted as `emitted` and stay as
    /// context, because such decoders may treat the first token of a text differently.
    Window { ids: Vec<u32>, context: usize, emitted: String },
}

impl Detokenizer {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let state = if tokenizer.spelling().is_some() {
            State::Bytes(Vec::new())
        } else {
            State::Window { ids: Vec::new(), context: 0, emitted: String::new() }
        };
        Self { tokenizer, skip_special, state }
    }

    /// Add one id and take the text that has become certain; empty while a character is incomplete.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] when the library's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        match &mut self.state {
            State::Bytes(pending) => {
                if let Some(spelling) = self.tokenizer.spelling()
                    && !(self.skip_special && spelling.is_special(id))
                {
                    pending.extend_from_slice(spelling.bytes(id));
                }
                Ok(take_certain(pending))
            }
            State::Window { ids, context, emitted } => {
                ids.push(id);
                let text = self.tokenizer.decode_tokens(ids, self.skip_special)?;
                if text.ends_with('\u{FFFD}') {
                    return Ok(String::new());
                }
                let piece = match text.strip_prefix(emitted.as_str()) {
                    Some(new) => new.to_owned(),
                    // A stray byte changed how the context reads. What is out is out: the new ids stand alone.
                    None => self.tokenizer.decode_tokens(&ids[*context..], self.skip_special)?,
                };
                if !piece.is_empty() {
                    ids.drain(..*context);
                    *context = ids.len();
                    *emitted = self.tokenizer.decode_tokens(ids, self.skip_special)?;
                }
                Ok(piece)
            }
        }
    }

    /// The rest of the text: U+FFFD for a character that never became complete, otherwise empty.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] when the library's decoder fails.
    pub fn finish(self) -> Result<String, TokenizerError> {
        match self.state {
            State::Bytes(pending) => Ok(String::from_utf8_lossy(&pending).into_owned()),
            State::Window { ids, context, emitted } => {
                let text = self.tokenizer.decode_tokens(&ids, self.skip_special)?;
                match text.strip_prefix(emitted.as_str()) {
                    Some(new) => Ok(new.to_owned()),
                    None => self.tokenizer.decode_tokens(&ids[context..], self.skip_special),
                }
            }
        }
    }
}

/// Take all text that later bytes cannot change, broken sequences as U+FFFD; an incomplete character stays.
fn take_certain(pending: &mut Vec<u8>) -> String {
    let mut out = String::new();
    let mut used = 0;
    for chunk in pending.utf8_chunks() {
        out.push_str(chunk.valid());
        used += chunk.valid().len();
        let broken = chunk.invalid();
        if broken.is_empty() {
            continue;
        }
        let at_the_end = used + broken.len() == pending.len();
        if at_the_end && is_incomplete(broken) {
            break;
        }
        out.push('\u{FFFD}');
        used += broken.len();
    }
    pending.drain(..used);
    out
}

/// True when more bytes could make this a character.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn pieces_equal_the_lossy_whole(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..64), cut in 1usize..5) {
            let mut pending = Vec::new();
            let mut out = String::new();
            for piece in bytes.chunks(cut) {
                pending.extend_from_slice(piece);
                out.push_str(&take_certain(&mut pending));
            }
            out.push_str(&String::from_utf8_lossy(&pending));
            proptest::prop_assert_eq!(out, String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
