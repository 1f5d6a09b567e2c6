//! Which decoders can be served now, and which of them are in use.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use shared::hexbytes::Hex;

/// Fingerprints of paired decoders, each with the number of requests that need it. The engine thread adds and
/// removes, everyone else holds.
#[derive(Debug, Clone, Default)]
pub(super) struct Registry(Arc<Mutex<HashMap<Hex<32>, usize>>>);

/// A decoder that stays paired while this lives.
#[derive(Debug)]
pub struct Held {
    registry: Registry,
    fingerprint: Hex<32>,
}

impl Registry {
    pub(super) fn add(&self, fingerprint: Hex<32>) {
        self.0.lock().entry(fingerprint).or_insert(0);
    }

    /// Removes a decoder unless it is in use.
    pub(super) fn remove_idle(&self, fingerprint: &Hex<32>) -> bool {
        let mut decoders = self.0.lock();
        let idle = decoders.get(fingerprint).is_none_or(|users| *users == 0);
        if idle {
            decoders.remove(fingerprint);
        }
        idle
    }

    pub(super) fn contains(&self, fingerprint: &Hex<32>) -> bool {
        self.0.lock().contains_key(fingerprint)
    }

    pub(super) fn hold(&self, fingerprint: &Hex<32>) -> Option<Held> {
        *self.0.lock().get_mut(fingerprint)? += 1;
        Some(Held { registry: self.clone(), fingerprint: *fingerprint })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(users) = self.registry.0.lock().get_mut(&self.fingerprint) {
            *users -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_stays() {
        let (registry, a) = (Registry::default(), Hex([1; 32]));
        assert!(registry.hold(&a).is_none());
        registry.add(a);
        let held = [registry.hold(&a).unwrap(), registry.hold(&a).unwrap()];
        registry.add(a);
        assert!(!registry.remove_idle(&a));
        drop(held);
        assert!(registry.remove_idle(&a) && !registry.contains(&a));
    }
}
