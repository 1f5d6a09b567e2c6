//! Rotary frequencies.

use super::{RopeScaling, RopeSpec};
use std::f32::consts::PI;

impl RopeSpec {
    /// Divisor of each of the `head_dim / 2` frequencies, in order of falling frequency; `None` when there is no
    /// scaling or it is the same for all ([`RopeScaling::Linear`]).
    ///
    /// Llama 3.1's rule as in its reference implementation: wavelengths longer than
    /// `original_max_positions / low_freq_factor` get `factor`, shorter than `… / high_freq_factor` get 1, and between
    /// them the frequency is interpolated. GGUF stores the same numbers as `rope_freqs.weight`.
    #[must_use]
    pub fn frequency_divisors(&self, head_dim: usize) -> Option<Vec<f32>> {
        let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } =
            self.scaling
        else {
            return None;
        };
        let context = original_max_positions as f32;
        let divisor = |period: f32| {
            let wavelength = 2.0 * PI * period;
            if wavelength < context / high_freq_factor {
                1.0
            } else if wavelength > context / low_freq_factor {
                factor
            } else {
                let smooth = (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        Some(self.base_periods(head_dim).into_iter().map(divisor).collect())
    }

    /// `theta^(2i / head_dim)` for `i` in `0..head_dim / 2`: radians per position are one over these.
    fn base_periods(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2).map(|i| self.theta.powf((2 * i) as f32 / head_dim as f32)).collect()
    }
}

/// The Llama 3 scaling whose divisors are the given ones, if a published set of constants yields them.
pub(super) fn llama3_from_divisors(theta: f32, head_dim: usize, divisors: &[f32]) -> Option<RopeScaling> {
    let factor = divisors.iter().copied().fold(0.0f32, f32::max);
    let scaling = RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    let expected = RopeSpec { theta, scaling }.frequency_divisors(head_dim)?;
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * b.abs();
    (expected.len() == divisors.len() && expected.iter().zip(divisors).all(close)).then_some(scaling)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA31: RopeScaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };

    #[test]
    fn divisors_go_from_one_to_the_factor() {
        let divisors = RopeSpec { theta: 500_000.0, scaling: LLAMA31 }.frequency_divisors(128).unwrap();
        assert_eq!(divisors.len(), 64);
        assert_eq!((divisors[0], divisors[63]), (1.0, 8.0));
        assert!(divisors.is_sorted());
        assert_eq!(divisors.iter().filter(|d| **d > 1.0 && **d < 8.0).count(), 6);
    }

    #[test]
    fn divisors_identify_the_constants() {
        let divisors = RopeSpec { theta: 500_000.0, scaling: LLAMA31 }.frequency_divisors(128).unwrap();
        assert_eq!(llama3_from_divisors(500_000.0, 128, &divisors), Some(LLAMA31));
        let mut other = divisors;
        other[40] = 3.0;
        assert_eq!(llama3_from_divisors(500_000.0, 128, &other), None);
    }

    #[test]
    fn other_scalings_have_no_divisors() {
        for scaling in [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }] {
            assert_eq!(RopeSpec { theta: 1e4, scaling }.frequency_divisors(64), None);
        }
    }
}
