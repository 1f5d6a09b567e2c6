//! The state of the prefix store: pure data, time passed in.

use crate::block::{BlockBytes, block_bytes};
use shared::hexbytes::Hex;
use shared::keys::BlockKey;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

/// Where a block's bytes came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Computed here.
    Native,
    /// Received in a transfer.
    Bridged {
        /// Which one.
        transfer_id: Hex<16>,
    },
}

/// More bytes than the store can make room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{wanted_bytes} bytes are wanted, {available_bytes} of {budget_bytes} could be made free")]
pub struct OverBudget {
    /// Bytes asked for.
    pub wanted_bytes: u64,
    /// Bytes that are free or evictable.
    pub available_bytes: u64,
    /// The whole budget.
    pub budget_bytes: u64,
}

/// Blocks, references and reservations.
///
/// Invariants: stored + reserved bytes never exceed the budget; `idle` lists exactly the blocks without
/// references, least recently used first; a block's references are the leases that name it.
#[derive(Debug)]
pub(super) struct Table {
    budget_bytes: u64,
    stored_bytes: u64,
    reserved_bytes: u64,
    entries: HashMap<BlockKey, Entry>,
    idle: BTreeMap<u64, BlockKey>,
    clock: u64,
    leases: HashMap<u64, LeaseRecord>,
    next_lease: u64,
}

#[derive(Debug)]
struct Entry {
    block: Arc<BlockBytes>,
    bytes: u64,
    origin: Origin,
    references: u32,
    /// Last use, on the table's own clock; unique.
    used: u64,
}

#[derive(Debug)]
struct LeaseRecord {
    keys: Vec<BlockKey>,
    expires_at: Option<Instant>,
}

/// Occupancy of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStats {
    /// Bytes in blocks.
    pub stored_bytes: u64,
    /// Bytes promised to transfers.
    pub reserved_bytes: u64,
    /// The budget of both together.
    pub budget_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// References held by leases.
    pub references: u64,
}

