//! Cosine and sine of rotary angles, as different devices compute them.
//!
//! A decoder rotates keys by `cos θ` and `sin θ` in f32, and its math library decides the last bits. It measures
//! which of these functions its own equals and says so in its recipe, so that a prefill worker can do the same.

use serde::{Deserialize, Serialize};

/// A way to compute cosine and sine of an f32 angle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SinCos {
    /// Rounded once from the true value (to within the error of an f64 computation).
    #[default]
    Rounded,
    /// The single-precision algorithm of the Cephes library (S. Moshier): reduction by multiples of π/2 in three
    /// steps, then a polynomial of degree 7 or 8, each step a fused multiply-add.
    CephesFused,
    /// The same with product and sum rounded separately.
    CephesSeparate,
}

impl SinCos {
    /// All of them, the most exact first.
    pub const ALL: [Self; 3] = [Self::Rounded, Self::CephesFused, Self::CephesSeparate];

    /// `(cos θ, sin θ)` for `θ ≥ 0` in radians.
    #[must_use]
    pub fn cos_sin(self, theta: f32) -> (f32, f32) {
        match self {
            Self::CephesFused if theta <= CEPHES_LIMIT => cephes(theta, |a, b, c| a.mul_add(b, c)),
            Self::CephesSeparate if theta <= CEPHES_LIMIT => cephes(theta, |a, b, c| a * b + c),
            _ => {
                let exact = f64::from(theta);
                (exact.cos() as f32, exact.sin() as f32)
            }
        }
    }
}

/// Beyond this the reduction has lost all bits; libraries turn to another method.
const CEPHES_LIMIT: f32 = 8_388_608.0;

/// Cephes' `cosf` and `sinf`; `step(a, b, c)` is `a·b + c`.
fn cephes(theta: f32, step: impl Fn(f32, f32, f32) -> f32) -> (f32, f32) {
    // π/4 in three parts that multiply small integers exactly.
    const QUARTER_PI: [f32; 3] = [0.785_156_25, 2.418_756_5e-4, 3.774_895e-8];
    const SIN: [f32; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
    const COS: [f32; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];
    let octant = ((theta * 1.273_239_5) as u32 + 1) & !1;
    let multiple = octant as f32;
    let x = QUARTER_PI.iter().fold(theta, |x, part| step(multiple, -part, x));
    let z = x * x;
    let cos = step(step(z, COS[0], COS[1]), z, COS[2]) * z * z;
    let cos = step(z, -0.5, cos) + 1.0;
    let sin = step(x, step(step(z, SIN[0], SIN[1]), z, SIN[2]) * z, x);
    let (c, s) = if octant & 2 == 0 { (cos, sin) } else { (sin, cos) };
    let minus = |negative: bool, value: f32| if negative { -value } else { value };
    (minus(octant.wrapping_sub(2) & 4 == 0, c), minus(octant & 4 != 0, s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_the_same_functions() {
        for kind in SinCos::ALL {
            for i in 0..200_000u32 {
                let theta = i as f32 * 0.041;
                let (cos, sin) = kind.cos_sin(theta);
                let exact = f64::from(theta);
                assert!((f64::from(cos) - exact.cos()).abs() < 2e-7, "{kind:?} cos {theta}: {cos}");
                assert!((f64::from(sin) - exact.sin()).abs() < 2e-7, "{kind:?} sin {theta}: {sin}");
            }
        }
    }
}
