//! How far two caches are apart, in units of the cache's own precision.

use super::VerifyError;
use super::dump::{Dump, DumpedArray};
use serde::Serialize;
use shared::layout::{CacheLayout, LayerCache, Part};

/// Two caches compared, over all arrays.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct CacheDifference {
    /// Arrays compared: layers × {k, v}.
    pub(super) arrays: usize,
    /// Arrays whose `worst_ulp` is at most one.
    pub(super) arrays_within_1_ulp: usize,
    /// Arrays whose `worst_steps` is at most one.
    pub(super) arrays_within_1_step: usize,
    /// Elements compared.
    pub(super) elements: u64,
    /// Share of elements with equal bits, 0 to 1.
    pub(super) bit_identical_share: f64,
    /// Largest difference in ulp at its row's RMS magnitude. Keys have outliers many times the RMS, and an
    /// outlier whose last bit differs counts as that many ulp here.
    pub(super) worst_ulp: f64,
    /// The array it is in.
    pub(super) worst_array: String,
    /// Largest difference in ulp at the element's own magnitude, or at its row's RMS where that is larger:
    /// steps of the number format, where 1 is a last bit rounded the other way.
    pub(super) worst_steps: f64,
}

/// Compares every array of the layout.
///
/// # Errors
/// [`VerifyError::Dump`] when one is absent or the shapes differ.
pub(super) fn caches(own: &Dump, other: &Dump, layout: &CacheLayout) -> Result<CacheDifference, VerifyError> {
    let mut total = CacheDifference {
        arrays: 0,
        arrays_within_1_ulp: 0,
        arrays_within_1_step: 0,
        elements: 0,
        bit_identical_share: 1.0,
        worst_ulp: 0.0,
        worst_array: String::new(),
        worst_steps: 0.0,
    };
    let mut identical = 0;
    for (layer, part) in layout.arrays() {
        let Some(LayerCache::Full { dtype, .. }) = layout.layers.get(usize::from(layer)) else { continue };
        let name = format!("layers.{layer}.{}", if part == Part::K { "k" } else { "v" });
        let (a, b) = (own.array(&name)?, other.array(&name)?);
        if a.shape != b.shape || a.raw.len() != b.raw.len() {
            return Err(other.wrong(format!("{name} has shape {:?}, expected {:?}", b.shape, a.shape)));
        }
        let (same, Worst { ulp: worst, steps }) = array(&a, &b, dtype.significand_bits(), dtype.size_bytes());
        identical += same;
        total.arrays += 1;
        total.arrays_within_1_ulp += usize::from(worst <= 1.0);
        total.arrays_within_1_step += usize::from(steps <= 1.0);
        total.worst_steps = total.worst_steps.max(steps);
        total.elements += a.values.len() as u64;
        if worst > total.worst_ulp || total.worst_array.is_empty() {
            total.worst_ulp = worst;
            total.worst_array = name;
        }
    }
    if total.elements > 0 {
        total.bit_identical_share = identical as f64 / total.elements as f64;
    }
    Ok(total)
}

/// Worst differences of one array or row.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Worst {
    /// In ulp at the row's RMS.
    ulp: f64,
    /// In ulp at the larger of the element and the row's RMS.
    steps: f64,
}

/// Elements with equal bits, and the worst differences. A row is one head of one token.
fn array(a: &DumpedArray, b: &DumpedArray, significand_bits: i32, element_bytes: usize) -> (u64, Worst) {
    let same =
        a.raw.chunks_exact(element_bytes).zip(b.raw.chunks_exact(element_bytes)).filter(|(x, y)| x == y);
    let row = a.shape.last().copied().unwrap_or(1).max(1);
    let mut worst = Worst { ulp: 0.0, steps: 0.0 };
    for (x, y) in a.values.chunks(row).zip(b.values.chunks(row)) {
        let here = worst_of_row(x, y, significand_bits);
        worst = Worst { ulp: worst.ulp.max(here.ulp), steps: worst.steps.max(here.steps) };
    }
    (same.count() as u64, worst)
}

