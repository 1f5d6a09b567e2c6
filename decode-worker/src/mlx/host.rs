//! Between host memory and MLX arrays.

use bytes::Bytes;
use half::{bf16, f16};
use mlx_rs::Array;
use shared::layout::Dtype;

use super::MlxError;

/// MLX's name of an element type.
pub(super) fn mlx_dtype(dtype: Dtype) -> mlx_rs::Dtype {
    match dtype {
        Dtype::F32 => mlx_rs::Dtype::Float32,
        Dtype::F16 => mlx_rs::Dtype::Float16,
        Dtype::Bf16 => mlx_rs::Dtype::Bfloat16,
    }
}

/// A size as MLX takes it.
///
/// # Errors
/// [`MlxError::TooLarge`] naming `what`.
pub(super) fn dim(what: &'static str, value: usize) -> Result<i32, MlxError> {
    i32::try_from(value).map_err(|_| MlxError::TooLarge { what, value })
}

/// Copies little-endian elements of `dtype` into an array of `shape`, whose element count is `bytes.len() / size`.
///
/// The copy goes through bytes, because frames from the network are not aligned for their elements.
///
/// # Errors
/// [`MlxError::TooLarge`] when the bytes exceed MLX's indices, and MLX's own refusals.
pub(super) fn array_from_bytes(bytes: &[u8], shape: &[i32], dtype: Dtype) -> Result<Array, MlxError> {
    let flat = Array::from_slice(bytes, &[dim("bytes of a cache array", bytes.len())?]);
    Ok(flat.view_dtype(mlx_dtype(dtype))?.reshape(shape)?)
}

/// Evaluates an array of `dtype` and copies its elements out, row-major and little-endian.
///
/// # Errors
/// MLX's own failures.
pub(super) fn array_to_bytes(array: &Array, dtype: Dtype) -> Result<Bytes, MlxError> {
    let array = array.contiguous()?;
    Ok(match dtype {
        Dtype::F32 => Bytes::copy_from_slice(bytemuck::cast_slice(array.try_as_slice::<f32>()?)),
        Dtype::F16 => Bytes::copy_from_slice(bytemuck::cast_slice(array.try_as_slice::<f16>()?)),
        Dtype::Bf16 => Bytes::copy_from_slice(bytemuck::cast_slice(array.try_as_slice::<bf16>()?)),
    })
}

/// Evaluates an array and copies its elements out as f32, row-major.
///
/// # Errors
/// MLX's own failures.
pub(super) fn array_to_f32(array: &Array) -> Result<Vec<f32>, MlxError> {
    let array = array.as_dtype(mlx_rs::Dtype::Float32)?.contiguous()?;
    Ok(array.try_as_slice::<f32>()?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_round_trip_at_any_alignment() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let padded: Vec<u8> = (0..=96).collect();
            let bytes = &padded[1..97];
            let n = 96 / dtype.size_bytes();
            let shape = [2, i32::try_from(n / 2).unwrap()];
            let array = array_from_bytes(bytes, &shape, dtype).unwrap();
            assert_eq!(array.shape(), shape);
            assert_eq!(array_to_bytes(&array, dtype).unwrap(), bytes);
        }
    }

    #[test]
    fn views_are_copied_out_in_row_major_order() {
        let array = Array::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2]);
        assert_eq!(array_to_f32(&array.t()).unwrap(), [1.0, 3.0, 2.0, 4.0]);
    }
}
