//! Who may use the API: named keys, each with limits of its own, from a file that may change while serving.

mod file;
mod limits;
mod watch;

pub(crate) use file::read;
pub(crate) use limits::{KeyLimits, Refusal};
pub(crate) use watch::keep_current;

use arc_swap::ArcSwap;
use limits::Meter;
use sha2::{Digest as _, Sha256};
use std::path::PathBuf;
use std::sync::Arc;
use subtle::ConstantTimeEq as _;
use tokio::sync::OwnedSemaphorePermit;

/// One key. Its secret is known by its SHA-256 only.
#[derive(Debug, Clone)]
pub(crate) struct ApiKey {
    /// For logs; never secret.
    pub(crate) name: Arc<str>,
    /// Also opens `/metrics` and the live page.
    pub(crate) admin: bool,
    pub(crate) limits: KeyLimits,
    digest: [u8; 32],
    meter: Arc<Meter>,
}

impl ApiKey {
    /// A key whose secret has this SHA-256.
    pub(crate) fn new(name: &str, digest: [u8; 32], admin: bool, limits: KeyLimits) -> Self {
        Self { name: name.into(), admin, limits, digest, meter: Arc::new(Meter::new(limits)) }
    }

    /// A key with this secret.
    #[cfg(test)]
    pub(crate) fn of(name: &str, secret: &str) -> Self {
        Self::new(name, digest(secret), false, KeyLimits::default())
    }

    /// Counts a request against the key's limits. The permit is held until the request is over.
    ///
    /// # Errors
    /// [`Refusal`] saying which limit, and when to try again.
    pub(crate) fn admit(&self) -> Result<Option<OwnedSemaphorePermit>, Refusal> {
        self.meter.admit()
    }
}

/// The keys in force. Empty means that no key is asked for.
pub(crate) struct KeyRing {
    keys: ArcSwap<Vec<ApiKey>>,
    file: Option<PathBuf>,
    defaults: KeyLimits,
}

impl KeyRing {
    /// Keys that were read from `file`; a key without limits of its own has the defaults.
    pub(crate) fn new(keys: Vec<ApiKey>, file: Option<PathBuf>, defaults: KeyLimits) -> Self {
        Self { keys: ArcSwap::from_pointee(keys), file, defaults }
    }

    /// Whether requests need a key.
    pub(crate) fn is_on(&self) -> bool {
        !self.keys.load().is_empty()
    }

    /// The key with this secret. Compares with every key, each in constant time over digests, so that the time tells
    /// neither which one came close nor how long any of them is.
    pub(crate) fn find(&self, secret: &str) -> Option<ApiKey> {
        let digest = digest(secret);
        let mut found = None;
        for key in self.keys.load().iter() {
            if bool::from(key.digest.ct_eq(&digest)) {
                found = Some(key.clone());
            }
        }
        found
    }

    /// Takes a new set of keys. What a key has used of its limits stays counted if the limits are the same.
    fn replace(&self, mut keys: Vec<ApiKey>) {
        let old = self.keys.load();
        for key in &mut keys {
            if let Some(same) = old.iter().find(|o| o.name == key.name && o.limits == key.limits) {
                key.meter = same.meter.clone();
            }
        }
        self.keys.store(Arc::new(keys));
    }
}

fn digest(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    #[test]
    fn only_the_exact_key_is_found() {
        let keys = vec![ApiKey::of("a", "sk-aaaaaaaaaaaaaaaa"), ApiKey::of("b", "sk-bbbbbbbbbbbbbbbb")];
        let ring = KeyRing::new(keys, None, KeyLimits::default());
        assert_eq!(&*ring.find("sk-bbbbbbbbbbbbbbbb").unwrap().name, "b");
        assert!(ring.find("sk-bbbbbbbbbbbbbbb").is_none() && ring.find("").is_none());
    }

    #[test]
    fn a_reload_forgives_nothing() {
        let limits = KeyLimits { requests_per_min: NonZeroU32::new(1), ..KeyLimits::default() };
        let key = || ApiKey::new("a", digest("x"), false, limits);
        let ring = KeyRing::new(vec![key()], None, limits);
        assert!(ring.find("x").unwrap().admit().is_ok());
        ring.replace(vec![key()]);
        assert!(ring.find("x").unwrap().admit().is_err());
        // Other limits begin anew.
        let more = KeyLimits { requests_per_min: NonZeroU32::new(2), ..limits };
        ring.replace(vec![ApiKey::new("a", digest("x"), false, more)]);
        assert!(ring.find("x").unwrap().admit().is_ok());
    }
}
