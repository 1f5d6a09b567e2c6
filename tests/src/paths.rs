//! Where things are.

use std::path::PathBuf;

/// Root of the repository.
#[must_use]
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A release binary of this workspace (`PD_TEST_BIN_DIR` looks elsewhere).
#[must_use]
pub fn bin(name: &str) -> PathBuf {
    let dir =
        std::env::var_os("PD_TEST_BIN_DIR").map_or_else(|| root().join("target/release"), PathBuf::from);
    let path = dir.join(name);
    assert!(path.exists(), "{} is missing: run `cargo build --release --bins` first", path.display());
    path
}

/// The start model that `make setup` fetches (`PD_TEST_MODEL` names another place).
#[must_use]
pub fn model() -> PathBuf {
    let default = || root().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    let path = std::env::var_os("PD_TEST_MODEL").map_or_else(default, PathBuf::from);
    assert!(path.exists(), "{} is missing: run `make setup` first", path.display());
    path
}
