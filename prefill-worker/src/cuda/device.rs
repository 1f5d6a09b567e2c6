//! One GPU: context, streams, kernels, and launches.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::sys::CUfunction_attribute_enum as FunctionAttribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, result};
use cudarc::nvrtc::Ptx;

use super::CudaOptions;
use super::cubin_cache::CubinCache;
use super::sources::Unit;
use crate::ops::OpsError;

/// What the device says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Product name.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Architecture that kernels are compiled for, `sm_90a`.
    pub architecture: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory one block may use, in bytes.
    pub shared_bytes_per_block: usize,
    /// Device memory, in bytes.
    pub memory_bytes: usize,
}

/// A device with its two streams: one computes, one copies out.
pub(super) struct Device {
    pub(super) context: Arc<CudaContext>,
    /// All computing, in order.
    pub(super) compute: Arc<CudaStream>,
    /// Casts and copies to the host, ordered after computing by events.
    pub(super) egress: Arc<CudaStream>,
    pub(super) facts: DeviceFacts,
    cubins: CubinCache,
}

impl Device {
    pub(super) fn open(options: &CudaOptions) -> Result<Arc<Self>, OpsError> {
        super::library::preload_all(&options.library_dirs)?;
        let count = CudaContext::device_count().map_err(|e| unusable(&e))?;
        if usize::try_from(count).unwrap_or(0) <= options.device {
            return Err(OpsError::Unsupported(format!(
                "no GPU number {}: the driver sees {count}",
                options.device
            )));
        }
        let context = CudaContext::new(options.device).map_err(|e| unusable(&e))?;
        // SAFETY: this backend orders its streams with its own events and shares no slice between streams otherwise.
        unsafe { context.disable_event_tracking() };
        let facts = facts(&context)?;
        if facts.capability < (8, 0) {
            return Err(OpsError::Unsupported(format!(
                "{} has compute capability {}.{}; 8.0 is the least supported",
                facts.name, facts.capability.0, facts.capability.1
            )));
        }
        keep_freed_memory(&context)?;
        let compute = context.new_stream().map_err(device_error)?;
        let egress = context.new_stream().map_err(device_error)?;
        let cubins = CubinCache::new(options.kernel_cache.clone(), facts.architecture.clone())?;
        Ok(Arc::new(Self { context, compute, egress, facts, cubins }))
    }

    /// Compiles or loads a unit and returns the named kernels, allowed `shared_bytes` of dynamic shared memory.
    pub(super) fn kernels(
        &self,
        unit: &Unit,
        names: &[&str],
        shared_bytes: usize,
    ) -> Result<Vec<CudaFunction>, OpsError> {
        let module =
            self.context.load_module(Ptx::from_binary(self.cubins.load(unit)?)).map_err(device_error)?;
        names
            .iter()
            .map(|name| {
                let function = module.load_function(name).map_err(device_error)?;
                if shared_bytes > 48 << 10 {
                    let bytes = i32::try_from(shared_bytes).map_err(|e| OpsError::Shape(e.to_string()))?;
                    function
                        .set_attribute(
                            FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                            bytes,
                        )
                        .map_err(device_error)?;
                }
                Ok(function)
            })
            .collect()
    }

    /// Gives memory that the driver keeps for reuse back to it, after all work is done.
    pub(super) fn trim(&self) -> Result<(), OpsError> {
        self.compute.synchronize().map_err(device_error)?;
        self.egress.synchronize().map_err(device_error)?;
        if self.context.has_async_alloc() {
            // SAFETY: the device handle is valid, and so is its default pool.
            unsafe {
                let pool =
                    result::device::get_default_mem_pool(self.context.cu_device()).map_err(device_error)?;
                result::mem_pool::trim_to(pool, 0).map_err(device_error)?;
            }
        }
        Ok(())
    }
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) grid: (u32, u32, u32),
    pub(super) block: u32,
    pub(super) shared_bytes: u32,
}

impl Shape {
    /// One block per row.
    pub(super) fn rows(rows: usize, block: u32) -> Self {
        Self { grid: (to_u32(rows), 1, 1), block, shared_bytes: 0 }
    }

    /// Enough blocks of 256 for `items` threads, bounded; kernels loop over the rest.
    pub(super) fn items(items: usize) -> Self {
        Self { grid: (to_u32(items.div_ceil(256).clamp(1, 1 << 16)), 1, 1), block: 256, shared_bytes: 0 }
    }
}

/// Pointers to kernel arguments, in order. Each argument must have exactly the type the kernel declares.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => { &mut [$(std::ptr::from_ref(&$value).cast_mut().cast::<std::ffi::c_void>()),*] };
}
pub(super) use arguments;

/// Launches a kernel on a stream.
///
/// # Safety
/// `arguments` points to values of exactly the kernel's parameter types, and every device address among them is valid
/// for what the kernel reads and writes until the stream has run it.
pub(super) unsafe fn launch(
    stream: &CudaStream,
    function: &CudaFunction,
    shape: Shape,
    arguments: &mut [*mut c_void],
) -> Result<(), OpsError> {
    // SAFETY: passed on from the caller; the function belongs to a module that it keeps loaded.
    unsafe {
        result::launch_kernel(
            function.cu_function(),
            shape.grid,
            (shape.block, 1, 1),
            shape.shared_bytes,
            stream.cu_stream(),
            arguments,
        )
    }
    .map_err(device_error)
}

pub(super) fn device_error(error: DriverError) -> OpsError {
    OpsError::Device(format!("{error:?}"))
}

/// Sizes of a launch fit 32 bits by construction; a size that does not would be refused by the driver as zero.
pub(super) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

/// The same for kernel arguments.
pub(super) fn to_i32(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(0)
}

/// The same for strides.
pub(super) fn to_i64(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(0)
}

fn facts(context: &Arc<CudaContext>) -> Result<DeviceFacts, OpsError> {
    let read = |attribute| context.attribute(attribute).map(|v| v.unsigned_abs()).map_err(device_error);
    let capability = (
        read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    Ok(DeviceFacts {
        name: context.name().map_err(device_error)?,
        capability,
        architecture: architecture(capability),
        multiprocessors: read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes_per_block: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
            as usize,
        memory_bytes: context.total_mem().map_err(device_error)?,
    })
}

/// Hopper's warp-group instructions exist only under its architecture-specific name.
fn architecture((major, minor): (u32, u32)) -> String {
    if (major, minor) == (9, 0) { "sm_90a".into() } else { format!("sm_{major}{minor}") }
}

/// Freed memory stays with the process, so that a request's cache costs no call into the system.
fn keep_freed_memory(context: &Arc<CudaContext>) -> Result<(), OpsError> {
    if !context.has_async_alloc() {
        return Ok(());
    }
    let mut threshold = u64::MAX;
    // SAFETY: the device's default pool is valid; the attribute takes a 64-bit value.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device()).map_err(device_error)?;
        result::mem_pool::set_attribute(
            pool,
            cudarc::driver::sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            std::ptr::from_mut(&mut threshold).cast(),
        )
        .map_err(device_error)
    }
}

fn unusable(error: &DriverError) -> OpsError {
    OpsError::Unsupported(format!("the NVIDIA driver is here but unusable: {error:?}"))
}

#[cfg(test)]
mod tests {
    use super::architecture;

    #[test]
    fn architectures_have_the_compilers_names() {
        assert_eq!(architecture((9, 0)), "sm_90a");
        assert_eq!(architecture((8, 9)), "sm_89");
        assert_eq!(architecture((12, 1)), "sm_121");
    }
}
