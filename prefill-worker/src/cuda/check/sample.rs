//! Random inputs, rounded to what the device will see, and their way onto the device.

use half::{bf16, f16};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::super::CudaOps;
use super::super::elementwise::Format;
use super::super::handles::widen;
use super::super::memory::DeviceMemory;
use crate::ops::OpsError;

/// A reproducible source of normal values.
pub(super) struct Sample(ChaCha8Rng);

impl Sample {
    pub(super) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Normal values (Box-Muller) rounded to `format`.
    pub(super) fn normal(&mut self, n: usize, deviation: f32, format: Format) -> Vec<f32> {
        (0..n)
            .map(|_| {
                let (u, v): (f32, f32) = (self.0.random::<f32>().max(1e-7), self.0.random());
                round(deviation * (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos(), format)
            })
            .collect()
    }

    /// Integers below `limit`.
    pub(super) fn below(&mut self, n: usize, limit: u32) -> Vec<u32> {
        (0..n).map(|_| self.0.random_range(0..limit)).collect()
    }
}

/// Nearest value of a format.
pub(super) fn round(x: f32, format: Format) -> f32 {
    match format {
        Format::F32 => x,
        Format::F16 => f16::from_f32(x).to_f32(),
        Format::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Bytes of values in a format.
pub(super) fn encode(values: &[f32], format: Format) -> Vec<u8> {
    match format {
        Format::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Format::F16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Format::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}

/// Values on the device.
pub(super) fn upload(ops: &CudaOps, values: &[f32], format: Format) -> Result<DeviceMemory, OpsError> {
    let memory = ops.memory("check input", values.len() * format.bytes())?;
    memory.write(0, &encode(values, format))?;
    Ok(memory)
}

/// Memory whose every value is NaN until it is written.
pub(super) fn poisoned(ops: &CudaOps, values: usize, format: Format) -> Result<DeviceMemory, OpsError> {
    let memory = ops.memory("check output", values * format.bytes())?;
    memory.fill(0xff)?;
    Ok(memory)
}

/// Values back from the device.
pub(super) fn download(memory: &DeviceMemory, values: usize, format: Format) -> Result<Vec<f32>, OpsError> {
    let mut bytes = vec![0u8; values * format.bytes()];
    memory.read(0, &mut bytes)?;
    Ok(widen(&bytes, format))
}

/// `‖out − reference‖ / ‖reference‖`; infinite when lengths differ or anything is NaN.
pub(super) fn relative_error(out: &[f32], reference: &[f64]) -> f64 {
    if out.len() != reference.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut norm) = (0.0, 0.0);
    for (o, r) in out.iter().zip(reference) {
        difference += (f64::from(*o) - r).powi(2);
        norm += r * r;
    }
    let error = (difference / norm.max(f64::MIN_POSITIVE)).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

/// Error that rounding the result once to a format allows, with room for roundings on the way.
pub(super) fn limit(format: Format) -> f64 {
    match format {
        Format::F32 => 1e-5,
        Format::F16 => 1.5e-3,
        Format::Bf16 => 8e-3,
    }
}
