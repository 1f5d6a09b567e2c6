//! Draws follow the distribution that the filters leave: chi-square tests with fixed seeds.

use super::super::Sampler;
use shared::control::Sampling;

/// Groups of tokens that are counted together, about equally likely.
const GROUPS: usize = 32;
/// 31 degrees of freedom exceed this once in a thousand times.
const CRITICAL: f64 = 61.1;

fn logits(n: u32) -> Vec<f32> {
    let bits = |i: u32| i.wrapping_mul(2_654_435_761) >> 8;
    (0..n).map(|i| (bits(i) as f32 / (1 << 24) as f32).powi(24) * 9.0).collect()
}

fn chi_square(sampling: &Sampling, n: u32, draws: u32) -> f64 {
    let logits = logits(n);
    let mut sampler = Sampler::new(sampling.clone(), &[]).unwrap();
    let expected = super::distribution(&mut sampler, &logits, None);
    // Token by token into groups of about the same probability, never splitting one.
    let mut group_of = vec![None; n as usize];
    let (mut group, mut sum, mut shares) = (0, 0.0, [0.0; GROUPS]);
    for &(token, p) in &expected {
        if sum >= (group + 1) as f64 / GROUPS as f64 && group + 1 < GROUPS {
            group += 1;
        }
        group_of[token as usize] = Some(group);
        shares[group] += p;
        sum += p;
    }
    let mut counts = [0u32; GROUPS];
    for _ in 0..draws {
        let token = sampler.sample(&mut logits.clone(), None).unwrap();
        counts[group_of[token as usize].expect("a filtered token was drawn")] += 1;
    }
    let term = |(&count, &share): (&u32, &f64)| {
        let right = share * f64::from(draws);
        if right == 0.0 { 0.0 } else { (f64::from(count) - right).powi(2) / right }
    };
    counts.iter().zip(&shares).map(term).sum()
}

#[test]
fn draws_pass_chi_square() {
    let seeded = |seed| Sampling { seed, ..Sampling::default() };
    let cases = [
        (seeded(1), 500, 40_000),
        (Sampling { temperature: 0.7, ..seeded(2) }, 500, 40_000),
        (Sampling { temperature: 1.6, ..seeded(3) }, 49_152, 4_000),
        (Sampling { top_k: 100, ..seeded(4) }, 2_000, 20_000),
        (Sampling { top_p: 0.8, ..seeded(5) }, 2_000, 20_000),
        (Sampling { min_p: 0.01, ..seeded(6) }, 2_000, 20_000),
        (Sampling { top_k: 300, top_p: 0.95, min_p: 0.005, temperature: 1.3, ..seeded(7) }, 49_152, 4_000),
    ];
    for (sampling, n, draws) in cases {
        let statistic = chi_square(&sampling, n, draws);
        assert!(statistic < CRITICAL, "{statistic:.1} for {sampling:?} over {n}");
    }
}

#[test]
fn choices_with_other_seeds_are_independent() {
    // Choice i draws with seed + i: pairs of neighbours must fill the square evenly.
    let logits = [0.0f32; 8];
    let mut counts = [0u32; 64];
    for seed in 0..8_000 {
        let first = |seed| {
            let mut sampler = Sampler::new(Sampling { seed, ..Sampling::default() }, &[]).unwrap();
            sampler.sample(&mut logits.to_vec(), None).unwrap() as usize
        };
        counts[first(2 * seed) * 8 + first(2 * seed + 1)] += 1;
    }
    let right = 8_000.0 / 64.0;
    let statistic: f64 = counts.iter().map(|&n| (f64::from(n) - right).powi(2) / right).sum();
    // 63 degrees of freedom exceed this once in a thousand times.
    assert!(statistic < 103.4, "{statistic}");
}
