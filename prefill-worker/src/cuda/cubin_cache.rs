//! Compiled kernels on disk, keyed by source, options, architecture and compiler version.

use std::path::{Path, PathBuf};

use super::nvrtc;
use super::sources::Unit;
use crate::ops::OpsError;

/// Compiles units, or reads what an earlier start compiled.
pub(super) struct CubinCache {
    dir: Option<PathBuf>,
    architecture: String,
    compiler: (i32, i32),
}

impl CubinCache {
    /// A cache for one architecture; without a folder everything is compiled.
    pub(super) fn new(dir: Option<PathBuf>, architecture: String) -> Result<Self, OpsError> {
        Ok(Self { dir, architecture, compiler: nvrtc::version()? })
    }

    /// Machine code of a unit. A cache that cannot be read or written only costs time.
    pub(super) fn load(&self, unit: &Unit) -> Result<Vec<u8>, OpsError> {
        let source = unit.source();
        let options = unit.options(&self.architecture);
        let file = self.dir.as_ref().map(|dir| dir.join(format!("{}.cubin", self.key(&source, &options))));
        if let Some(cubin) = file.as_deref().and_then(read) {
            return Ok(cubin);
        }
        let start = std::time::Instant::now();
        let cubin = nvrtc::compile(unit.name, &source, &options)?;
        tracing::debug!(unit = unit.name, ms = start.elapsed().as_millis(), "compiled");
        if let Some(file) = file
            && let Err(error) = write(&file, &cubin)
        {
            tracing::warn!(file = %file.display(), %error, "kernel cache not written");
        }
        Ok(cubin)
    }

    fn key(&self, source: &str, options: &[String]) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"pd-bridge/kernel/v1");
        hasher.update(&self.compiler.0.to_le_bytes());
        hasher.update(&self.compiler.1.to_le_bytes());
        for part in options.iter().map(String::as_str).chain([self.architecture.as_str(), source]) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }
}

/// A cached file is its own digest followed by the machine code; anything else is ignored.
fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (digest, cubin) = bytes.split_at_checked(32)?;
    (blake3::hash(cubin).as_bytes() == digest).then(|| cubin.to_vec())
}

/// Written beside and renamed, so that a reader never meets half a file.
fn write(file: &Path, cubin: &[u8]) -> std::io::Result<()> {
    if let Some(dir) = file.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let mut bytes = blake3::hash(cubin).as_bytes().to_vec();
    bytes.extend_from_slice(cubin);
    let unfinished = file.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&unfinished, bytes)?;
    std::fs::rename(unfinished, file)
}

#[cfg(test)]
mod tests {
    use super::{read, write};

    #[test]
    fn a_damaged_file_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a").join("k.cubin");
        write(&file, b"machine code").unwrap();
        assert_eq!(read(&file).as_deref(), Some(&b"machine code"[..]));
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[40] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        assert_eq!(read(&file), None);
        std::fs::write(&file, b"short").unwrap();
        assert_eq!(read(&file), None);
    }
}
