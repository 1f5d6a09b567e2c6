//! Finding the CUDA libraries at run time.
//!
//! `cudarc` loads libraries by plain name. Loading them here first, by path, makes that succeed wherever they lie: the
//! dynamic linker answers a later request for the same soname with the library that is already there.

use std::path::{Path, PathBuf};

use crate::ops::OpsError;

/// Loads NVRTC from `dirs` or the usual places. Enough to compile kernels on a machine without a GPU.
///
/// # Errors
/// [`OpsError::Unsupported`] naming what was not found and where it was looked for.
pub(super) fn preload_nvrtc(dirs: &[PathBuf]) -> Result<(), OpsError> {
    preload("libnvrtc-builtins.so", dirs);
    preload("libnvrtc.so", dirs);
    // SAFETY: opening NVRTC runs only its own initializers.
    if unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        Ok(())
    } else {
        Err(missing("NVRTC (libnvrtc.so)", dirs))
    }
}

/// Loads everything the backend needs: driver, NVRTC, cublasLt.
///
/// # Errors
/// [`OpsError::Unsupported`] naming the first library that was not found.
pub(super) fn preload_all(dirs: &[PathBuf]) -> Result<(), OpsError> {
    // SAFETY: opening the driver library runs only its own initializers.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(OpsError::Unsupported("no NVIDIA driver here (libcuda.so was not found)".into()));
    }
    preload_nvrtc(dirs)?;
    preload("libcublasLt.so", dirs);
    // SAFETY: as above, for cublasLt.
    if unsafe { cudarc::cublaslt::sys::is_culib_present() } {
        Ok(())
    } else {
        Err(missing("cublasLt (libcublasLt.so)", dirs))
    }
}

/// Folders where CUDA is usually installed, after the ones the user named.
fn search_path(dirs: &[PathBuf]) -> Vec<PathBuf> {
    let mut all = dirs.to_vec();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = std::env::var_os(variable) {
            all.push(PathBuf::from(home).join("lib64"));
        }
    }
    all.extend(["/usr/local/cuda/lib64", "/opt/cuda/lib64", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from));
    all.push(PathBuf::from("/usr/lib/aarch64-linux-gnu"));
    all
}

/// Loads the first file `stem[.version]` found and keeps it for the life of the process.
fn preload(stem: &str, dirs: &[PathBuf]) {
    for dir in search_path(dirs) {
        for file in candidates(&dir, stem) {
            // SAFETY: opening a CUDA library runs only its own initializers.
            if let Ok(library) = unsafe { libloading::Library::new(&file) } {
                tracing::debug!(file = %file.display(), "loaded");
                std::mem::forget(library);
                return;
            }
        }
    }
}

/// Files in `dir` called `stem` or `stem.N…`, highest version first. Alternate builds (`.alt.`) never match.
fn candidates(dir: &Path, stem: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .and_then(|name| name.strip_prefix(stem))
                .is_some_and(|rest| {
                    rest.is_empty()
                        || rest.strip_prefix('.').is_some_and(|v| v.starts_with(|c: char| c.is_ascii_digit()))
                })
        })
        .collect();
    files.sort();
    files.reverse();
    files
}

fn missing(what: &str, dirs: &[PathBuf]) -> OpsError {
    let looked: Vec<String> = search_path(dirs).iter().map(|dir| dir.display().to_string()).collect();
    OpsError::Unsupported(format!("{what} was not found by the dynamic linker nor in {}", looked.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::candidates;

    #[test]
    fn versions_are_tried_from_the_highest_and_alternates_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "libnvrtc.so.12",
            "libnvrtc.so.13",
            "libnvrtc.alt.so.13",
            "libnvrtc.so",
            "libnvrtc-builtins.so.13.0",
        ] {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        let names: Vec<String> = candidates(dir.path(), "libnvrtc.so")
            .iter()
            .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(names, ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]);
    }
}
