//! The file of API keys: TOML, one key a line.
//!
//! ```toml
//! alice = "the key itself, at least 16 characters"
//! bob = "sha256:6ca13d52ca70c883e0f0bb101e425a89e8624de51db2d2392593af6a84118090"
//! grafana = { key = "…", admin = true }
//! batch = { key = "sha256:…", requests_per_min = 120, max_concurrent = 8 }
//! ```

use super::{ApiKey, KeyLimits, digest};
use serde::Deserialize;
use shared::settings::SettingsError;
use std::num::NonZeroU32;
use std::path::Path;

/// Fewest characters of a key: what is shorter can be guessed.
const MIN_KEY_CHARS: usize = 16;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: String,
    #[serde(default)]
    admin: bool,
    requests_per_min: Option<u32>,
    max_concurrent: Option<u32>,
}

/// Reads the keys. An entry's limit of 0 lifts the default.
///
/// # Errors
/// [`SettingsError`] naming the file and the entry, never showing a key.
pub(crate) fn read(file: &Path, defaults: KeyLimits) -> Result<Vec<ApiKey>, SettingsError> {
    let unreadable = |source| SettingsError::Unreadable { file: file.to_owned(), source };
    let in_file = |key: &str, message: String| SettingsError::InFile {
        file: file.to_owned(),
        key: key.to_owned(),
        message,
    };
    let text = std::fs::read_to_string(file).map_err(unreadable)?;
    // The parser's own message would quote a line, and with it a key.
    let table: toml::Table = text.parse().map_err(|_| in_file("(syntax)", "not a TOML file".to_owned()))?;
    let keys = table
        .into_iter()
        .map(|(name, value)| key(&name, value, defaults).map_err(|message| in_file(&name, message)))
        .collect::<Result<Vec<_>, _>>()?;
    if keys.is_empty() {
        return Err(in_file("(file)", "holds no key, so nobody could use the API".to_owned()));
    }
    Ok(keys)
}

fn key(name: &str, value: toml::Value, defaults: KeyLimits) -> Result<ApiKey, String> {
    let entry = match value {
        toml::Value::String(key) => Entry { key, admin: false, requests_per_min: None, max_concurrent: None },
        toml::Value::Table(_) => value.try_into().map_err(|_| {
            "must have `key`, and may have `admin`, `requests_per_min` and `max_concurrent`".to_owned()
        })?,
        _ => return Err("must be a string or a table".to_owned()),
    };
    let or_default = |own: Option<u32>, default| own.map_or(default, NonZeroU32::new);
    let limits = KeyLimits {
        requests_per_min: or_default(entry.requests_per_min, defaults.requests_per_min),
        max_concurrent: or_default(entry.max_concurrent, defaults.max_concurrent),
    };
    Ok(ApiKey::new(name, secret_digest(&entry.key)?, entry.admin, limits))
}

fn secret_digest(given: &str) -> Result<[u8; 32], String> {
    if let Some(hex_digest) = given.strip_prefix("sha256:") {
        let mut bytes = [0; 32];
        hex::decode_to_slice(hex_digest.trim(), &mut bytes)
            .map_err(|_| "`sha256:` must be followed by 64 hex digits".to_owned())?;
        return Ok(bytes);
    }
    if given.len() < MIN_KEY_CHARS {
        return Err(format!("an API key has at least {MIN_KEY_CHARS} characters"));
    }
    Ok(digest(given))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<ApiKey>, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys.toml");
        std::fs::write(&file, text).unwrap();
        let defaults = KeyLimits { requests_per_min: NonZeroU32::new(60), max_concurrent: None };
        read(&file, defaults).map_err(|e| e.to_string())
    }

    #[test]
    fn a_broken_file_never_shows_a_key() {
        for (text, names) in [
            ("alice = \"short\"", "alice"),
            ("bob = sk-very-secret", "syntax"),
            ("", "no key"),
            ("eve = { key = \"sk-very-secret-indeed\", limit = 4 }", "eve"),
            ("eve = { key = 7 }", "eve"),
            ("eve = \"sha256:secret\"", "eve"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(
                error.contains(names) && !error.contains("secret") && error.contains("keys.toml"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_key_may_be_given_by_its_digest_and_have_limits() {
        let hash = hex::encode(digest("sk-0123456789abcdef"));
        let text = format!(
            "plain = \"sk-0123456789abcdef\"\nhashed = \"sha256:{hash}\"\n\
             free = {{ key = \"sha256:{hash}\", admin = true, requests_per_min = 0, max_concurrent = 3 }}"
        );
        let keys = parse(&text).unwrap();
        assert!(keys.iter().all(|k| k.digest == digest("sk-0123456789abcdef")));
        let by_name = |name: &str| keys.iter().find(|k| &*k.name == name).unwrap();
        assert_eq!(by_name("plain").limits.requests_per_min, NonZeroU32::new(60));
        let free = by_name("free");
        assert!(free.admin && free.limits.requests_per_min.is_none() && !by_name("hashed").admin);
        assert_eq!(free.limits.max_concurrent, NonZeroU32::new(3));
    }
}
