//! Fixed-size byte strings that travel as lowercase hex in JSON.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// `N` bytes, shown and serialized as lowercase hex.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hex<const N: usize>(pub [u8; N]);

impl<const N: usize> Hex<N> {
    /// Fresh random bytes from the operating system's generator.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; N];
        rand::fill(&mut bytes[..]);
        Self(bytes)
    }
}

impl<const N: usize> std::fmt::Display for Hex<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl<const N: usize> std::fmt::Debug for Hex<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl<const N: usize> Serialize for Hex<N> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&hex::encode(self.0))
    }
}

impl<'de, const N: usize> Deserialize<'de> for Hex<N> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
        let mut bytes = [0; N];
        hex::decode_to_slice(text.as_ref(), &mut bytes)
            .map_err(|e| serde::de::Error::custom(format!("expected {N} bytes of hex: {e}")))?;
        Ok(Self(bytes))
    }
}
