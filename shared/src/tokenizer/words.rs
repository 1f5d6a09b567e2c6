//! Byte-level BPE word by word, without the bookkeeping of offsets that a prompt does not need.
//!
//! A text is cut into words by the tokenizer's own patterns, and a word always gets the same ids, so words that were seen
//! are looked up. Only tokenizers of a form where this gives what the library gives are taken; the others keep the
//! library's way.

use super::spelling::char_of;
use ahash::AHashMap;
use regex_automata::meta::Regex;
use serde_json::Value;
use std::sync::{Mutex, PoisonError};
use tokenizers::{Model as _, ModelWrapper, Tokenizer};

/// How patterns of this family end: runs of white space, of which the last character goes to the word behind it.
const SPACES_TAIL: &str = r"|\s+(?!\S)|\s+";
/// The pattern of a byte-level pre-tokenizer that cuts by itself.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Words to remember, in each of two generations.
const GENERATION: usize = 4096;
/// Longer words are not remembered.
const MAX_WORD_BYTES: usize = 64;
/// Words looked up under one lock.
const TOGETHER: usize = 64;

/// Cuts texts into words and words into ids.
#[derive(Debug)]
pub(super) struct Words {
    cuts: Vec<Cut>,
    /// The text is composed first, which changes nothing in ASCII.
    ascii_only: bool,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    young: AHashMap<Box<str>, Box<[u32]>>,
    old: AHashMap<Box<str>, Box<[u32]>>,
}

/// One pattern; what it matches and what lies between are pieces of their own.
#[derive(Debug)]
struct Cut {
    /// The pattern without its tail, and white space if there was a tail.
    regex: Regex,
}

impl Words {
    /// `None` for a tokenizer of another form.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let json = |part| serde_json::to_value(part).ok();
        let ModelWrapper::BPE(bpe) = tokenizer.get_model() else { return None };
        if bpe.dropout.is_some()
            || bpe.continuing_subword_prefix.is_some()
            || bpe.end_of_word_suffix.is_some()
        {
            return None;
        }
        if tokenizer.get_added_tokens_decoder().values().any(|token| token.normalized) {
            return None;
        }
        let ascii_only = match tokenizer.get_normalizer() {
            None => false,
            Some(normalizer) if serde_json::to_value(normalizer).ok()?["type"] == "NFC" => true,
            Some(_) => return None,
        };
        let pre_tokenizer = json(tokenizer.get_pre_tokenizer()?)?;
        let steps = match &pre_tokenizer["pretokenizers"] {
            Value::Array(steps) => steps.clone(),
            _ => vec![pre_tokenizer],
        };
        let (last, splits) = steps.split_last()?;
        if last["type"] != "ByteLevel" || last["add_prefix_space"] != false {
            return None;
        }
        let mut cuts =
            splits.iter().map(|step| Cut::new(split_pattern(step)?)).collect::<Option<Vec<_>>>()?;
        if last["use_regex"] != false {
            cuts.push(Cut::new(GPT2)?);
        }
        Some(Self { cuts, ascii_only, known: Mutex::default() })
    }

    /// Encodes a text that holds no added token; `None` for one that has to take the library's way.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Option<tokenizers::Result<Vec<u32>>> {
        if self.ascii_only && !text.is_ascii() {
            return None;
        }
        let mut pieces = vec![text];
        for cut in &self.cuts {
            let mut finer = Vec::with_capacity(pieces.len() + text.len() / 4);
            pieces.iter().for_each(|piece| cut.apply(piece, &mut finer));
            pieces = finer;
        }
        let mut ids = Vec::with_capacity(pieces.len() * 2);
        for words in pieces.chunks(TOGETHER) {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            for word in words {
                if known.find(word, &mut ids) {
                    continue;
                }
                let spelled: String = word.bytes().map(char_of).collect();
                let tokens = match tokenizer.get_model().tokenize(&spelled) {
                    Ok(tokens) => tokens,
                    Err(error) => return Some(Err(error)),
                };
                let start = ids.len();
                ids.extend(tokens.iter().map(|token| token.id));
                known.keep(word, &ids[start..]);
            }
        }
        Some(Ok(ids))
    }
}

/// The pattern of a step that makes every match a piece of its own.
fn split_pattern(step: &Value) -> Option<&str> {
    let is_plain = step["type"] == "Split" && step["behavior"] == "Isolated" && step["invert"] == false;
    if is_plain { step["pattern"]["Regex"].as_str() } else { None }
}

impl Cut {
    /// `None` for a pattern that looks around other than in its tail.
    fn new(pattern: &str) -> Option<Self> {
        let regex = match pattern.strip_suffix(SPACES_TAIL) {
            Some(head) => Regex::new_many(&[head, r"\s+"]),
            None => Regex::new(pattern),
        };
        regex.ok().map(|regex| Self { regex })
    }

