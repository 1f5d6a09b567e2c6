//! Rotary position embedding, and the frequencies another engine needs to reproduce it.
//!
//! Where MLX computes rotary angles with general operations (its CPU backend), the angle is
//! `f32(position) · inv_freq` rounded to f32, with `inv_freq` from MLX's own vectorised `exp`, which is up to 17 units
//! in the last place away from the true value. At position 8,000 that is enough to move a key by several units of f16,
//! so the frequencies are published as MLX computed them rather than derived again elsewhere. On a GPU the fused
//! kernel's default frequencies cannot be observed; there an explicit table is passed in, whose reciprocal is taken
//! with IEEE division on both sides.

use mlx_rs::{Array, fast, ops};
use shared::angles::SinCos;
use shared::spec::{RopeScaling, RopeSpec};

use super::MlxError;
use super::host::{array_to_f32, dim};

/// Rotary embedding of one model.
#[derive(Debug)]
pub(super) struct Rope {
    dims: i32,
    frequencies: Frequencies,
}

#[derive(Debug)]
enum Frequencies {
    /// MLX derives them from the base; positions are multiplied by `scale`.
    Base { theta: f32, scale: f32 },
    /// Wavelengths over 2π, `[dims / 2]`: MLX divides positions by them.
    Table(Array),
}

impl Rope {
    /// `head_dim` is rotated whole, in half-split order. `fused`: the device has a rotary kernel of its own.
    pub(super) fn new(spec: &RopeSpec, head_dim: usize, fused: bool) -> Result<Self, MlxError> {
        let dims = dim("head_dim", head_dim)?;
        let frequencies = match spec.scaling {
            RopeScaling::None if !fused => Frequencies::Base { theta: spec.theta, scale: 1.0 },
            RopeScaling::Linear { factor } if !fused => {
                Frequencies::Base { theta: spec.theta, scale: 1.0 / factor }
            }
            RopeScaling::None => Frequencies::Table(geometric(spec.theta, dims, 1.0)),
            RopeScaling::Linear { factor } => Frequencies::Table(geometric(spec.theta, dims, factor)),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
                let context = original_max_positions as f32;
                Frequencies::Table(llama3(
                    spec.theta,
                    dims,
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    context,
                )?)
            }
        };
        Ok(Self { dims, frequencies })
    }

    /// Rotates `x [1, heads, tokens, head_dim]`, whose first token is at position `offset`.
    pub(super) fn apply(&self, x: &Array, offset: i32) -> Result<Array, MlxError> {
        Ok(match &self.frequencies {
            Frequencies::Base { theta, scale } => {
                fast::rope(x, self.dims, false, *theta, *scale, offset, None)?
            }
            Frequencies::Table(table) => fast::rope(x, self.dims, false, None, 1.0, offset, table)?,
        })
    }

    /// Rotates `x [rows, heads, 1, head_dim]`, each row by its own position of `offsets` (i32 `[rows]`).
    pub(super) fn apply_rows(&self, x: &Array, offsets: &Array) -> Result<Array, MlxError> {
        Ok(match &self.frequencies {
            Frequencies::Base { theta, scale } => {
                fast::rope_dynamic(x, self.dims, false, *theta, *scale, offsets, None)?
            }
            Frequencies::Table(table) => fast::rope_dynamic(x, self.dims, false, None, 1.0, offsets, table)?,
        })
    }

    /// Which way of computing cosines and sines reproduces this device's rotation bit for bit, or the exact one if
    /// none does. `inv_freq` is [`Rope::inv_freq`].
    pub(super) fn sin_cos(&self, inv_freq: &[f32]) -> Result<SinCos, MlxError> {
        let half = inv_freq.len();
        // Heads of ones, then zeros: rotated, their halves are exactly cos θ and sin θ.
        let unit: Vec<f32> = (0..2 * half).map(|i| if i < half { 1.0 } else { 0.0 }).collect();
        let x = Array::from_slice(&unit, &[1, 1, 1, self.dims]);
        let mut fitting = SinCos::ALL.to_vec();
        for position in [1, 2, 77, 255, 1_023, 2_500, 8_191] {
            let rotated = array_to_f32(&self.apply(&x, position)?)?;
            fitting.retain(|kind| {
                inv_freq.iter().enumerate().all(|(i, f)| {
                    let (cos, sin) = kind.cos_sin(position as f32 * f);
                    (cos, sin) == (rotated[i], rotated[half + i])
                })
            });
        }
        Ok(fitting.first().copied().unwrap_or_default())
    }

    /// Radians per position, `[dims / 2]`, as the device computes them.
    pub(super) fn inv_freq(&self) -> Result<Vec<f32>, MlxError> {
        match &self.frequencies {
            Frequencies::Table(table) => array_to_f32(&table.reciprocal()?),
            Frequencies::Base { theta, scale } => {
                let half = self.dims / 2;
                let step = Array::from_f32(theta.ln() / half as f32);
                let inv = ops::arange::<i32, f32>(0, -half, -1)?.multiply(step)?.exp()?;
                Ok(array_to_f32(&inv)?.into_iter().map(|f| f * scale).collect())
            }
        }
    }
}

