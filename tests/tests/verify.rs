//! `pd-bridge verify --json` on the start model: same inputs give the same cache.
#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test fails by panicking; the measurement is shown"
)]

use pd_tests::{paths, process::Process};
use serde_json::Value;
use std::time::Duration;

/// Runs `verify` on the first `tokens` tokens of a text of this repository.
fn verify(model: &std::path::Path, dtype: &str, tokens: u32) -> Value {
    let golden = pd_tests::golden::load();
    let text = golden.prompts.iter().find(|p| p.name == "diary_53").unwrap().messages.as_ref().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, text[1]["content"].as_str().unwrap()).unwrap();
    let args: Vec<String> = [
        "verify",
        "--model",
        model.to_str().unwrap(),
        "--prompt-file",
        file.to_str().unwrap(),
        "--cache-dtype",
        dtype,
        "--prefill-backend",
        "cpu",
        "--max-prompt-tokens",
        &tokens.to_string(),
        "--json",
    ]
    .map(str::to_owned)
    .into();
    let mut process = Process::start("pd-bridge", &args);
    let report: Value = serde_json::from_str(&process.line()).unwrap();
    let status = process.wait(Duration::from_secs(10)).unwrap();
    eprintln!("{dtype}: {report}");
    assert!(status.success() == report["passed"].as_bool().unwrap());
    report
}

#[test]
fn same_input_gives_the_same_f16_cache() {
    let report = verify(&paths::model(), "f16", 300);
    let same = &report["same_input"];
    assert_eq!(
        (same["arrays"].as_u64(), same["arrays_within_1_step"].as_u64()),
        (Some(60), Some(60)),
        "{same}"
    );
    assert!(same["worst_steps"].as_f64().unwrap() <= 1.0);
    assert!(same["bit_identical_share"].as_f64().unwrap() >= 0.99, "{same}");
    assert_eq!(report["end_to_end"]["arrays"], 60);
    assert_eq!(report["transfer"]["digests_equal"], true);
    assert!(report["kl_first_token"].as_f64().unwrap().abs() < 1e-3);
    assert_eq!(report["passed"], true);
}

#[test]
fn every_cache_dtype_is_within_its_bound() {
    for dtype in ["f32", "f16", "bf16"] {
        let report = verify(pd_tests::tiny::model(), dtype, 600);
        assert_eq!(report["passed"], true, "{report}");
        assert_eq!(report["cache_dtype"], dtype);
        assert_eq!(report["same_input"]["arrays"], 8);
    }
}
