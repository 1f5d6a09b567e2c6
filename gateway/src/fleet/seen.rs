//! Which prompt blocks a worker has had in its hands for this gateway, and so is likely to hold in its prefix cache or
//! store.

use parking_lot::Mutex;
use shared::keys::BlockKey;
use std::collections::{HashSet, VecDeque};

/// Most blocks remembered; the oldest give way. About 4 MB.
const CAPACITY: usize = 32_768;

/// Keys of blocks that one connection's worker is likely to hold.
#[derive(Debug, Default)]
pub(crate) struct SeenBlocks(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    keys: HashSet<BlockKey>,
    order: VecDeque<BlockKey>,
}

impl SeenBlocks {
    /// Remembers the blocks of a prompt.
    pub(crate) fn insert(&self, keys: &[BlockKey]) {
        let mut kept = self.0.lock();
        for key in keys {
            if kept.keys.insert(*key) {
                kept.order.push_back(*key);
            }
            if kept.order.len() > CAPACITY
                && let Some(oldest) = kept.order.pop_front()
            {
                kept.keys.remove(&oldest);
            }
        }
    }

    /// The worker has said that it does not hold these.
    pub(crate) fn forget(&self, keys: &[BlockKey]) {
        let mut kept = self.0.lock();
        let before = kept.keys.len();
        for key in keys {
            kept.keys.remove(key);
        }
        if kept.keys.len() < before {
            let Kept { keys, order } = &mut *kept;
            order.retain(|key| keys.contains(key));
        }
    }

    /// How many leading blocks of a prompt are likely to be there.
    pub(crate) fn leading(&self, keys: &[BlockKey]) -> usize {
        let kept = self.0.lock();
        keys.iter().take_while(|k| kept.keys.contains(k)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unbroken_start_counts_and_memory_is_bounded() {
        let root = BlockKey::root(&[0; 32], &[0; 32]);
        let tokens: Vec<u32> = (0..CAPACITY as u32 + 5).collect();
        let keys = root.chain(&tokens, 1);
        let seen = SeenBlocks::default();
        seen.insert(&keys[..3]);
        assert_eq!((seen.leading(&keys), seen.leading(&keys[1..])), (3, 2));
        seen.insert(&keys);
        assert_eq!((seen.leading(&keys), seen.leading(&keys[5..])), (0, CAPACITY));
        seen.forget(&keys[7..]);
        assert_eq!(seen.leading(&keys[5..]), 2);
        assert_eq!(seen.0.lock().order.len(), 2);
    }
}
