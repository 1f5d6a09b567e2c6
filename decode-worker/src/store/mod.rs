//! The prefix store: blocks of finished cache, by the tokens they hold.
//!
//! A byte budget covers stored blocks and bytes promised to transfers together. Blocks that somebody has
//! leased are never evicted; the others leave in order of last use, chains from their end.

mod table;

pub use table::{Origin, OverBudget, StoreStats};

use crate::block::BlockBytes;
use parking_lot::Mutex;
use shared::keys::BlockKey;
use std::sync::Arc;
use std::time::{Duration, Instant};
use table::Table;

/// A shared handle to the store.
#[derive(Debug, Clone)]
pub struct PrefixStore {
    table: Arc<Mutex<Table>>,
}

impl PrefixStore {
    /// An empty store.
    #[must_use]
    pub fn new(budget_bytes: u64) -> Self {
        Self { table: Arc::new(Mutex::new(Table::new(budget_bytes))) }
    }

    /// Leases the longest present run of `keys` from the first on, for `lifetime` unless it is kept.
    #[must_use]
    pub fn lease_prefix(&self, keys: &[BlockKey], lifetime: Duration) -> Lease {
        let (id, blocks) = self.table.lock().lease_prefix(keys, Some(Instant::now() + lifetime));
        Lease { store: self.clone(), id, blocks }
    }

    /// Promises `bytes` to a transfer.
    ///
    /// # Errors
    /// [`OverBudget`] when evicting everything idle would not make room; nothing is evicted then.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, OverBudget> {
        self.table.lock().reserve(bytes)?;
        Ok(Reservation { store: self.clone(), bytes })
    }

    /// Stores a block computed here, if there is room without its predecessors `before` in the chain. Returns
    /// whether its key is present afterwards.
    pub fn insert_after(&self, before: &[BlockKey], key: BlockKey, block: Arc<BlockBytes>) -> bool {
        self.table.lock().insert_after(before, key, block, Origin::Native)
    }

    /// Whether a block is present.
    #[must_use]
    pub fn contains(&self, key: &BlockKey) -> bool {
        self.table.lock().contains(key)
    }

    /// Ends leases that were neither kept nor released in time; returns how many.
    pub fn expire(&self, now: Instant) -> usize {
        self.table.lock().expire(now)
    }

    /// Occupancy.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        self.table.lock().stats()
    }
}

/// References on a run of blocks, given back on drop.
#[derive(Debug)]
pub struct Lease {
    store: PrefixStore,
    id: u64,
    blocks: usize,
}

impl Lease {
    /// Number of blocks.
    #[must_use]
    pub fn n_blocks(&self) -> usize {
        self.blocks
    }

    /// Makes the lease last until it is dropped; `false` when it has already expired.
    #[must_use]
    pub fn keep(&self) -> bool {
        self.store.table.lock().keep(self.id)
    }

    /// The blocks in order with their origins; `None` when the lease has expired.
    #[must_use]
    pub fn blocks(&self) -> Option<Vec<(Arc<BlockBytes>, Origin)>> {
        self.store.table.lock().leased(self.id)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.store.table.lock().release(self.id);
    }
}

/// Bytes promised to a transfer, given back on drop.
#[derive(Debug)]
pub struct Reservation {
    store: PrefixStore,
    bytes: u64,
}

impl Reservation {
    /// Bytes still promised.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives back what exceeds `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        let extra = self.bytes.saturating_sub(bytes);
        self.store.table.lock().unreserve(extra);
        self.bytes -= extra;
    }

    /// Makes `items` visible, all at once, out of this reservation, and leases them. What they do not use
    /// stays reserved.
    #[must_use]
    pub fn commit(&mut self, items: Vec<(BlockKey, Arc<BlockBytes>)>, origin: Origin) -> Lease {
        let used: u64 = items.iter().map(|(_, block)| crate::block::block_bytes(block)).sum();
        let blocks = items.len();
        let id = self.store.table.lock().commit(items, origin);
        self.bytes -= used.min(self.bytes);
        Lease { store: self.store.clone(), id, blocks }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.store.table.lock().unreserve(self.bytes);
    }
}
