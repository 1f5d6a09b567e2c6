//! Keys that sign commands: ed25519, written the way NATS writes its own (`SU…` secret, `U…` public).

use nkeys::{KeyPair, KeyPairType};
use std::path::{Path, PathBuf};

/// An operator's secret key.
pub struct OperatorKey(KeyPair);

/// An operator's public key.
#[derive(Clone)]
pub struct PublicKey {
    text: String,
    pair: std::sync::Arc<KeyPair>,
}

/// A key that can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The file can't be read.
    #[error("{file}: {source}")]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Others on this machine can read the secret.
    #[error("{file}: others can read it; `chmod 600` it")]
    Exposed {
        /// The file.
        file: PathBuf,
    },
    /// Not the seed of a user key.
    #[error("{0} holds no nkey seed of a user (a line that starts with SU)")]
    Seed(String),
    /// Not the public part of a user key.
    #[error("`{0}` is no public nkey of a user (56 characters, the first U)")]
    Public(String),
    /// Signing failed.
    #[error("signing: {0}")]
    Sign(#[from] nkeys::error::Error),
}

impl OperatorKey {
    /// Reads a seed. Lines that don't start with `SU` are comments.
    ///
    /// # Errors
    /// [`KeyError::Unreadable`], [`KeyError::Exposed`], [`KeyError::Seed`].
    pub fn from_file(file: &Path) -> Result<Self, KeyError> {
        use std::os::unix::fs::PermissionsExt as _;
        let unreadable = |source| KeyError::Unreadable { file: file.to_owned(), source };
        if std::fs::metadata(file).map_err(unreadable)?.permissions().mode() & 0o077 != 0 {
            return Err(KeyError::Exposed { file: file.to_owned() });
        }
        let seed = read_seed(file)?;
        Self::from_seed(&seed).map_err(|_| KeyError::Seed(file.display().to_string()))
    }

    /// From the text of a seed.
    ///
    /// # Errors
    /// [`KeyError::Seed`]; the message never holds the seed.
    pub fn from_seed(seed: &str) -> Result<Self, KeyError> {
        match KeyPair::from_seed(seed.trim()) {
            Ok(pair) if matches!(pair.key_pair_type(), KeyPairType::User) => Ok(Self(pair)),
            _ => Err(KeyError::Seed("the text".to_owned())),
        }
    }

    /// A new key.
    #[must_use]
    pub fn generate() -> Self {
        Self(KeyPair::new_user())
    }

    /// The text of the seed: a secret.
    ///
    /// # Errors
    /// [`KeyError::Sign`].
    pub fn seed(&self) -> Result<String, KeyError> {
        Ok(self.0.seed()?)
    }

    /// The public part, as text.
    #[must_use]
    pub fn public(&self) -> String {
        self.0.public_key()
    }

    /// Signs bytes.
    ///
    /// # Errors
    /// [`KeyError::Sign`].
    pub fn sign(&self, bytes: &[u8]) -> Result<Vec<u8>, KeyError> {
        Ok(self.0.sign(bytes)?)
    }
}

impl std::fmt::Debug for OperatorKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OperatorKey({})", self.public())
    }
}

impl PublicKey {
    /// From its text.
    ///
    /// # Errors
    /// [`KeyError::Public`].
    pub fn new(text: &str) -> Result<Self, KeyError> {
        match KeyPair::from_public_key(text) {
            Ok(pair) if matches!(pair.key_pair_type(), KeyPairType::User) => {
                Ok(Self { text: text.to_owned(), pair: pair.into() })
            }
            _ => Err(KeyError::Public(text.chars().take(80).collect())),
        }
    }

    /// Its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the signature is this key's over the bytes.
    #[must_use]
    pub fn verifies(&self, bytes: &[u8], signature: &[u8]) -> bool {
        self.pair.verify(bytes, signature).is_ok()
    }
}

impl std::fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// The seed line of an nkey file.
pub(super) fn read_seed(file: &Path) -> Result<String, KeyError> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| KeyError::Unreadable { file: file.to_owned(), source })?;
    let seed = text.lines().map(str::trim).find(|l| l.starts_with("SU"));
    seed.map(str::to_owned).ok_or_else(|| KeyError::Seed(file.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_key_verifies() {
        let (a, b) = (OperatorKey::generate(), OperatorKey::generate());
        let signature = a.sign(b"x").unwrap();
        assert!(PublicKey::new(&a.public()).unwrap().verifies(b"x", &signature));
        assert!(!PublicKey::new(&a.public()).unwrap().verifies(b"y", &signature));
        assert!(!PublicKey::new(&b.public()).unwrap().verifies(b"x", &signature));
        assert!(!PublicKey::new(&a.public()).unwrap().verifies(b"x", &signature[..63]));
    }

    #[test]
    fn a_key_file_is_private_and_holds_a_users_seed() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        let key = OperatorKey::generate();
        std::fs::write(&file, format!("# mine\n{}\n", key.seed().unwrap())).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(OperatorKey::from_file(&file), Err(KeyError::Exposed { .. })));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(OperatorKey::from_file(&file).unwrap().public(), key.public());
        std::fs::write(&file, KeyPair::new_account().seed().unwrap()).unwrap();
        assert!(matches!(OperatorKey::from_file(&file), Err(KeyError::Seed(_))));
        assert!(PublicKey::new(&KeyPair::new_account().public_key()).is_err());
        assert!(PublicKey::new("U").is_err());
    }
}
