//! The time of sending, written as words: each word of a fixed list is one token of the model.
//!
//! The first word of an answer is the high part of its own time, the second the low part of the *first* word's time, and
//! from the third on each word is the low part of its own. A word is never sent before the pace has it due, so the low
//! part (131 ms) is enough to know the rest, unless the source itself was later than that.

use shared::tokenizer::{Tokenizer, TokenizerError};
use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Words in the list.
const WORDS: u64 = 16_384;
/// Microseconds per unit of a low word.
const UNIT_US: u64 = 8;

/// The list.
#[derive(Debug)]
pub struct Words {
    ids: Vec<u32>,
    texts: Vec<String>,
    index: HashMap<String, u64>,
}

/// Why a model can't be used.
#[derive(Debug, thiserror::Error)]
pub enum WordsError {
    /// It has no usable tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Its vocabulary has too few plain words.
    #[error("the vocabulary has {0} plain words, {WORDS} are needed")]
    TooFew(usize),
}

impl Words {
    /// The first words of a vocabulary, in order of id: a space and ASCII letters.
    ///
    /// # Errors
    /// [`WordsError::TooFew`] with a small vocabulary.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, WordsError> {
        let mut words = Self { ids: Vec::new(), texts: Vec::new(), index: HashMap::new() };
        for id in 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX) {
            let text = tokenizer.decode(&[id])?;
            let letters = text.strip_prefix(' ').unwrap_or_default();
            let is_plain = !letters.is_empty() && letters.bytes().all(|b| b.is_ascii_alphabetic());
            if !is_plain || words.index.contains_key(letters) {
                continue;
            }
            words.index.insert(letters.to_owned(), words.ids.len() as u64);
            words.ids.push(id);
            words.texts.push(text);
            if words.ids.len() as u64 == WORDS {
                return Ok(words);
            }
        }
        Err(WordsError::TooFew(words.ids.len()))
    }

    /// Token id and text of a word.
    #[must_use]
    pub fn word(&self, number: u64) -> (u32, &str) {
        let at = usize::try_from(number % WORDS).unwrap_or(0);
        (self.ids[at], &self.texts[at])
    }

    /// Number of a word, which is given without its space.
    #[must_use]
    pub fn number(&self, word: &str) -> Option<u64> {
        self.index.get(word).copied()
    }
}

/// How much before its time a timer may fire, seen from the time of another token.
const GRAIN_US: u64 = 4_000;

/// Microseconds since 1970: the same clock in every process of the machine.
#[must_use]
pub fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// Writes one answer.
#[derive(Debug, Default)]
pub struct Writer {
    sent: u64,
    first_us: u64,
}

impl Writer {
    /// Number of the word to send now.
    pub fn next(&mut self, now_us: u64) -> u64 {
        self.sent += 1;
        match self.sent {
            1 => {
                self.first_us = now_us;
                now_us / UNIT_US / WORDS % WORDS
            }
            2 => self.first_us / UNIT_US % WORDS,
            _ => now_us / UNIT_US % WORDS,
        }
    }
}

/// Reads one answer.
#[derive(Debug)]
pub struct Reader {
    pace_us: u64,
    read: u64,
    high: u64,
    first_arrival_us: u64,
    first_us: u64,
    /// Words that would have been sent after they arrived: lost, doubled or moved ones make such.
    pub misplaced: u64,
    last_us: u64,
}

impl Reader {
    /// A reader of an answer with this time between two tokens.
    #[must_use]
    pub fn new(pace_us: u64) -> Self {
        Self { pace_us, read: 0, high: 0, first_arrival_us: 0, first_us: 0, misplaced: 0, last_us: 0 }
    }

    /// Takes the next word and when it arrived. Returns what a word spent on its way, in microseconds: the second word
    /// tells it of the first, all others of themselves.
    pub fn next(&mut self, number: u64, arrived_us: u64) -> Option<u64> {
        self.read += 1;
        let sent_us = match self.read {
            1 => {
                (self.high, self.first_arrival_us) = (number, arrived_us);
                return None;
            }
            2 => {
                let span = WORDS * WORDS;
                let low_part = (self.high * WORDS + number) % span;
                let base = self.first_arrival_us / UNIT_US;
                self.first_us = (base - (base - low_part) % span) * UNIT_US;
                self.last_us = self.first_us;
                return Some(self.first_arrival_us.saturating_sub(self.first_us));
            }
            n => {
                // Never before its time, never before its predecessor.
                let due_us = self.first_us + (n - 1) * self.pace_us;
                next_from(due_us.max(self.last_us) / UNIT_US, number) * UNIT_US
            }
        };
        if sent_us > arrived_us + UNIT_US {
            self.misplaced += 1;
        }
        self.last_us = sent_us;
        Some(arrived_us.saturating_sub(sent_us))
    }
}

/// The first time from `from` on, a timer's grain before it included, whose low part is `low`.
fn next_from(from: u64, low: u64) -> u64 {
    let from = from - GRAIN_US / UNIT_US;
    from + (low + WORDS - from % WORDS) % WORDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_finds_every_delay_again() {
        for pace_us in [1_000, 20_000, 50_000] {
            for start in [1_900_000_000_000_000_u64, 1_900_000_000_131_071, 1_900_000_123_456_789] {
                let (mut writer, mut reader) = (Writer::default(), Reader::new(pace_us));
                let mut previous_delay = None;
                for i in 0..500 {
                    let late = (i * 7919) % 30_000;
                    let sent = start + i * pace_us + late.min(pace_us / 2);
                    let delay = (i * 104_729) % 5_000_000;
                    let told = reader.next(writer.next(sent), sent + delay);
                    let of = if i == 1 { previous_delay } else { Some(delay) };
                    match told {
                        None => assert_eq!(i, 0),
                        Some(told) => assert!(told.abs_diff(of.unwrap()) < UNIT_US, "{i}: {told} {of:?}"),
                    }
                    previous_delay = Some(delay);
                }
                assert_eq!(reader.misplaced, 0);
            }
        }
    }

    #[test]
    fn exchanged_words_are_noticed() {
        let (mut writer, mut reader) = (Writer::default(), Reader::new(20_000));
        let mut words: Vec<u64> = (0..10).map(|i| writer.next(1_900_000_000_000_000 + i * 20_000)).collect();
        words.swap(5, 6);
        for (i, word) in words.into_iter().enumerate() {
            reader.next(word, 1_900_000_000_010_000 + i as u64 * 20_000);
        }
        assert!(reader.misplaced > 0);
    }
}
