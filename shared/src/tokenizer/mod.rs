//! Text to token ids and back, from a `tokenizer.json` or from the vocabulary inside a GGUF file.

mod detokenizer;
mod error;
mod gguf;
mod segments;
mod spelling;
mod words;

pub use detokenizer::Detokenizer;
pub use error::TokenizerError;

use crate::weights::gguf::GgufFile;
use segments::Segments;
use spelling::Spelling;
use std::path::Path;
use std::sync::Arc;
use tokenizers::DecoderWrapper;
use words::Words;

/// A model's tokenizer. Clones share one vocabulary.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    tokenizer: tokenizers::Tokenizer,
    /// Byte-level vocabularies: what each id stands for.
    spelling: Option<Spelling>,
    segments: Option<Segments>,
    words: Option<Words>,
    digest: [u8; 32],
}

impl Tokenizer {
    /// Open the tokenizer of a model: a GGUF file, a model directory, or a `tokenizer.json` itself.
    ///
    /// # Errors
    /// [`TokenizerError`] when there is none, or when it is of a kind that is not supported.
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
            let file = GgufFile::open(path)?;
            return Self::from_gguf(&file);
        }
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let bytes =
            std::fs::read(&file).map_err(|source| TokenizerError::Io { path: file.clone(), source })?;
        Self::from_json(&bytes)
    }

    /// Parse the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] when the `tokenizers` library refuses them.
    pub fn from_json(bytes: &[u8]) -> Result<Self, TokenizerError> {
        // The library unwraps in places while it parses, so a damaged file can make it panic.
        let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(bytes))
            .map_err(|_| TokenizerError::Invalid("the definition is damaged".to_owned()))?;
        let mut tokenizer = parsed.map_err(|e| TokenizerError::Invalid(e.to_string()))?;
        // A file may carry the truncation and padding of someone's training run; a prompt is neither cut nor padded.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| TokenizerError::Invalid(e.to_string()))?;
        let byte_level = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        let spelling = byte_level.then(|| Spelling::of(&tokenizer));
        let segments = Segments::of(&tokenizer);
        let words = Words::of(&tokenizer);
        let digest = digest_of(b"json", bytes);
        Ok(Self { inner: Arc::new(Inner { tokenizer, spelling, segments, words, digest }) })
    }

    pub(crate) fn from_gguf(file: &GgufFile) -> Result<Self, TokenizerError> {
        Self::from_json(&gguf::tokenizer_json(file)?)
    }

    /// Encode text. `add_special` adds what the tokenizer puts around every text (often a start token); rendered chat
    /// templates hold their special tokens already and are encoded without.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] when the library fails, for instance on a vocabulary without an unknown token.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        match &self.inner.segments {
            Some(segments) if !add_special => segments.encode(text, |segment| self.encode_segment(segment)),
            _ => self.encode_whole(text, add_special),
        }
    }

    /// Decode ids to text without special tokens. Broken UTF-8 becomes U+FFFD; unknown ids are skipped.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] when the library's decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decode_tokens(ids, true)
    }

    /// Decode ids to text, special tokens spelled out.
    ///
    /// # Errors
    /// [`TokenizerError::Invalid`] when the library's decoder fails.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.decode_tokens(ids, false)
    }

    /// An incremental decoder that leaves special tokens out, as [`Self::decode`] does.
    #[must_use]
    pub fn detokenizer(&self) -> Detokenizer {
        Detokenizer::new(self.clone(), true)
    }

    /// An incremental decoder that spells special tokens out, as [`Self::decode_with_special`] does.
    #[must_use]
    pub fn detokenizer_with_special(&self) -> Detokenizer {
        Detokenizer::new(self.clone(), false)
    }

    /// Number of ids, added tokens included. A model's embedding may have more rows.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.tokenizer.get_vocab_size(true)
    }

    /// Id of a token by its exact spelling.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.tokenizer.token_to_id(token)
    }

    /// Spelling of a token in the vocabulary's own alphabet.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.tokenizer.id_to_token(id)
    }

    /// True for tokens that [`Self::decode`] leaves out.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        let vocabulary = self.inner.tokenizer.get_added_vocabulary();
        vocabulary.simple_id_to_token(id).is_some_and(|token| vocabulary.is_special_token(&token))
    }

    /// Bytes that a token adds to a text; `None` for special tokens and ids without a token.
    ///
    /// Byte-level vocabularies spell bytes in their own alphabet; others write a space as `▁` and single bytes as
    /// `<0x0A>`.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if self.is_special(id) {
            return None;
        }
        let token = self.id_to_token(id)?;
        if let Some(spelling) = self.spelling() {
            return Some(spelling.bytes(id).to_vec());
        }
        let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|hex| hex.len() == 2);
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => Some(vec![byte]),
            None => Some(token.replace('\u{2581}', " ").into_bytes()),
        }
    }

    /// Whether the vocabulary spells bytes in GPT-2's alphabet.
    #[must_use]
    pub fn is_byte_level(&self) -> bool {
        self.inner.spelling.is_some()
    }

    /// BLAKE3 of the tokenizer's definition.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.inner.digest
    }

    /// Encodes a text that holds no added token.
    fn encode_segment(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let inner = &*self.inner;
        match inner.words.as_ref().and_then(|words| words.encode(&inner.tokenizer, text)) {
            Some(ids) => ids.map_err(|e| TokenizerError::Invalid(e.to_string())),
            None => self.encode_whole(text, false),
        }
    }

    fn encode_whole(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        self.inner
            .tokenizer
            .encode_fast(text, add_special)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|e| TokenizerError::Invalid(e.to_string()))
    }

    fn spelling(&self) -> Option<&Spelling> {
        self.inner.spelling.as_ref()
    }

    fn decode_tokens(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        self.inner.tokenizer.decode(ids, skip_special).map_err(|e| TokenizerError::Invalid(e.to_string()))
    }
}

fn digest_of(kind: &[u8], bytes: &[u8]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"pd-bridge/tokenizer/v1");
    hasher.update(kind);
    hasher.update(bytes);
    *hasher.finalize().as_bytes()
}
