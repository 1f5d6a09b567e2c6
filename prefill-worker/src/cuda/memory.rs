//! Device memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaSlice, DevicePtr, result};

use super::device::{Device, device_error};
use crate::ops::OpsError;

/// A piece of device memory, freed in stream order when dropped.
pub(super) struct DeviceMemory {
    slice: CudaSlice<u8>,
    address: u64,
    device: Arc<Device>,
    ledger: Arc<Ledger>,
}

/// Bytes taken now and at most, for reports.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Ledger {
    /// Bytes taken now.
    pub(super) fn now_bytes(&self) -> usize {
        self.now.load(Ordering::Relaxed)
    }

    /// Most bytes taken at once since the last [`Ledger::reset_peak`].
    pub(super) fn peak_bytes(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    /// Starts a new peak from what is taken now.
    pub(super) fn reset_peak(&self) {
        self.peak.store(self.now_bytes(), Ordering::Relaxed);
    }

    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }
}

impl DeviceMemory {
    /// Allocates without writing. When memory is short, what the driver keeps for reuse is given back first.
    ///
    /// # Errors
    /// [`OpsError::OutOfMemory`]; the device stays usable.
    pub(super) fn new(
        device: &Arc<Device>,
        ledger: &Arc<Ledger>,
        what: &str,
        bytes: usize,
    ) -> Result<Self, OpsError> {
        let bytes = bytes.max(16);
        let attempt = || {
            // SAFETY: the memory is uninitialized; every user writes before it reads.
            unsafe { device.compute.alloc::<u8>(bytes) }
        };
        let is_full = |e: &cudarc::driver::DriverError| e.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let slice = match attempt() {
            Err(e) if is_full(&e) => {
                device.trim()?;
                attempt()
            }
            other => other,
        }
        .map_err(|e| {
            if is_full(&e) { OpsError::OutOfMemory { what: what.to_owned(), bytes } } else { device_error(e) }
        })?;
        let address = slice.device_ptr(&device.compute).0;
        ledger.add(bytes);
        Ok(Self { slice, address, device: device.clone(), ledger: ledger.clone() })
    }

    /// Device address of the first byte.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.slice.len()
    }

    /// Copies host bytes to `offset`, in order with computing. The source may be reused when this returns.
    pub(super) fn write(&self, offset: usize, source: &[u8]) -> Result<(), OpsError> {
        self.check(offset, source.len())?;
        self.device.context.bind_to_thread().map_err(device_error)?;
        // SAFETY: the range was checked; pageable sources are staged by the driver before it returns.
        unsafe {
            result::memcpy_htod_async(self.address + offset as u64, source, self.device.compute.cu_stream())
        }
        .map_err(device_error)
    }

    /// Copies `destination.len()` bytes from `offset` to the host and waits.
    pub(super) fn read(&self, offset: usize, destination: &mut [u8]) -> Result<(), OpsError> {
        self.check(offset, destination.len())?;
        self.device.context.bind_to_thread().map_err(device_error)?;
        // SAFETY: the range was checked, and the wait below keeps the destination borrowed until it is written.
        unsafe {
            result::memcpy_dtoh_async(
                destination,
                self.address + offset as u64,
                self.device.compute.cu_stream(),
            )
        }
        .map_err(device_error)?;
        self.device.compute.synchronize().map_err(device_error)
    }

    /// Sets every byte, in order with computing.
    pub(super) fn fill(&self, byte: u8) -> Result<(), OpsError> {
        // SAFETY: the range is the whole allocation.
        unsafe { result::memset_d8_async(self.address, byte, self.bytes(), self.device.compute.cu_stream()) }
            .map_err(device_error)
    }

    fn check(&self, offset: usize, length: usize) -> Result<(), OpsError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.bytes() => Ok(()),
            _ => Err(OpsError::Shape(format!("{length} bytes at {offset} of {}", self.bytes()))),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.ledger.now.fetch_sub(self.slice.len(), Ordering::Relaxed);
    }
}
