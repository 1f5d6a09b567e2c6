//! Block keys: a hash chain over token blocks, equal in every process, machine and language.
//!
//! `key[-1] = BLAKE3("pd-bridge/block/v1" ‖ fingerprint ‖ layout_digest)`,
//! `key[i] = BLAKE3(key[i-1] ‖ token ids of block i as u32 LE)`.

/// A 32-byte BLAKE3 value that names a block together with everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub [u8; 32]);

impl BlockKey {
    /// The key before the first block.
    #[must_use]
    pub fn root(fingerprint: &[u8; 32], layout_digest: &[u8; 32]) -> Self {
        let mut h = blake3::Hasher::new();
        h.update(b"pd-bridge/block/v1");
        h.update(fingerprint);
        h.update(layout_digest);
        Self(*h.finalize().as_bytes())
    }

    /// The key of the block that follows this one and holds `tokens`.
    #[must_use]
    pub fn next(&self, tokens: &[u32]) -> Self {
        let mut h = blake3::Hasher::new();
        h.update(&self.0);
        for t in tokens {
            h.update(&t.to_le_bytes());
        }
        Self(*h.finalize().as_bytes())
    }

    /// Keys of all full blocks of `tokens`; a tail shorter than a block has none.
    #[must_use]
    pub fn chain(&self, tokens: &[u32], block_tokens: usize) -> Vec<Self> {
        let mut key = *self;
        tokens
            .chunks_exact(block_tokens)
            .map(|block| {
                key = key.next(block);
                key
            })
            .collect()
    }
}

impl std::fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockKey({})", hex::encode(&self.0[..8]))
    }
}

/// BLAKE3 over token ids as u32 LE: both ends of a transfer state it for the prompt they mean.
#[must_use]
pub fn tokens_digest(tokens: &[u32]) -> [u8; 32] {
    let mut h = blake3::Hasher::new();
    h.update(b"pd-bridge/tokens/v1");
    for t in tokens {
        h.update(&t.to_le_bytes());
    }
    *h.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_covers_full_blocks_only() {
        let root = BlockKey::root(&[1; 32], &[2; 32]);
        let tokens: Vec<u32> = (0..10).collect();
        let keys = root.chain(&tokens, 4);
        assert_eq!(keys.len(), 2);
        assert_eq!(keys[1], root.next(&tokens[..4]).next(&tokens[4..8]));
    }

    #[test]
    fn a_key_depends_on_all_earlier_tokens() {
        let root = BlockKey::root(&[1; 32], &[2; 32]);
        let a = root.chain(&[1, 2, 3, 4], 2);
        let b = root.chain(&[9, 2, 3, 4], 2);
        assert_ne!(a[1], b[1]);
    }
}
