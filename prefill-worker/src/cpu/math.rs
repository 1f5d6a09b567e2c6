//! Scalar functions written so that the compiler turns loops over them into vector code.

/// Lanes that reductions keep apart: one AVX-512 register, or two of AVX2.
pub(super) const LANES: usize = 16;

/// `e^x`, within 2 ulp on `-87..=88`, clamped outside.
///
/// Cody and Waite's reduction by `ln 2` in two parts, then the degree-6 polynomial of Cephes' `expf`. Only additions
/// and multiplications, and rounding by the "add 1.5 * 2^23" trick, so that it vectorizes.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut p = 1.987_569_2e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    let power = shifted.to_bits().wrapping_add(127).wrapping_shl(23);
    y * f32::from_bits(power)
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Largest element; `-inf` for none.
#[inline(always)]
pub(super) fn max(values: &[f32]) -> f32 {
    let (lanes, rest) = values.as_chunks::<LANES>();
    let mut best = [f32::NEG_INFINITY; LANES];
    for chunk in lanes {
        for (b, &v) in best.iter_mut().zip(chunk) {
            *b = if v > *b { v } else { *b };
        }
    }
    best.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// Replaces every element by `e^(element - shift)` and returns their sum.
#[inline(always)]
pub(super) fn exp_sum(values: &mut [f32], shift: f32) -> f32 {
    let (lanes, rest) = values.as_chunks_mut::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in lanes {
        for (s, v) in sums.iter_mut().zip(chunk) {
            *v = exp(*v - shift);
            *s += *v;
        }
    }
    let mut sum: f32 = sums.iter().sum();
    for v in rest {
        *v = exp(*v - shift);
        sum += *v;
    }
    sum
}

/// Sum of squares.
#[inline(always)]
pub(super) fn sum_of_squares(values: &[f32]) -> f32 {
    let (lanes, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in lanes {
        for (s, v) in sums.iter_mut().zip(chunk) {
            *s += v * v;
        }
    }
    sums.iter().sum::<f32>() + rest.iter().map(|v| v * v).sum::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        let mut x = -86.9f32;
        while x < 87.9 {
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::EPSILON) * exact;
            assert!((f64::from(exp(x)) - exact).abs() <= 2.0 * ulp, "{x}: {} {exact}", exp(x));
            x += 0.003_7;
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-1e30) < 1e-37);
    }

    #[test]
    fn reductions_cover_lanes_and_rest() {
        for n in [0usize, 1, 15, 16, 17, 100] {
            let values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
            let by_hand = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&values), by_hand);
            let squares: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
            assert!((f64::from(sum_of_squares(&values)) - squares).abs() < 1e-5);
            let mut e = values.clone();
            let sum: f64 = values.iter().map(|v| f64::from(*v).exp()).sum();
            assert!((f64::from(exp_sum(&mut e, 0.0)) - sum).abs() < 1e-4);
        }
    }

    #[test]
    fn silu_at_its_ends() {
        assert_eq!(silu(0.0), 0.0);
        assert!((silu(20.0) - 20.0).abs() < 1e-5);
        assert!(silu(-80.0).abs() < 1e-30);
    }
}
