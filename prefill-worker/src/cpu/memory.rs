//! Allocation that fails with an error.

use crate::ops::OpsError;

/// `n` zeros, or [`OpsError::OutOfMemory`].
pub(super) fn floats(what: &str, n: usize) -> Result<Vec<f32>, OpsError> {
    let mut data = Vec::new();
    let bytes = n.saturating_mul(size_of::<f32>());
    data.try_reserve_exact(n).map_err(|_| OpsError::OutOfMemory { what: what.into(), bytes })?;
    data.resize(n, 0.0);
    Ok(data)
}
