//! Encoding piece by piece, with a memory of pieces that come again.
//!
//! Added tokens such as `<|im_start|>` cut a text into segments that are encoded independently of each other. A
//! conversation repeats its earlier messages in every request, so most segments of a chat prompt have been seen.

use ahash::AHashMap;
use aho_corasick::{AhoCorasick, MatchKind};
use std::sync::{Arc, Mutex, PoisonError};
use tokenizers::Tokenizer;

/// Bytes of text and ids to remember.
const BUDGET_BYTES: usize = 8 << 20;
/// Longer segments are not remembered: they would push out too many others.
const MAX_SEGMENT_BYTES: usize = 256 << 10;
/// Marks of segments that were seen once; only what comes twice is remembered.
const MARKS: usize = 4096;

/// The tokens that cut, and the memory.
#[derive(Debug)]
pub(super) struct Segments {
    cuts: AhoCorasick,
    ids: Vec<u32>,
    memory: Mutex<Memory>,
}

/// Two generations: when the young one is full, it becomes the old one, whose entries are forgotten unless used.
#[derive(Debug)]
struct Memory {
    young: AHashMap<Box<str>, Arc<[u32]>>,
    old: AHashMap<Box<str>, Arc<[u32]>>,
    young_bytes: usize,
    marks: Box<[u64]>,
    hasher: ahash::RandomState,
}

impl Segments {
    /// `None` for a tokenizer whose segments depend on each other.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        // Metaspace may treat the first segment of a text differently.
        let pre_tokenizer = serde_json::to_string(&tokenizer.get_pre_tokenizer()).ok()?;
        if pre_tokenizer.contains("Metaspace") || tokenizer.get_encode_special_tokens() {
            return None;
        }
        let added = tokenizer.get_added_tokens_decoder();
        let cutting: Vec<_> = added.into_iter().filter(|(_, token)| !token.normalized).collect();
        // Such tokens take part of their neighbours with them.
        if cutting.is_empty() || cutting.iter().any(|(_, t)| t.single_word || t.lstrip || t.rstrip) {
            return None;
        }
        let cuts = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(cutting.iter().map(|(_, token)| &token.content))
            .ok()?;
        let ids = cutting.iter().map(|(id, _)| *id).collect();
        Some(Self { cuts, ids, memory: Mutex::new(Memory::new()) })
    }

    /// Encodes a text without what the tokenizer puts around every text. `encode` does so with one segment.
    pub(super) fn encode<E>(
        &self,
        text: &str,
        encode: impl Fn(&str) -> Result<Vec<u32>, E>,
    ) -> Result<Vec<u32>, E> {
        let mut out = Vec::with_capacity(text.len() / 3 + 8);
        let mut start = 0;
        for cut in self.cuts.find_iter(text) {
            self.segment(&text[start..cut.start()], &encode, &mut out)?;
            out.push(self.ids[cut.pattern().as_usize()]);
            start = cut.end();
        }
        self.segment(&text[start..], &encode, &mut out)?;
        Ok(out)
    }

    fn segment<E>(
        &self,
        text: &str,
        encode: &impl Fn(&str) -> Result<Vec<u32>, E>,
        out: &mut Vec<u32>,
    ) -> Result<(), E> {
        if text.is_empty() {
            return Ok(());
        }
        if text.len() > MAX_SEGMENT_BYTES {
            out.extend(encode(text)?);
            return Ok(());
        }
        let known = self.lock().find(text);
        if let Some(ids) = known {
            out.extend_from_slice(&ids);
            return Ok(());
        }
        let ids = encode(text)?;
        out.extend_from_slice(&ids);
        self.lock().learn(text, &ids);
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    fn new() -> Self {
        Self {
            young: AHashMap::new(),
            old: AHashMap::new(),
            young_bytes: 0,
            marks: vec![0; MARKS].into(),
            hasher: ahash::RandomState::new(),
        }
    }

    fn find(&mut self, text: &str) -> Option<Arc<[u32]>> {
        if let Some(ids) = self.young.get(text) {
            return Some(ids.clone());
        }
        let (text, ids) = self.old.remove_entry(text)?;
        self.keep(text, ids.clone());
        Some(ids)
    }

    fn learn(&mut self, text: &str, ids: &[u32]) {
        let mark = self.hasher.hash_one(text);
        let slot = &mut self.marks[usize::try_from(mark % MARKS as u64).unwrap_or(0)];
        if std::mem::replace(slot, mark) == mark {
            self.keep(text.into(), ids.into());
        }
    }

    fn keep(&mut self, text: Box<str>, ids: Arc<[u32]>) {
        let bytes = text.len() + ids.len() * 4;
        if self.young_bytes + bytes > BUDGET_BYTES / 2 {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        if self.young.insert(text, ids).is_none() {
            self.young_bytes += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn memory_is_bounded_and_keeps_what_is_used() {
        let mut memory = Memory::new();
        let ids = vec![7; 1000];
        for i in 0..10_000 {
            let text = format!("segment {i}");
            memory.learn(&text, &ids);
            assert!(memory.find(&text).is_none(), "known after one time");
            memory.learn(&text, &ids);
            assert!(memory.find(&text).is_some());
            memory.learn("used", &ids);
            assert!(i == 0 || memory.find("used").is_some(), "{i}");
        }
        let kept = memory.young.len() + memory.old.len();
        assert!(kept * 4000 <= BUDGET_BYTES, "{kept} kept");
        assert!(memory.find("segment 1").is_none());
    }

    /// A tokenizer with added tokens of which one begins another, and a byte-level vocabulary with a few merges.
    fn tokenizer() -> Tokenizer {
        let bytes: Vec<String> = crate::tokenizer::spelling::byte_alphabet().map(String::from).collect();
        let mut vocab: serde_json::Map<String, serde_json::Value> =
            bytes.iter().enumerate().map(|(i, b)| (b.clone(), i.into())).collect();
        for merged in ["ab", "Ġa", "abab"] {
            vocab.insert(merged.to_owned(), vocab.len().into());
        }
        let token = |id: usize, content: &str, special: bool| {
            serde_json::json!({"id": id, "content": content, "special": special, "normalized": !special && content == "norm",
                "single_word": false, "lstrip": false, "rstrip": false})
        };
        let n = vocab.len();
        let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let json = serde_json::json!({"version": "1.0", "normalizer": {"type": "NFC"}, "pre_tokenizer": level, "decoder": level,
            "added_tokens": [token(n, "<|a|>", true), token(n + 1, "<|a|>b", true), token(n + 2, "<t>", false), token(n + 3, "norm", false)],
            "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["Ġ", "a"], ["ab", "ab"]]}});
        Tokenizer::from_bytes(json.to_string()).unwrap()
    }

    proptest::proptest! {
        #[test]
        fn pieces_give_what_the_whole_gives(texts in proptest::collection::vec("(<\\|a\\|>|b|<t>|norm|a|ab| |\n|é|e\u{301}|.){0,12}", 1..6)) {
            let tokenizer = tokenizer();
            let segments = Segments::of(&tokenizer).unwrap();
            let whole = |text: &str| tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
            // Each three times: unknown, marked, known.
            for text in texts.iter().cycle().take(texts.len() * 3) {
                let pieces = segments.encode(text, |t| Ok::<_, Infallible>(whole(t))).unwrap();
                proptest::prop_assert_eq!(pieces, whole(text), "{:?}", text);
            }
        }
    }
}
