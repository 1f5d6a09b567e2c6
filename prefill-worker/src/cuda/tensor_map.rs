//! Tensor maps: descriptions of a `[heads, rows, head_dim]` array that the copy engine of Hopper reads tiles through.

use cudarc::driver::sys;

use super::Precision;
use crate::ops::OpsError;

/// A map passed to a kernel by value.
#[repr(C, align(128))]
pub(super) struct TensorMap(sys::CUtensorMap);

/// Array behind a map; strides in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct HeadRows {
    pub(super) address: u64,
    pub(super) heads: usize,
    pub(super) rows: usize,
    pub(super) head_dim: usize,
    pub(super) row_stride: usize,
    pub(super) head_stride: usize,
}

impl TensorMap {
    /// A map whose boxes are 128 rows of 64 elements, swizzled by 128 bytes. Rows beyond `rows` read as zeros.
    pub(super) fn new(array: HeadRows, precision: Precision) -> Result<Self, OpsError> {
        let dtype = match precision {
            Precision::Bf16 | Precision::Fp8 => {
                sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            }
            Precision::F16 => sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        };
        let sizes = [array.head_dim as u64, array.rows as u64, array.heads as u64];
        let strides = [array.row_stride as u64 * 2, array.head_stride as u64 * 2];
        let tile = [64u32, 128, 1];
        let steps = [1u32; 3];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: every array has the length that rank 3 asks for; the driver checks alignment and bounds.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                3,
                array.address as *mut std::ffi::c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        status.result().map_err(super::device::device_error)?;
        Ok(Self(map))
    }
}
