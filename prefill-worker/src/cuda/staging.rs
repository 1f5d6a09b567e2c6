//! Device memory for laid-out pieces that wait to be copied: a ring, taken in order and given back in about the same.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::device::Device;
use super::memory::{DeviceMemory, Ledger};
use crate::ops::OpsError;

/// Regions start at multiples of this.
const ALIGN_BYTES: usize = 256;

/// The ring.
pub(super) struct StagingRing {
    memory: DeviceMemory,
    regions: Mutex<Regions>,
    changed: Condvar,
}

/// A region, given back when dropped.
pub(super) struct Staged {
    ring: Arc<StagingRing>,
    offset: usize,
    id: u64,
}

/// What is taken, oldest first.
#[derive(Debug, Default)]
struct Regions {
    capacity: usize,
    taken: VecDeque<(u64, usize, bool)>,
    head: usize,
    next_id: u64,
}

impl StagingRing {
    pub(super) fn new(
        device: &Arc<Device>,
        ledger: &Arc<Ledger>,
        bytes: usize,
    ) -> Result<Arc<Self>, OpsError> {
        let memory = DeviceMemory::new(device, ledger, "staging of pieces", bytes)?;
        let regions = Regions { capacity: memory.bytes(), ..Regions::default() };
        Ok(Arc::new(Self { memory, regions: Mutex::new(regions), changed: Condvar::new() }))
    }

    /// Largest region that leaves room for a second one.
    pub(super) fn portion_bytes(&self) -> usize {
        self.memory.bytes() / 2
    }

    /// Takes a region; waits while there is no room.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Result<Staged, OpsError> {
        let bytes = bytes.next_multiple_of(ALIGN_BYTES);
        if bytes > self.memory.bytes() {
            return Err(OpsError::Unsupported(format!(
                "{bytes} bytes exceed {} of staging",
                self.memory.bytes()
            )));
        }
        let mut regions = self.regions.lock();
        loop {
            if let Some((id, offset)) = regions.take(bytes) {
                return Ok(Staged { ring: self.clone(), offset, id });
            }
            self.changed.wait(&mut regions);
        }
    }
}

impl Staged {
    /// Device address of the region.
    pub(super) fn address(&self) -> u64 {
        self.ring.memory.address() + self.offset as u64
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.ring.regions.lock().give_back(self.id);
        self.ring.changed.notify_all();
    }
}

impl Regions {
    fn take(&mut self, bytes: usize) -> Option<(u64, usize)> {
        let offset = match self.taken.front() {
            None => 0,
            Some(&(_, tail, _)) if self.head > tail => {
                if self.capacity - self.head >= bytes {
                    self.head
                } else if tail >= bytes {
                    0
                } else {
                    return None;
                }
            }
            Some(&(_, tail, _)) if tail - self.head >= bytes => self.head,
            Some(_) => return None,
        };
        self.head = offset + bytes;
        self.next_id += 1;
        self.taken.push_back((self.next_id, offset, false));
        Some((self.next_id, offset))
    }

    fn give_back(&mut self, id: u64) {
        if let Some(region) = self.taken.iter_mut().find(|region| region.0 == id) {
            region.2 = true;
        }
        while self.taken.front().is_some_and(|region| region.2) {
            self.taken.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Regions;
    use proptest::prelude::*;

    #[test]
    fn a_full_ring_refuses_and_wraps_when_the_oldest_leaves() {
        let mut ring = Regions { capacity: 100, ..Regions::default() };
        let (a, first) = ring.take(60).unwrap();
        let (b, second) = ring.take(40).unwrap();
        assert_eq!((first, second, ring.take(1)), (0, 60, None));
        ring.give_back(b);
        assert_eq!(ring.take(1), None);
        ring.give_back(a);
        assert_eq!(ring.take(100).unwrap().1, 0);
    }

    proptest! {
        #[test]
        fn regions_never_overlap(steps in proptest::collection::vec((1usize..60, any::<bool>()), 1..200)) {
            let mut ring = Regions { capacity: 100, ..Regions::default() };
            let mut held: Vec<(u64, usize, usize)> = Vec::new();
            for (bytes, free_first) in steps {
                if free_first && !held.is_empty() {
                    ring.give_back(held.remove(0).0);
                }
                if let Some((id, offset)) = ring.take(bytes) {
                    prop_assert!(offset + bytes <= 100);
                    for (_, start, length) in &held {
                        prop_assert!(offset + bytes <= *start || *start + length <= offset);
                    }
                    held.push((id, offset, bytes));
                }
            }
        }
    }
}
