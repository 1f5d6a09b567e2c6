//! A Chromium to test pages with: the one of this machine, or Debian's, unpacked beside the build.

use crate::paths;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How to start a browser.
#[derive(Debug)]
pub struct Chromium {
    /// The program.
    pub program: PathBuf,
    /// `LD_LIBRARY_PATH` that it needs; empty for an installed one.
    pub library_path: String,
}

/// Names under which an installed Chromium or Chrome is looked for.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// Where macOS keeps it.
const MAC: &str = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome";

/// Finds a browser (`PD_TEST_CHROMIUM` names one) or unpacks Debian's.
///
/// # Panics
/// When there is none and none can be had, with what to do.
#[must_use]
pub fn chromium() -> Chromium {
    let installed = |program| Chromium { program, library_path: String::new() };
    if let Some(named) = std::env::var_os("PD_TEST_CHROMIUM") {
        return installed(named.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).flat_map(|dir| NAMES.map(|name| dir.join(name)));
    if let Some(found) = in_path.chain([PathBuf::from(MAC)]).find(|program| program.exists()) {
        return installed(found);
    }
    let script = paths::root().join("deploy/setup/debian_package.sh");
    let unpacked = Command::new(script).arg("chromium").output().unwrap();
    assert!(
        unpacked.status.success(),
        "no Chromium (PD_TEST_CHROMIUM can name one): {}",
        String::from_utf8_lossy(&unpacked.stderr)
    );
    let folder = PathBuf::from(String::from_utf8(unpacked.stdout).unwrap().trim());
    Chromium { program: folder.join("usr/lib/chromium/chromium"), library_path: library_path(&folder) }
}

/// Every folder of an unpacked package that holds shared libraries.
fn library_path(folder: &Path) -> String {
    let mut folders = Vec::new();
    let mut left: Vec<_> = ["usr/lib", "lib"].map(|f| folder.join(f)).into();
    while let Some(dir) = left.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        let mut has_library = false;
        for entry in entries.flatten() {
            let path = entry.path();
            has_library |= entry.file_name().to_string_lossy().contains(".so");
            if path.is_dir() && !path.is_symlink() {
                left.push(path);
            }
        }
        if has_library {
            folders.push(dir.to_string_lossy().into_owned());
        }
    }
    folders.join(":")
}