    fn apply<'t>(&self, text: &'t str, out: &mut Vec<&'t str>) {
        let (mut done, mut at) = (0, 0);
        while let Some(found) = self.regex.find(regex_automata::Input::new(text).range(at..)) {
            let (start, mut end) = (found.start(), found.end());
            if found.is_empty() {
                // No pattern of this family matches nothing; one that did would not cut there either.
                let Some(next) = text[end..].chars().next() else { break };
                at = end + next.len_utf8();
                continue;
            }
            let is_spaces = found.pattern().as_usize() == 1;
            if is_spaces && end < text.len() {
                let last = text[start..end].char_indices().next_back().map_or(0, |(i, _)| i);
                if last > 0 {
                    end = start + last;
                }
            }
            if done < start {
                out.push(&text[done..start]);
            }
            out.push(&text[start..end]);
            (done, at) = (end, end);
        }
        if done < text.len() {
            out.push(&text[done..]);
        }
    }
}

impl Known {
    fn find(&mut self, word: &str, ids: &mut Vec<u32>) -> bool {
        if let Some(known) = self.young.get(word) {
            ids.extend_from_slice(known);
            return true;
        }
        let Some((word, known)) = self.old.remove_entry(word) else { return false };
        ids.extend_from_slice(&known);
        self.insert(word, known);
        true
    }

    fn keep(&mut self, word: &str, ids: &[u32]) {
        if word.len() <= MAX_WORD_BYTES {
            self.insert(word.into(), ids.into());
        }
    }

    fn insert(&mut self, word: Box<str>, ids: Box<[u32]>) {
        if self.young.len() >= GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(word, ids);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::spelling::byte_alphabet;
    use serde_json::json;

    /// A vocabulary of bytes with a few merges, cut as this family of models does.
    fn tokenizer(pre_tokenizer: &Value, normalizer: &Value) -> Tokenizer {
        let mut vocab: serde_json::Map<String, Value> =
            byte_alphabet().enumerate().map(|(i, c)| (c.to_string(), i.into())).collect();
        for merged in ["ab", "Ġa", "abab", "ĠĠ", "11", "ll", "'ll", "Ã©"] {
            vocab.insert(merged.to_owned(), vocab.len().into());
        }
        let merges = json!([
            ["a", "b"],
            ["Ġ", "a"],
            ["ab", "ab"],
            ["Ġ", "Ġ"],
            ["1", "1"],
            ["l", "l"],
            ["'", "ll"],
            ["Ã", "©"]
        ]);
        let json = json!({"version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges}});
        Tokenizer::from_bytes(json.to_string()).unwrap()
    }

    fn split(pattern: &str) -> Value {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    }

    fn family() -> Vec<Tokenizer> {
        let level = |cuts: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": cuts});
        let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let steps = |steps: Value| json!({"type": "Sequence", "pretokenizers": steps});
        vec![
            tokenizer(&level(true), &Value::Null),
            tokenizer(&steps(json!([split(r"\p{N}"), split(GPT2), level(false)])), &Value::Null),
            tokenizer(&steps(json!([split(llama3), level(false)])), &json!({"type": "NFC"})),
        ]
    }

    #[test]
    fn other_forms_keep_the_librarys_way() {
        let level =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        assert!(Words::of(&tokenizer(&level, &Value::Null)).is_none());
        assert!(Words::of(&tokenizer(&split(r"(?<=a)b"), &Value::Null)).is_none());
        assert!(
            Words::of(&tokenizer(
                &json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true}),
                &Value::Null
            ))
            .is_none()
        );
        assert!(Words::of(&family()[0]).is_some());
    }

    #[test]
    fn memory_is_bounded() {
        let mut known = Known::default();
        for i in 0..GENERATION * 5 {
            known.keep(&i.to_string(), &[1]);
        }
        assert!(known.young.len() + known.old.len() <= GENERATION * 2);
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(400))]
        #[test]
        fn words_give_what_the_library_gives(text in "(a|b|ab|1|123| |  |\t|\n|\r\n|'ll|'S|é|e\u{301}|\u{2003}|\u{a0}|中|🦀|!|\\.|[a-z]|.){0,24}") {
            for tokenizer in family() {
                let words = Words::of(&tokenizer).unwrap();
                let want = tokenizer.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
                // Twice: unknown words, known words.
                for _ in 0..2 {
                    match words.encode(&tokenizer, &text) {
                        Some(ids) => proptest::prop_assert_eq!(&ids.unwrap(), &want),
                        None => proptest::prop_assert!(words.ascii_only && !text.is_ascii()),
                    }
                }
            }
        }
    }
}