fn worst_of_row(a: &[f32], b: &[f32], significand_bits: i32) -> Worst {
    let rms = (a.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / a.len() as f64).sqrt();
    let mut worst = Worst { ulp: 0.0, steps: 0.0 };
    for (x, y) in a.iter().zip(b).map(|(x, y)| (f64::from(*x), f64::from(*y))) {
        // Equal bits of an infinity differ by NaN, and `max` would let any other NaN pass as no difference.
        let difference = if x == y { 0.0 } else { (x - y).abs() };
        if difference == 0.0 {
            continue;
        }
        let in_ulp_at = |magnitude: f64| {
            let ulps = difference / ulp_at(magnitude, significand_bits);
            if ulps.is_nan() { f64::INFINITY } else { ulps }
        };
        let own = x.abs().max(y.abs()).max(rms);
        worst = Worst { ulp: worst.ulp.max(in_ulp_at(rms)), steps: worst.steps.max(in_ulp_at(own)) };
    }
    worst
}

/// Distance of neighbouring numbers of a format around `magnitude`.
fn ulp_at(magnitude: f64, significand_bits: i32) -> f64 {
    2f64.powf(magnitude.log2().floor() - f64::from(significand_bits - 1))
}

/// KL divergence in nats of the distributions that two rows of logits stand for.
pub(super) fn kl_divergence(p_logits: &[f32], q_logits: &[f32]) -> f64 {
    if p_logits.len() != q_logits.len() {
        return f64::INFINITY;
    }
    let (p, q) = (log_softmax(p_logits), log_softmax(q_logits));
    p.iter().zip(&q).map(|(lp, lq)| lp.exp() * (lp - lq)).sum::<f64>().max(0.0)
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    logits.iter().map(|l| f64::from(l - max) - sum.ln()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumped(values: &[f32]) -> DumpedArray {
        let raw = values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        DumpedArray { shape: vec![1, values.len() / 2, 2], raw, values: values.to_vec() }
    }

    #[test]
    fn one_step_of_the_format_is_one_ulp() {
        assert_eq!(ulp_at(1.0, 11), 2f64.powi(-10));
        assert_eq!(ulp_at(3.9, 11), 2f64.powi(-9));
        let step = 2f32.powi(-10);
        let (a, b) = (dumped(&[1.0, 1.0, 1.0, 1.0]), dumped(&[1.0, 1.0 + step, 1.0, 1.0]));
        assert_eq!(array(&a, &b, 11, 2), (3, Worst { ulp: 1.0, steps: 1.0 }));
        assert_eq!(array(&a, &a, 11, 2), (4, Worst { ulp: 0.0, steps: 0.0 }));
    }

    #[test]
    fn an_outlier_rounded_the_other_way_is_one_step_but_many_ulp_of_its_row() {
        let mut values = vec![1.0; 64];
        values[0] = 32.0;
        let dumped = |values: &[f32]| {
            let raw = values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
            DumpedArray { shape: vec![1, 1, 64], raw, values: values.to_vec() }
        };
        let a = dumped(&values);
        values[0] = 32.0 + 2f32.powi(-5);
        let (same, worst) = array(&a, &dumped(&values), 11, 2);
        assert_eq!((same, worst), (63, Worst { ulp: 8.0, steps: 1.0 }));
    }

    #[test]
    fn a_nan_is_the_worst_difference() {
        let (a, b) = (dumped(&[1.0, 1.0]), dumped(&[1.0, f32::NAN]));
        assert_eq!(array(&a, &b, 11, 2).1.steps, f64::INFINITY);
    }

    #[test]
    fn kl_is_zero_for_equal_and_positive_for_other_distributions() {
        assert_eq!(kl_divergence(&[1.0, 2.0, 3.0], &[2.0, 3.0, 4.0]), 0.0);
        assert!(kl_divergence(&[0.0, 0.0], &[0.0, 1.0]) > 0.1);
        assert_eq!(kl_divergence(&[0.0], &[0.0, 1.0]), f64::INFINITY);
    }
}
