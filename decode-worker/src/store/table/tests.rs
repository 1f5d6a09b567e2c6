use super::*;
use crate::block::LayerBytes;
use bytes::Bytes;
use proptest::prelude::*;
use std::time::Duration;

fn key(n: u8) -> BlockKey {
    BlockKey([n; 32])
}

fn block(bytes: usize) -> Arc<BlockBytes> {
    Arc::new(BlockBytes { tokens: 1, layers: vec![LayerBytes { parts: vec![Bytes::from(vec![0; bytes])] }] })
}

impl Table {
    fn check(&self) {
        assert!(self.stored_bytes + self.reserved_bytes <= self.budget_bytes, "over budget");
        assert_eq!(self.stored_bytes, self.entries.values().map(|e| e.bytes).sum::<u64>());
        let mut references: HashMap<BlockKey, u32> = HashMap::new();
        for key in self.leases.values().flat_map(|record| &record.keys) {
            *references.entry(*key).or_default() += 1;
        }
        for (key, entry) in &self.entries {
            assert_eq!(entry.references, references.remove(key).unwrap_or(0));
            assert_eq!(self.idle.get(&entry.used) == Some(key), entry.references == 0);
        }
        assert!(references.is_empty(), "a leased block was evicted");
        assert_eq!(self.idle.len(), self.entries.values().filter(|e| e.references == 0).count());
    }
}

#[test]
fn the_block_used_longest_ago_leaves_first() {
    let mut table = Table::new(30);
    for n in 0..3 {
        assert!(table.insert(key(n), block(10), Origin::Native));
    }
    let (lease, n) = table.lease_prefix(&[key(0)], None);
    assert_eq!(n, 1);
    table.release(lease);
    assert!(table.insert(key(3), block(10), Origin::Native));
    assert!(table.contains(&key(0)) && !table.contains(&key(1)) && table.contains(&key(2)));
}

#[test]
fn chains_are_eaten_from_their_end() {
    let mut table = Table::new(40);
    for n in 0..4 {
        table.insert(key(n), block(10), Origin::Native);
    }
    let (lease, n) = table.lease_prefix(&[key(0), key(1), key(2), key(3)], None);
    assert_eq!(n, 4);
    table.release(lease);
    table.reserve(20).unwrap();
    assert!(table.contains(&key(0)) && table.contains(&key(1)));
    assert!(!table.contains(&key(2)) && !table.contains(&key(3)));
}

#[test]
fn a_chain_that_grows_in_a_full_store_keeps_its_head() {
    let mut table = Table::new(40);
    for n in 10..14 {
        table.insert(key(n), block(10), Origin::Native);
    }
    let chain: Vec<_> = (0..6).map(key).collect();
    let grown = (0..6).map(|n| table.insert_after(&chain[..n], chain[n], block(10), Origin::Native));
    // The others make room for it, its own head does not.
    assert_eq!(grown.collect::<Vec<_>>(), [true, true, true, true, false, false]);
    table.check();
    for left in [3, 2, 1] {
        table.insert(key(20 + left as u8), block(10), Origin::Native);
        let present: Vec<_> = chain.iter().map(|key| table.contains(key)).collect();
        assert_eq!(present, (0..6).map(|n| n < left).collect::<Vec<_>>());
    }
    table.check();
}

#[test]
fn pinned_blocks_stay_and_only_the_oversized_request_is_refused() {
    let mut table = Table::new(30);
    table.insert(key(0), block(20), Origin::Native);
    let (lease, _) = table.lease_prefix(&[key(0)], None);
    assert_eq!(
        table.reserve(11),
        Err(OverBudget { wanted_bytes: 11, available_bytes: 10, budget_bytes: 30 })
    );
    table.reserve(10).unwrap();
    assert!(!table.insert(key(1), block(1), Origin::Native));
    table.release(lease);
    table.reserve(20).unwrap();
    assert_eq!(table.stats(), StoreStats { reserved_bytes: 30, budget_bytes: 30, ..StoreStats::default() });
}

