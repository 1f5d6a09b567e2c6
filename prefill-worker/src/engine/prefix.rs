//! The worker's own prefix cache: blocks of keys and values under the hash chain of their tokens, least recently used
//! out first.

use std::collections::HashMap;

use shared::keys::BlockKey;

/// Blocks within a byte budget. `T` is what a block keeps.
pub struct PrefixCache<T> {
    budget_bytes: usize,
    bytes: usize,
    clock: u64,
    blocks: HashMap<BlockKey, Block<T>>,
}

struct Block<T> {
    kept: T,
    bytes: usize,
    used: u64,
}

impl<T> PrefixCache<T> {
    /// An empty cache; a budget of 0 keeps nothing.
    pub fn new(budget_bytes: usize) -> Self {
        Self { budget_bytes, bytes: 0, clock: 0, blocks: HashMap::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Begins a request and returns how many leading blocks of its chain are held. They count as used now, and nothing
    /// that this request uses or inserts is evicted before the next one begins.
    pub fn begin(&mut self, chain: &[BlockKey]) -> usize {
        self.clock += 1;
        let clock = self.clock;
        let held = chain.iter().take_while(|key| match self.blocks.get_mut(key) {
            Some(block) => {
                block.used = clock;
                true
            }
            None => false,
        });
        held.count()
    }

    /// A block.
    pub fn block(&self, key: &BlockKey) -> Option<&T> {
        self.blocks.get(key).map(|block| &block.kept)
    }

    /// Keeps a block if it fits beside what the running request uses; older blocks are evicted to make it so.
    /// Answers whether it was kept.
    pub fn insert(&mut self, key: BlockKey, bytes: usize, kept: T) -> bool {
        self.remove(&key);
        while self.bytes + bytes > self.budget_bytes {
            let oldest = self.blocks.iter().filter(|(_, b)| b.used < self.clock).min_by_key(|(_, b)| b.used);
            let Some((&oldest, _)) = oldest else { return false };
            self.remove(&oldest);
        }
        self.bytes += bytes;
        self.blocks.insert(key, Block { kept, bytes, used: self.clock });
        true
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.bytes = 0;
    }

    fn remove(&mut self, key: &BlockKey) {
        if let Some(block) = self.blocks.remove(key) {
            self.bytes -= block.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(tokens: &[u32]) -> Vec<BlockKey> {
        BlockKey::root(&[0; 32], &[0; 32]).chain(tokens, 1)
    }

    #[test]
    fn the_longest_common_prefix_is_found() {
        let mut cache = PrefixCache::new(100);
        let first = chain(&[1, 2, 3]);
        assert_eq!(cache.begin(&first), 0);
        first.iter().for_each(|key| assert!(cache.insert(*key, 10, ())));
        assert_eq!(cache.begin(&chain(&[1, 2, 9])), 2);
        assert_eq!(cache.begin(&chain(&[2])), 0);
        assert_eq!(cache.begin(&chain(&[1, 2, 3, 4])), 3);
    }

    #[test]
    fn the_budget_holds_and_the_oldest_go_first() {
        let mut cache = PrefixCache::new(30);
        for tokens in [[1], [2], [3], [4]] {
            cache.begin(&chain(&tokens));
            cache.insert(chain(&tokens)[0], 10, ());
            assert!(cache.bytes() <= 30);
        }
        assert_eq!(cache.begin(&chain(&[1])), 0);
        assert_eq!(cache.begin(&chain(&[2])), 1);
    }

    #[test]
    fn a_prompt_never_evicts_its_own_beginning() {
        let mut cache = PrefixCache::new(30);
        let long = chain(&[1, 2, 3, 4, 5]);
        cache.begin(&long);
        long.iter().for_each(|key| {
            cache.insert(*key, 10, ());
        });
        assert_eq!(cache.begin(&long), 3);
        assert!(!cache.insert(chain(&[7])[0], 31, ()));
        assert_eq!(cache.begin(&long), 3);
    }

    #[test]
    fn replacing_a_block_counts_it_once() {
        let mut cache = PrefixCache::new(30);
        let key = chain(&[1])[0];
        cache.begin(&[key]);
        cache.insert(key, 10, 'a');
        cache.insert(key, 20, 'b');
        assert_eq!((cache.bytes(), cache.block(&key)), (20, Some(&'b')));
        cache.clear();
        assert_eq!((cache.bytes(), cache.begin(&[key])), (0, 0));
    }
}
