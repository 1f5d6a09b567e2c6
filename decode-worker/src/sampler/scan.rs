//! Passes over all logits, in blocks, compiled for the vector units that the machine has.
//!
//! Results do not depend on those units: sums have a fixed order, and nothing is fused.

use pulp::{Arch, NullaryFnOnce};

/// Logits per block.
const BLOCK: usize = 64;
/// Independent accumulators of a block.
const LANES: usize = 16;

/// What a pass found: per block the largest number, `-inf` in a block without one.
#[derive(Debug, Default)]
pub(super) struct Scan {
    maxima: Vec<f32>,
    sums: Vec<f32>,
    order: Vec<f32>,
    arch: Arch,
}

impl Scan {
    /// Looks at all logits.
    pub(super) fn read(&mut self, logits: &[f32]) {
        self.maxima.clear();
        self.maxima.resize(logits.len().div_ceil(BLOCK), f32::NEG_INFINITY);
        self.arch.dispatch(Maxima { logits, maxima: &mut self.maxima });
    }

    /// Index and value of the largest number; of equal ones the first.
    pub(super) fn best(&self, logits: &[f32]) -> Option<(u32, f32)> {
        let top = self.maxima.iter().fold(f32::NEG_INFINITY, |top, &m| if m > top { m } else { top });
        // Where all are -inf, blocks without any number look like the others.
        let start =
            if top == f32::NEG_INFINITY { 0 } else { self.maxima.iter().position(|&m| m == top)? * BLOCK };
        let at = start + logits[start..].iter().position(|&logit| logit == top)?;
        Some((at as u32, top))
    }

    /// Sum of `exp((logit - top) * scale)` over all numbers. Remembers each block's share.
    pub(super) fn total_weight(&mut self, logits: &[f32], top: f32, scale: f32) -> f64 {
        self.sums.clear();
        self.sums.resize(logits.len().div_ceil(BLOCK), 0.0);
        self.arch.dispatch(Sums { logits, top, scale, sums: &mut self.sums });
        self.sums.iter().map(|&sum| f64::from(sum)).sum()
    }

    /// The token at `point` (0 to 1) of the cumulated weights of all numbers.
    pub(super) fn draw(&mut self, logits: &[f32], top: f32, scale: f32, point: f64) -> Option<u32> {
        let mut left = point * self.total_weight(logits, top, scale);
        for (i, &sum) in self.sums.iter().enumerate() {
            if left >= f64::from(sum) {
                left -= f64::from(sum);
                continue;
            }
            let block = logits[i * BLOCK..].iter().take(BLOCK);
            for (j, &logit) in block.enumerate() {
                left -= f64::from(weight(logit, top, scale));
                if left < 0.0 {
                    return Some((i * BLOCK + j) as u32);
                }
            }
            // The block's sum was rounded otherwise than this one: the point lies just past its last token.
            left = 0.0;
        }
        None
    }

    /// A logit that at least `k` logits reach, and few more if they are spread; `None` when `k` is too large to say.
    pub(super) fn bound_of_top(&mut self, k: usize) -> Option<f32> {
        if k == 0 || k > self.maxima.len() {
            return None;
        }
        self.order.clone_from(&self.maxima);
        let (_, bound, _) = self.order.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        Some(*bound)
    }

    /// Calls `with` for every number of at least `bound`, in order.
    pub(super) fn for_each_from(&self, logits: &[f32], bound: f32, mut with: impl FnMut(u32, f32)) {
        for (i, block) in logits.chunks(BLOCK).enumerate() {
            if self.maxima[i] >= bound {
                for (j, &logit) in block.iter().enumerate() {
                    if logit >= bound {
                        with((i * BLOCK + j) as u32, logit);
                    }
                }
            }
        }
    }
}

/// Weight of a logit relative to the largest, whose weight is 1; 0 for what is not a number.
#[inline(always)]
pub(super) fn weight(logit: f32, top: f32, scale: f32) -> f32 {
    exp((logit - top) * scale)
}

/// e^x for x ≤ 0 within 2 ulp; 0 below −87 and for what is not a number. Cephes' polynomial, without branches so that
/// it vectorizes, and the same bits on every machine.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// Adding it leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let inside = x >= -87.0;
    let x = if inside { x } else { 0.0 };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_66;
    let p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_shl(23).wrapping_add(0x3F80_0000));
    if inside { y * power } else { 0.0 }
}

struct Maxima<'a> {
    logits: &'a [f32],
    maxima: &'a mut [f32],
}

impl NullaryFnOnce for Maxima<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (block, maximum) in self.logits.chunks(BLOCK).zip(self.maxima) {
            let mut lanes = [f32::NEG_INFINITY; LANES];
            let (whole, rest) = block.as_chunks::<LANES>();
            for chunk in whole {
                for (lane, &x) in lanes.iter_mut().zip(chunk) {
                    *lane = if x > *lane { x } else { *lane };
                }
            }
            for (lane, &x) in lanes.iter_mut().zip(rest) {
                *lane = if x > *lane { x } else { *lane };
            }
            *maximum = lanes.iter().fold(f32::NEG_INFINITY, |top, &x| if x > top { x } else { top });
        }
    }
}

struct Sums<'a> {
    logits: &'a [f32],
    top: f32,
    scale: f32,
    sums: &'a mut [f32],
}

impl NullaryFnOnce for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { logits, top, scale, sums } = self;
        for (block, sum) in logits.chunks(BLOCK).zip(sums) {
            let mut lanes = [0.0f32; LANES];
            let (whole, rest) = block.as_chunks::<LANES>();
            for chunk in whole {
                for (lane, &x) in lanes.iter_mut().zip(chunk) {
                    *lane += weight(x, top, scale);
                }
            }
            for (lane, &x) in lanes.iter_mut().zip(rest) {
                *lane += weight(x, top, scale);
            }
            *sum = lanes.iter().sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_right_to_two_ulp() {
        let mut worst = 0.0f64;
        for i in 0..870_000 {
            let x = -(i as f32) / 1e4;
            let right = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - right).abs() / right);
        }
        assert!(worst < 2.4e-7, "{worst:e}");
        assert_eq!(exp(0.0), 1.0);
        for beyond in [-87.5, -1e30, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp(beyond), 0.0);
        }
    }

    #[test]
    fn a_bound_is_reached_by_k() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1009) as f32).collect();
        let mut scan = Scan::default();
        scan.read(&logits);
        for k in 1..=16 {
            let bound = scan.bound_of_top(k).unwrap();
            let mut n = 0;
            scan.for_each_from(&logits, bound, |i, x| {
                assert_eq!(logits[i as usize], x);
                n += 1;
            });
            assert_eq!(n, logits.iter().filter(|&&x| x >= bound).count());
            assert!(n >= k);
        }
        assert_eq!(scan.bound_of_top(17), None);
    }
}