#[test]
fn a_refused_reservation_evicts_nothing() {
    let mut table = Table::new(30);
    table.insert(key(0), block(10), Origin::Native);
    assert!(table.reserve(31).is_err());
    assert!(table.contains(&key(0)));
}

#[test]
fn leases_expire_unless_kept() {
    let (mut table, now) = (Table::new(30), Instant::now());
    table.insert(key(0), block(10), Origin::Native);
    let (kept, _) = table.lease_prefix(&[key(0)], Some(now));
    let (lost, _) = table.lease_prefix(&[key(0)], Some(now));
    assert!(table.keep(kept));
    assert_eq!(table.expire(now + Duration::from_secs(1)), 1);
    assert!(table.leased(lost).is_none() && !table.keep(lost));
    assert_eq!(table.leased(kept).unwrap().len(), 1);
    table.release(lost);
    assert_eq!(table.stats().references, 1);
}

#[test]
fn a_commit_is_leased_and_replaces_what_was_there() {
    let mut table = Table::new(30);
    table.insert(key(0), block(10), Origin::Native);
    let bridged = Origin::Bridged { transfer_id: Hex([1; 16]) };
    table.reserve(20).unwrap();
    let lease = table.commit(vec![(key(0), block(10)), (key(1), block(10))], bridged);
    assert!(table.leased(lease).unwrap().iter().all(|(_, origin)| *origin == bridged));
    let stats = table.stats();
    assert_eq!((stats.stored_bytes, stats.reserved_bytes, stats.blocks, stats.references), (20, 0, 2, 2));
    table.check();
}

#[derive(Debug, Clone)]
enum Step {
    Insert(u8, usize),
    Lease(u8, u8, bool),
    Release(usize),
    Keep(usize),
    Expire,
    Reserve(u64),
    Commit(u8, usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0u8..12, 1usize..12).prop_map(|(k, b)| Step::Insert(k, b)),
        (0u8..12, 0u8..6, any::<bool>()).prop_map(|(k, n, e)| Step::Lease(k, n, e)),
        any::<usize>().prop_map(Step::Release),
        any::<usize>().prop_map(Step::Keep),
        Just(Step::Expire),
        (1u64..30).prop_map(Step::Reserve),
        (0u8..12, 1usize..4).prop_map(|(k, n)| Step::Commit(k, n)),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #[test]
    fn invariants_hold_whatever_happens(steps in steps()) {
        let (mut table, now) = (Table::new(64), Instant::now());
        let (mut leases, mut reserved) = (Vec::new(), 0u64);
        for step in steps {
            match step {
                Step::Insert(k, bytes) => {
                    let present = table.insert(key(k), block(bytes), Origin::Native);
                    prop_assert_eq!(present, table.contains(&key(k)));
                }
                Step::Lease(k, n, expires) => {
                    let keys: Vec<_> = (k..k + n).map(key).collect();
                    let (lease, found) = table.lease_prefix(&keys, expires.then_some(now));
                    prop_assert_eq!(table.leased(lease).unwrap().len(), found);
                    leases.push(lease);
                }
                Step::Release(i) if !leases.is_empty() => {
                    let lease = leases.swap_remove(i % leases.len());
                    table.release(lease);
                    table.release(lease);
                }
                Step::Keep(i) if !leases.is_empty() => {
                    table.keep(leases[i % leases.len()]);
                }
                Step::Expire => {
                    table.expire(now);
                }
                Step::Reserve(bytes) => reserved += table.reserve(bytes).map_or(0, |()| bytes),
                Step::Commit(k, n) if reserved >= 2 * n as u64 => {
                    reserved -= 2 * n as u64;
                    // Blocks of one key have one size, as in use; keys above 100 are for commits only.
                    let items = (0..n).map(|i| (key(100 + k + i as u8), block(2))).collect();
                    leases.push(table.commit(items, Origin::Native));
                }
                Step::Release(_) | Step::Keep(_) | Step::Commit(..) => {}
            }
            table.check();
            prop_assert_eq!(table.stats().reserved_bytes, reserved);
        }
        leases.drain(..).for_each(|lease| table.release(lease));
        table.check();
        prop_assert_eq!(table.stats().references, 0);
    }
}
