//! Pinned host memory in equal slots, one for each piece on its way to the network.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::result;
use parking_lot::{Condvar, Mutex};

use super::device::{Device, device_error};
use crate::ops::OpsError;

/// Slots are cut at multiples of this.
const ALIGN_BYTES: usize = 4096;

/// A bounded pool of slots. Slots come back when their [`Slot`] is dropped, wherever that happens.
pub(super) struct PinnedPool {
    region: Region,
    cut: Mutex<Cut>,
    changed: Condvar,
}

/// How the region is cut up now.
#[derive(Debug, Default)]
struct Cut {
    slot_bytes: usize,
    free: Vec<usize>,
    taken: usize,
}

struct Region {
    host: NonNull<u8>,
    bytes: usize,
    device: Arc<Device>,
}

// SAFETY: the memory is plain bytes; slots are disjoint and each is held by one owner at a time.
unsafe impl Send for Region {}
// SAFETY: as above; the pool itself never reads or writes the bytes.
unsafe impl Sync for Region {}

/// One slot, for one piece.
pub(super) struct Slot {
    pool: Arc<PinnedPool>,
    offset: usize,
}

impl PinnedPool {
    pub(super) fn new(device: &Arc<Device>, bytes: usize) -> Result<Arc<Self>, OpsError> {
        let bytes = bytes.next_multiple_of(ALIGN_BYTES);
        // SAFETY: a fresh allocation; freed in `Region::drop`.
        let host = unsafe { result::malloc_host(bytes, 0) }.map_err(device_error)?;
        let host = NonNull::new(host.cast::<u8>())
            .ok_or_else(|| OpsError::OutOfMemory { what: "pinned host memory".into(), bytes })?;
        let region = Region { host, bytes, device: device.clone() };
        Ok(Arc::new(Self { region, cut: Mutex::default(), changed: Condvar::new() }))
    }

    /// Takes a slot of at least `bytes`; waits while all are out. Larger pieces than before recut the region once
    /// every slot is back.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Result<Slot, OpsError> {
        if bytes > self.region.bytes {
            return Err(OpsError::Unsupported(format!(
                "a piece of {bytes} bytes does not fit {} bytes of pinned memory",
                self.region.bytes
            )));
        }
        let mut cut = self.cut.lock();
        loop {
            if bytes > cut.slot_bytes && cut.taken == 0 {
                *cut = Cut::new(self.region.bytes, bytes);
            }
            if bytes <= cut.slot_bytes
                && let Some(offset) = cut.free.pop()
            {
                cut.taken += 1;
                return Ok(Slot { pool: self.clone(), offset });
            }
            self.changed.wait(&mut cut);
        }
    }
}

impl Cut {
    fn new(region_bytes: usize, piece_bytes: usize) -> Self {
        let slot_bytes = piece_bytes.next_multiple_of(ALIGN_BYTES).min(region_bytes);
        let free = (0..region_bytes / slot_bytes).rev().map(|i| i * slot_bytes).collect();
        Self { slot_bytes, free, taken: 0 }
    }
}

impl Slot {
    /// Host address.
    pub(super) fn host(&self) -> *mut c_void {
        // SAFETY: the offset lies within the region.
        unsafe { self.pool.region.host.as_ptr().add(self.offset) }.cast()
    }

    /// The first `bytes` of the slot.
    pub(super) fn bytes(&self, bytes: usize) -> &[u8] {
        let bytes = bytes.min(self.pool.region.bytes - self.offset);
        // SAFETY: within the region, written by a copy that has completed before a slot is handed on, and not written
        // again while this slot is held.
        unsafe { std::slice::from_raw_parts(self.host().cast::<u8>(), bytes) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut cut = self.pool.cut.lock();
        cut.free.push(self.offset);
        cut.taken -= 1;
        self.pool.changed.notify_all();
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let _ = self.device.context.bind_to_thread();
        // SAFETY: made by `malloc_host`, freed once; no slot is out, since slots hold the pool.
        let _ = unsafe { result::free_host(self.host.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::Cut;

    #[test]
    fn a_region_is_cut_into_whole_aligned_slots() {
        let cut = Cut::new(1 << 20, 200_000);
        assert_eq!(cut.slot_bytes, 200_704);
        assert_eq!(cut.free.len(), 5);
        assert_eq!(cut.free.last(), Some(&0));
        assert_eq!(Cut::new(1 << 20, 1 << 20).free, [0]);
    }
}
