//! The transfer digest that both ends compute.

use crate::layout::Part;
use std::collections::BTreeMap;

/// Collects the hash of every data frame and folds them in canonical order (layer, part, token start),
/// so that the result does not depend on the order of arrival.
#[derive(Debug, Default, Clone)]
pub struct TransferDigest {
    frames: BTreeMap<(u16, u16, u32), (u32, [u8; 32])>,
    payload_bytes: u64,
}

impl TransferDigest {
    /// Adds one data frame.
    pub fn add(&mut self, layer: u16, part: Part, token_start: u32, token_count: u32, payload: &[u8]) {
        let hash = *blake3::hash(payload).as_bytes();
        self.frames.insert((layer, part as u16, token_start), (token_count, hash));
        self.payload_bytes += payload.len() as u64;
    }

    /// Data frames so far.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames.len() as u64
    }

    /// Payload bytes so far.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// BLAKE3 over `layer u16 ‖ part u16 ‖ token_start u32 ‖ token_count u32 ‖ BLAKE3(payload)` of every
    /// frame, little-endian, in canonical order.
    #[must_use]
    pub fn finish(&self) -> [u8; 32] {
        let mut h = blake3::Hasher::new();
        h.update(b"pd-bridge/transfer/v1");
        for ((layer, part, start), (count, hash)) in &self.frames {
            h.update(&layer.to_le_bytes());
            h.update(&part.to_le_bytes());
            h.update(&start.to_le_bytes());
            h.update(&count.to_le_bytes());
            h.update(hash);
        }
        *h.finalize().as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_of_arrival_does_not_matter_but_content_does() {
        let mut a = TransferDigest::default();
        a.add(0, Part::K, 0, 4, b"one");
        a.add(1, Part::V, 4, 4, b"two");
        let mut b = TransferDigest::default();
        b.add(1, Part::V, 4, 4, b"two");
        b.add(0, Part::K, 0, 4, b"one");
        assert_eq!(a.finish(), b.finish());
        assert_eq!((a.frames(), a.payload_bytes()), (2, 6));
        let mut c = TransferDigest::default();
        c.add(0, Part::K, 0, 4, b"one");
        c.add(1, Part::V, 4, 4, b"twO");
        assert_ne!(a.finish(), c.finish());
    }
}