/// `factor · theta^(2i / dims)`, each correctly rounded.
fn geometric(theta: f32, dims: i32, factor: f32) -> Array {
    let table: Vec<f32> = (0..dims / 2)
        .map(|i| (f64::from(factor) * f64::from(theta).powf(f64::from(2 * i) / f64::from(dims))) as f32)
        .collect();
    Array::from_slice(&table, &[dims / 2])
}

/// Llama 3.1's stretched wavelengths, operation by operation as mlx-lm's `Llama3RoPE` computes them.
fn llama3(theta: f32, dims: i32, factor: f32, low: f32, high: f32, context: f32) -> Result<Array, MlxError> {
    let scalar = Array::from_f32;
    let exponents = ops::arange::<i32, i32>(0, dims, 2)?.divide(Array::from_int(dims))?;
    let freqs = scalar(theta).power(&exponents)?;
    let wavelengths = scalar(std::f32::consts::TAU).multiply(&freqs)?;
    let longest_kept = context / high;
    let shortest_divided = context / low;

    let stretched = freqs.multiply(scalar(factor))?;
    let freqs = ops::select(wavelengths.gt(scalar(shortest_divided))?, &stretched, &freqs)?;
    let medium =
        wavelengths.gt(scalar(longest_kept))?.logical_and(wavelengths.lt(scalar(shortest_divided))?)?;
    let smooth = scalar(context).divide(&wavelengths)?.subtract(scalar(low))?.divide(scalar(high - low))?;
    let blend = scalar(1.0).subtract(&smooth)?.divide(scalar(factor))?.add(&smooth)?;
    let table = ops::select(&medium, freqs.divide(&blend)?, &freqs)?;
    table.eval()?;
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA3: RopeScaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };

    /// Heads of ones then zeros, so that the rotated halves are exactly cos and sin of the angle.
    fn angles(rope: &Rope, dims: usize, position: i32) -> (Vec<f32>, Vec<f32>) {
        let unit: Vec<f32> = (0..dims).map(|i| if i < dims / 2 { 1.0 } else { 0.0 }).collect();
        let x = Array::from_slice(&unit, &[1, 1, 1, i32::try_from(dims).unwrap()]);
        let out = array_to_f32(&rope.apply(&x, position).unwrap()).unwrap();
        (out[..dims / 2].to_vec(), out[dims / 2..].to_vec())
    }

    #[test]
    fn published_frequencies_reproduce_the_rotation() {
        let linear = RopeScaling::Linear { factor: 4.0 };
        for (scaling, fused) in
            [(RopeScaling::None, false), (RopeScaling::None, true), (linear, false), (LLAMA3, false)]
        {
            let rope = Rope::new(&RopeSpec { theta: 500_000.0, scaling }, 128, fused).unwrap();
            let inv_freq = rope.inv_freq().unwrap();
            for position in [0, 1, 255, 8_191, 131_071] {
                let (cos, sin) = angles(&rope, 128, position);
                for (i, &f) in inv_freq.iter().enumerate() {
                    let theta = f64::from(position as f32 * f);
                    assert!(
                        (f64::from(cos[i]) - theta.cos()).abs() < 1.2e-7,
                        "cos, {scaling:?} {position} {i}"
                    );
                    assert!(
                        (f64::from(sin[i]) - theta.sin()).abs() < 1.2e-7,
                        "sin, {scaling:?} {position} {i}"
                    );
                }
            }
        }
    }

    #[test]
    fn rows_are_rotated_as_if_each_were_alone() {
        for scaling in [RopeScaling::None, LLAMA3] {
            let rope = Rope::new(&RopeSpec { theta: 10_000.0, scaling }, 64, false).unwrap();
            let positions = [0, 8_191, 3, 77, 1_000];
            let numbers: Vec<f32> = (0..5 * 3 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
            let x = Array::from_slice(&numbers, &[5, 3, 1, 64]);
            let together = rope.apply_rows(&x, &Array::from_slice(&positions, &[5])).unwrap();
            let together = array_to_f32(&together).unwrap();
            for (i, &position) in positions.iter().enumerate() {
                let own = i * 3 * 64..(i + 1) * 3 * 64;
                let x = Array::from_slice(&numbers[own.clone()], &[1, 3, 1, 64]);
                assert_eq!(array_to_f32(&rope.apply(&x, position).unwrap()).unwrap(), together[own]);
            }
        }
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_divides_long_ones() {
        let plain = Rope::new(&RopeSpec { theta: 500_000.0, scaling: RopeScaling::None }, 128, true).unwrap();
        let scaled = Rope::new(&RopeSpec { theta: 500_000.0, scaling: LLAMA3 }, 128, false).unwrap();
        let (plain, scaled) = (plain.inv_freq().unwrap(), scaled.inv_freq().unwrap());
        assert!((plain[0] / scaled[0] - 1.0).abs() < 1e-5);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-4);
        assert!(scaled.windows(2).all(|w| w[0] > w[1]));
    }
}
