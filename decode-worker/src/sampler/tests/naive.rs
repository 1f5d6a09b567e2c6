//! The filters against the obvious way: sort everything, in f64.

use super::super::{Sampler, TokenMask};
use proptest::prelude::*;
use shared::control::Sampling;

/// Tokens kept with their probabilities, and how near any cut was to falling elsewhere.
fn naive(sampling: &Sampling, logits: &[f32], allowed: &TokenMask) -> (Vec<(u32, f64)>, f64) {
    let mut list: Vec<(u32, f64)> = (0..logits.len() as u32)
        .filter(|&token| allowed.allows(token) && !logits[token as usize].is_nan())
        .map(|token| (token, f64::from(logits[token as usize])))
        .collect();
    list.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if sampling.top_k > 0 {
        list.truncate(sampling.top_k as usize);
    }
    let top = list[0].1;
    for (_, x) in &mut list {
        *x = ((*x - top) / f64::from(sampling.temperature)).exp();
    }
    let mut margin = f64::INFINITY;
    let total: f64 = list.iter().map(|(_, w)| w).sum();
    let (mut sum, mut keep) = (0.0, list.len());
    for (i, (_, w)) in list.iter().enumerate() {
        sum += w / total;
        margin = margin.min((sum - f64::from(sampling.top_p)).abs());
        if sum >= f64::from(sampling.top_p) {
            keep = i + 1;
            break;
        }
    }
    if sampling.top_p < 1.0 {
        list.truncate(keep);
    } else {
        margin = f64::INFINITY;
    }
    for (_, w) in &list {
        margin = margin.min((w - f64::from(sampling.min_p)).abs());
    }
    list.retain(|(_, w)| *w >= f64::from(sampling.min_p));
    let total: f64 = list.iter().map(|(_, w)| w).sum();
    list.iter_mut().for_each(|(_, w)| *w /= total);
    list.sort_by_key(|&(token, _)| token);
    (list, margin)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn filters_do_what_the_obvious_way_does(
        logits in prop::collection::vec(
            prop_oneof![20 => -12.0f32..12.0, 5 => (-20i32..20).prop_map(|x| x as f32), 1 => Just(f32::NAN)], 2..700),
        temperature in prop_oneof![Just(1.0f32), 0.05f32..4.0],
        top_p in prop_oneof![Just(1.0f32), 0.0f32..1.0, 0.9f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.001f32..0.999],
        top_k in prop_oneof![Just(0u32), 1u32..8, 1u32..800],
        banned in prop::collection::hash_set(0u32..700, 0..60),
    ) {
        let allowed: Vec<u32> = (0..logits.len() as u32).filter(|token| !banned.contains(token)).collect();
        let allowed = TokenMask::from_tokens(logits.len(), &allowed);
        prop_assume!((0..logits.len() as u32).any(|t| allowed.allows(t) && !logits[t as usize].is_nan()));
        let sampling = Sampling { temperature, top_p, min_p, top_k, ..Sampling::default() };
        let (right, margin) = naive(&sampling, &logits, &allowed);
        // Where rounding decides, either is right.
        prop_assume!(margin > 1e-5);
        let mut sampler = Sampler::new(sampling, &[]).unwrap();
        let got = super::distribution(&mut sampler, &logits, Some(&allowed));
        let possible = |list: &[(u32, f64)]| list.iter().filter(|x| x.1 > 1e-30).copied().collect::<Vec<_>>();
        let (got, right) = (possible(&got), possible(&right));
        prop_assert_eq!(got.iter().map(|x| x.0).collect::<Vec<_>>(), right.iter().map(|x| x.0).collect::<Vec<_>>());
        for ((_, p), (_, q)) in got.iter().zip(&right) {
            prop_assert!((p - q).abs() <= 1e-5 * q + 1e-9, "{} {}", p, q);
        }
    }
}
