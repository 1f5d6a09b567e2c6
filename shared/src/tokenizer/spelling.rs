//! What the ids of a byte-level vocabulary stand for, as bytes.

use tokenizers::Tokenizer;

/// The bytes of every id, in one piece of memory.
#[derive(Debug)]
pub(super) struct Spelling {
    bytes: Vec<u8>,
    /// End of each id's bytes.
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl Spelling {
    /// Spells every id once. Ids without a token are empty.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        let n = tokenizer.get_vocab(true).values().max().map_or(0, |largest| *largest as usize + 1);
        let mut spelling = Self { bytes: Vec::new(), ends: Vec::with_capacity(n), special: vec![false; n] };
        let added = tokenizer.get_added_tokens_decoder();
        for id in 0..n {
            let id = u32::try_from(id).unwrap_or(u32::MAX);
            if let Some(token) = tokenizer.id_to_token(id) {
                append_token_bytes(&mut spelling.bytes, &token);
            }
            spelling.ends.push(u32::try_from(spelling.bytes.len()).unwrap_or(u32::MAX));
            spelling.special[id as usize] = added.get(&id).is_some_and(|token| token.special);
        }
        spelling
    }

    /// Bytes of an id; none for an unknown one.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let Some(end) = self.ends.get(id as usize) else { return &[] };
        let start = (id as usize).checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start as usize..*end as usize]
    }

    /// Whether it is a special token.
    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// Bytes of a byte-level token; a token outside the byte alphabet (an added token) stands for its own spelling.
fn append_token_bytes(out: &mut Vec<u8>, token: &str) {
    let start = out.len();
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// Inverse of GPT-2's byte alphabet, which spells printable Latin-1 as itself and moves the other 68 bytes to U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// GPT-2's character for a byte.
pub(super) fn char_of(byte: u8) -> char {
    let code = u32::from(byte);
    let moved = match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => code,
        0x00..=0x20 => code + 0x100,
        0x7F..=0xA0 => code - 0x7F + 0x121,
        0xAD => 0x143,
    };
    char::from_u32(moved).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
pub(super) fn byte_alphabet() -> impl Iterator<Item = char> {
    (0..0x144u32).filter_map(char::from_u32).filter(|c| byte_of(*c).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        assert!((0..=255).all(|byte| byte_of(char_of(byte)) == Some(byte)));
        let mut seen: Vec<u8> = (0..0x144u32).filter_map(char::from_u32).filter_map(byte_of).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('\u{120}'), Some(b' '));
        assert_eq!(byte_of('\u{10A}'), Some(b'\n'));
    }
}
