//! The same cases through transformers and mlx-lm: see `golden/make_golden.py`.

use super::super::Sampler;
use serde::Deserialize;
use shared::control::Sampling;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    vocab: u64,
    seed: u64,
    squarings: u32,
    sampling: serde_json::Value,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    kept: Vec<(u32, f64)>,
}

/// As the script makes them, bit by bit.
fn logits(case: &Case) -> Vec<f32> {
    let logit = |i: u64| {
        let mut u = ((i * 2_654_435_761 + case.seed * 40503) % (1 << 32)) as f64 / 4_294_967_296.0;
        for _ in 0..case.squarings {
            u *= u;
        }
        (u * 20.0 - 10.0) as f32
    };
    (0..case.vocab).map(logit).collect()
}

/// The parameters of a case; those it does not name change nothing.
fn sampling(case: &Case) -> Sampling {
    let mut all = serde_json::to_value(Sampling::default()).unwrap();
    for (name, value) in case.sampling.as_object().unwrap() {
        all[name] = value.clone();
    }
    serde_json::from_value(all).unwrap()
}

fn agree(golden: &str) {
    let golden: Golden = serde_json::from_str(golden).unwrap();
    assert!(golden.cases.len() >= 16);
    for case in golden.cases {
        let mut sampler = Sampler::new(sampling(&case), &case.prompt).unwrap();
        for &token in &case.answer {
            sampler.penalties.record(token);
        }
        // Both round what is practically impossible to zero, at different sizes.
        let possible =
            |list: Vec<(u32, f64)>| list.into_iter().filter(|&(_, p)| p > 1e-30).collect::<Vec<_>>();
        let got = possible(super::distribution(&mut sampler, &logits(&case), None));
        let right = possible(case.kept);
        let what = (case.vocab, case.seed, case.sampling);
        let tokens = |list: &[(u32, f64)]| list.iter().map(|&(token, _)| token).collect::<Vec<_>>();
        assert_eq!(tokens(&got), tokens(&right), "{what:?}");
        for ((token, p), (_, q)) in got.into_iter().zip(right) {
            assert!((p - q).abs() <= 1e-6 + 1e-5 * q, "{what:?}: token {token}: {p} instead of {q}");
        }
    }
}

#[test]
fn as_transformers_does() {
    agree(include_str!("../golden/transformers.json"));
}

#[test]
fn as_mlx_lm_does() {
    agree(include_str!("../golden/mlx_lm.json"));
}
