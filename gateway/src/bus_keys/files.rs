//! A folder whose secrets nobody else on the machine can read.

use super::BusKeysError;
use std::fs::{DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// A folder, made with mode 0700.
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Opens it, making it if need be.
    pub(super) fn open(path: &Path) -> Result<Self, BusKeysError> {
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(at(path))?;
        Ok(Self(path.to_owned()))
    }

    /// A folder in it.
    pub(super) fn sub(&self, name: &str) -> Result<Self, BusKeysError> {
        Self::open(&self.0.join(name))
    }

    /// Whether there is such a file or folder.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.join(name).exists()
    }

    /// Where a file of it is.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file's text; `None` where there is none.
    pub(super) fn read(&self, name: &str) -> Result<Option<String>, BusKeysError> {
        let path = self.0.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(at(&path)(e)),
        }
    }

    /// Replaces a file that everybody may read.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<(), BusKeysError> {
        self.replace(name, text, 0o644)
    }

    /// Replaces a file that only its owner may read.
    pub(super) fn write_secret(&self, name: &str, text: &str) -> Result<(), BusKeysError> {
        self.replace(name, text, 0o600)
    }

    /// Deletes a folder in it.
    pub(super) fn delete(&self, name: &str) -> Result<(), BusKeysError> {
        let path = self.0.join(name);
        match std::fs::remove_dir_all(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(at(&path)(e)),
            _ => Ok(()),
        }
    }

    /// Writes beside the old file and renames, so that a crash or a full disk leaves the old one.
    fn replace(&self, name: &str, text: &str, mode: u32) -> Result<(), BusKeysError> {
        let (path, beside) = (self.0.join(name), self.0.join(format!("{name}.new")));
        let write = || {
            if let Err(e) = std::fs::remove_file(&beside)
                && e.kind() != std::io::ErrorKind::NotFound
            {
                return Err(e);
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&beside, &path)
        };
        write().map_err(at(&path))
    }
}

fn at(file: &Path) -> impl Fn(std::io::Error) -> BusKeysError {
    let file = file.to_owned();
    move |source| BusKeysError::File { file: file.clone(), source }
}
