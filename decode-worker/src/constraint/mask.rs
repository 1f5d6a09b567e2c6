//! A set of tokens.

use toktrie::SimpleVob;

/// Bits of a word.
const WORD: usize = 32;

/// Tokens that may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask(SimpleVob);

impl TokenMask {
    /// A set from its members.
    #[must_use]
    pub fn from_tokens(vocab_size: usize, tokens: &[u32]) -> Self {
        let mut set = SimpleVob::alloc(vocab_size);
        for &token in tokens.iter().filter(|&&token| (token as usize) < vocab_size) {
            set.allow_token(token);
        }
        Self(set)
    }

    pub(super) fn new(set: SimpleVob) -> Self {
        Self(set)
    }

    /// Whether the token is in the set.
    #[must_use]
    pub fn allows(&self, token: u32) -> bool {
        let word = self.0.as_slice().get(token as usize / WORD);
        word.is_some_and(|word| word >> (token as usize % WORD) & 1 == 1)
    }

    /// Number of tokens in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.num_set()
    }

    /// Whether no token is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_zero()
    }

    /// Makes the logits of all tokens outside the set no number, so that they cannot be chosen.
    pub fn exclude_others(&self, logits: &mut [f32]) {
        let words = self.0.as_slice();
        for (i, block) in logits.chunks_mut(WORD).enumerate() {
            match words.get(i).copied().unwrap_or(0) {
                u32::MAX => {}
                0 => block.fill(f32::NAN),
                word => {
                    for (bit, logit) in block.iter_mut().enumerate() {
                        *logit = if word >> bit & 1 == 1 { *logit } else { f32::NAN };
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn exactly_the_others_are_excluded(tokens in proptest::collection::vec(0u32..200, 0..200), n in 0usize..250) {
            let mask = TokenMask::from_tokens(200, &tokens);
            let mut logits = vec![1.0; n];
            mask.exclude_others(&mut logits);
            for (token, logit) in logits.iter().enumerate() {
                let inside = tokens.contains(&(token as u32));
                proptest::prop_assert_eq!(logit.is_nan(), !inside);
                proptest::prop_assert_eq!(mask.allows(token as u32), inside);
            }
        }
    }
}
