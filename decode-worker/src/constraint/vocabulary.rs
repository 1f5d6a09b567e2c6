//! The vocabulary as llguidance walks it: a trie over the bytes of all tokens.

use super::ConstraintError;
use shared::tokenizer::Tokenizer;
use toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// The trie's own limit on a token's bytes, with a margin.
const MAX_TOKEN_BYTES: usize = 1000;

/// Tokens of one model. Special ones have no bytes, so no grammar reaches them; end tokens come in by their number.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Tokenizer,
}

impl Vocabulary {
    /// `vocab_size` is the number of the model's logits.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        vocab_size: usize,
        end_tokens: &[u32],
    ) -> Result<Self, ConstraintError> {
        let size = u32::try_from(vocab_size).ok().filter(|&size| size > 0 && size < 1 << 22);
        let size = size.ok_or_else(|| ConstraintError::Vocabulary(format!("{vocab_size} tokens")))?;
        let ends: Vec<u32> = end_tokens.iter().copied().filter(|&token| token < size).collect();
        let Some(&first) = ends.first() else {
            return Err(ConstraintError::Vocabulary("no token ends an answer".to_owned()));
        };
        let bytes_of = |token| {
            let bytes = if ends.contains(&token) { None } else { tokenizer.token_bytes(token) };
            bytes.filter(|bytes| bytes.len() <= MAX_TOKEN_BYTES).unwrap_or_default()
        };
        let words: Vec<Vec<u8>> = (0..size).map(bytes_of).collect();
        let trie = TokTrie::from(&TokRxInfo::new(size, first), &words).with_eos_tokens(&ends);
        Ok(Self { trie, tokenizer: tokenizer.clone() })
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let ids = self.tokenizer.encode(text, false).unwrap_or_default();
            // Text that spells a special token is text all the same, and a space put before it does not belong.
            let same = self.trie.decode_raw(&ids) == text.as_bytes();
            if same { ids } else { self.trie.greedy_tokenize(text.as_bytes()) }
        })
    }

    /// Only then are the tokens of a forced text those that the model would have written.
    fn tokenize_is_canonical(&self) -> bool {
        self.tokenizer.is_byte_level()
    }
}
