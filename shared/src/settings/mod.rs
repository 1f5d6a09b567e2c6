//! Configuration, read the same way by every binary.
//!
//! One TOML file may hold a section for each program; flags and environment go before the file. A bad
//! setting is a [`SettingsError`] that names the key and where it came from; mains end with
//! [`EXIT_BAD_SETTING`] before any port is bound.

mod logging;
mod process;

pub use logging::init_logging;
pub use process::{resident_memory_bytes, shutdown_signal};

use crate::control::{ClusterKey, ClusterKeyError};
use serde::de::DeserializeOwned;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Exit code for a bad setting (`EX_USAGE` of sysexits.h).
pub const EXIT_BAD_SETTING: u8 = 64;

/// A setting that can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The file can't be read.
    #[error("{file}: {source}")]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no TOML, or a key in it is unknown or has the wrong type.
    #[error("{file}: key `{key}`: {message}")]
    InFile {
        /// The file.
        file: PathBuf,
        /// Dotted path of the key.
        key: String,
        /// What is wrong.
        message: String,
    },
    /// A value is not allowed, wherever it came from.
    #[error("setting `{key}`: {message}")]
    Value {
        /// Name of the setting.
        key: String,
        /// What is wrong.
        message: String,
    },
}

impl SettingsError {
    /// A bad value of a named setting.
    pub fn value(key: impl Into<String>, message: impl std::fmt::Display) -> Self {
        Self::Value { key: key.into(), message: message.to_string() }
    }
}

/// Reads one section of a TOML file; an absent section is the type's default.
///
/// # Errors
/// [`SettingsError::Unreadable`], [`SettingsError::InFile`] (unknown keys included, if `T` denies them).
pub fn section<T: DeserializeOwned + Default>(file: &Path, section: &str) -> Result<T, SettingsError> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| SettingsError::Unreadable { file: file.to_owned(), source })?;
    let in_file = |key: &str, message: String| SettingsError::InFile {
        file: file.to_owned(),
        key: key.to_owned(),
        message,
    };
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| in_file("(syntax)", e.to_string()))?;
    if let Some(unknown) = table.keys().find(|k| !SECTIONS.contains(&k.as_str())) {
        return Err(in_file(unknown, format!("unknown section; known are {}", SECTIONS.join(", "))));
    }
    let Some(value) = table.get(section) else { return Ok(T::default()) };
    serde_path_to_error::deserialize(value.clone()).map_err(|e| {
        let path = e.path().to_string();
        let key = if path == "." { section.to_owned() } else { format!("{section}.{path}") };
        in_file(&key, e.into_inner().message().to_owned())
    })
}

/// Sections that a configuration file may have.
pub const SECTIONS: [&str; 5] = ["gateway", "prefill", "decode", "agent", "operator"];

/// The key that guards control connections on `addrs`: loopback needs none, anything else does.
///
/// # Errors
/// [`SettingsError::Value`] when a secret is missing, unreadable or too short.
pub fn cluster_key(file: Option<&Path>, addrs: &[(&str, SocketAddr)]) -> Result<ClusterKey, SettingsError> {
    if let Some(file) = file {
        return ClusterKey::from_file(file).map_err(|e: ClusterKeyError| {
            SettingsError::value("cluster_key_file", format!("{}: {e}", file.display()))
        });
    }
    match addrs.iter().find(|(_, addr)| !addr.ip().is_loopback()) {
        None => Ok(ClusterKey::loopback()),
        Some((key, addr)) => Err(SettingsError::value(
            *key,
            format!("{addr} is not a loopback address, so a cluster_key_file is required"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields, default)]
    struct Part {
        port: u16,
    }

    fn read(text: &str) -> Result<Part, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        std::fs::write(&file, text).unwrap();
        section(&file, "gateway").map_err(|e| e.to_string())
    }

    #[test]
    fn errors_name_file_and_key() {
        assert_eq!(read("[gateway]\nport = 1"), Ok(Part { port: 1 }));
        assert_eq!(read("[decode]\nx = 1"), Ok(Part::default()));
        for (text, key) in [
            ("[gateway]\nport = \"x\"", "gateway.port"),
            ("[gateway]\nprot = 1", "prot"),
            ("[gatewya]\nport = 1", "gatewya"),
            ("[gateway", "syntax"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(key) && error.contains("c.toml"), "{error}");
        }
    }

    #[test]
    fn only_loopback_goes_without_a_key() {
        let addr = |s: &str| [("decode.listen", s.parse().unwrap())];
        assert!(cluster_key(None, &addr("127.0.0.1:1")).is_ok());
        assert!(cluster_key(None, &addr("[::1]:1")).is_ok());
        let error = cluster_key(None, &addr("0.0.0.0:1")).unwrap_err().to_string();
        assert!(error.contains("decode.listen"), "{error}");
    }
}
