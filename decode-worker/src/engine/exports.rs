//! Finished blocks of a sequence on their way to the store.

use super::job::Library;
use super::{Engine, EngineError};
use shared::keys::BlockKey;
use std::sync::Arc;

/// How far a sequence's blocks are in the store. A clone goes on from there for a fork.
#[derive(Debug, Clone, Default)]
pub(super) struct Exports {
    /// Keys of the blocks looked at.
    keys: Vec<BlockKey>,
    /// The store has no room; later blocks would be unreachable anyway.
    ended: bool,
}

impl Exports {
    /// Whether a full block of `cached` tokens was not looked at yet.
    pub(super) fn has_next(&self, cached: usize, library: &Library) -> bool {
        !self.ended && (self.keys.len() + 1) * library.block_tokens <= cached
    }

    /// Brings the next full block into the store, skipping those that are there. `tokens` are those of the sequence.
    pub(super) fn bring_next<E: Engine>(
        &mut self,
        engine: &E,
        sequence: &E::Sequence,
        tokens: &[u32],
        library: &Library,
    ) -> Result<(), EngineError> {
        while self.has_next(engine.len(sequence), library) {
            let start = self.keys.len() * library.block_tokens;
            let end = start + library.block_tokens;
            let last = self.keys.last().unwrap_or(&library.root);
            let key = last.next(&tokens[start..end]);
            let was_there = library.store.contains(&key);
            if !was_there {
                let block = Arc::new(engine.export(sequence, start, end)?);
                self.ended = !library.store.insert_after(&self.keys, key, block);
            }
            self.keys.push(key);
            if !was_there {
                break;
            }
        }
        Ok(())
    }
}