impl Table {
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self {
            budget_bytes,
            stored_bytes: 0,
            reserved_bytes: 0,
            entries: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            leases: HashMap::new(),
            next_lease: 0,
        }
    }

    /// Leases the longest run of `keys` from the first on that is present; returns the lease and its length.
    pub(super) fn lease_prefix(&mut self, keys: &[BlockKey], expires_at: Option<Instant>) -> (u64, usize) {
        let present = keys.iter().take_while(|key| self.entries.contains_key(key)).count();
        (self.lease(keys[..present].to_vec(), expires_at), present)
    }

    /// Makes a lease never expire; `false` when it already has.
    pub(super) fn keep(&mut self, lease: u64) -> bool {
        self.leases.get_mut(&lease).is_some_and(|record| {
            record.expires_at = None;
            true
        })
    }

    /// The blocks of a lease in order; `None` when it has expired.
    pub(super) fn leased(&self, lease: u64) -> Option<Vec<(Arc<BlockBytes>, Origin)>> {
        let record = self.leases.get(&lease)?;
        let entries = record.keys.iter().map(|key| self.entries.get(key));
        entries.map(|e| e.map(|e| (e.block.clone(), e.origin))).collect()
    }

    /// Ends a lease; ending it twice, or after it expired, changes nothing.
    pub(super) fn release(&mut self, lease: u64) {
        let Some(record) = self.leases.remove(&lease) else { return };
        for key in record.keys {
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.references -= 1;
                if entry.references == 0 {
                    self.idle.insert(entry.used, key);
                }
            }
        }
    }

    /// Ends every lease whose time has come.
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        let due = |record: &LeaseRecord| record.expires_at.is_some_and(|at| at <= now);
        let ids: Vec<u64> = self.leases.iter().filter(|(_, r)| due(r)).map(|(&id, _)| id).collect();
        ids.iter().for_each(|&id| self.release(id));
        ids.len()
    }

    /// Promises `bytes` to a transfer, evicting idle blocks as needed.
    pub(super) fn reserve(&mut self, bytes: u64) -> Result<(), OverBudget> {
        self.make_room(bytes)?;
        self.reserved_bytes += bytes;
        Ok(())
    }

    /// Takes a promise back.
    pub(super) fn unreserve(&mut self, bytes: u64) {
        self.reserved_bytes -= bytes.min(self.reserved_bytes);
    }

    /// Stores one block unless its key is there or nothing idle makes room for it. Returns whether the key
    /// is present afterwards.
    pub(super) fn insert(&mut self, key: BlockKey, block: Arc<BlockBytes>, origin: Origin) -> bool {
        if self.entries.contains_key(&key) {
            return true;
        }
        let bytes = block_bytes(&block);
        if self.make_room(bytes).is_err() {
            return false;
        }
        self.put(key, block, bytes, origin);
        true
    }

    /// Stores the block that follows `before` in its chain. Its predecessors are not evicted for it, and it is
    /// evicted before them. Returns whether its key is present afterwards.
    pub(super) fn insert_after(
        &mut self,
        before: &[BlockKey],
        key: BlockKey,
        block: Arc<BlockBytes>,
        origin: Origin,
    ) -> bool {
        let (predecessors, _) = self.lease_prefix(before, None);
        let present = self.insert(key, block, origin);
        self.release(predecessors);
        // The new block was marked as used last; a lease of the whole chain puts that right.
        let (chain, _) = self.lease_prefix(&[before, &[key]].concat(), None);
        self.release(chain);
        present
    }

    /// Turns reserved bytes into blocks, all at once, and leases them. A key that is already present gets
    /// the new bytes: the lease stands for what arrived, and either copy is valid.
    ///
    /// The blocks' bytes must have been reserved.
    pub(super) fn commit(&mut self, items: Vec<(BlockKey, Arc<BlockBytes>)>, origin: Origin) -> u64 {
        let keys: Vec<BlockKey> = items.iter().map(|(key, _)| *key).collect();
        for (key, block) in items {
            let bytes = block_bytes(&block);
            self.unreserve(bytes);
            match self.entries.get_mut(&key) {
                Some(entry) => {
                    entry.block = block;
                    entry.origin = origin;
                }
                None => self.put(key, block, bytes, origin),
            }
        }
        self.lease(keys, None)
    }

    pub(super) fn contains(&self, key: &BlockKey) -> bool {
        self.entries.contains_key(key)
    }

    pub(super) fn stats(&self) -> StoreStats {
        StoreStats {
            stored_bytes: self.stored_bytes,
            reserved_bytes: self.reserved_bytes,
            budget_bytes: self.budget_bytes,
            blocks: self.entries.len() as u64,
            references: self.leases.values().map(|record| record.keys.len() as u64).sum(),
        }
    }

    /// Takes references on present keys. The first block is marked as used last, so that eviction eats a
    /// chain from its end: a block without its predecessors can never be found again.
    fn lease(&mut self, keys: Vec<BlockKey>, expires_at: Option<Instant>) -> u64 {
        for key in keys.iter().rev() {
            if let Some(entry) = self.entries.get_mut(key) {
                self.idle.remove(&entry.used);
                self.clock += 1;
                entry.used = self.clock;
                entry.references += 1;
            }
        }
        let id = self.next_lease;
        self.next_lease += 1;
        self.leases.insert(id, LeaseRecord { keys, expires_at });
        id
    }

    fn put(&mut self, key: BlockKey, block: Arc<BlockBytes>, bytes: u64, origin: Origin) {
        self.clock += 1;
        self.stored_bytes += bytes;
        self.idle.insert(self.clock, key);
        self.entries.insert(key, Entry { block, bytes, origin, references: 0, used: self.clock });
    }

    fn free_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.stored_bytes).saturating_sub(self.reserved_bytes)
    }

    fn make_room(&mut self, bytes: u64) -> Result<(), OverBudget> {
        let evictable: u64 =
            self.idle.values().filter_map(|key| self.entries.get(key)).map(|e| e.bytes).sum();
        let free = self.free_bytes();
        if bytes > free + evictable {
            return Err(OverBudget {
                wanted_bytes: bytes,
                available_bytes: free + evictable,
                budget_bytes: self.budget_bytes,
            });
        }
        while self.free_bytes() < bytes {
            let Some((_, key)) = self.idle.pop_first() else { break };
            if let Some(entry) = self.entries.remove(&key) {
                self.stored_bytes -= entry.bytes;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
