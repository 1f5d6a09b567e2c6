//! Token ids as they travel in control messages: base64 of u32 LE, so 236K tokens stay near 1 MB.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::sync::Arc;

/// A shared, immutable list of token ids.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenIds(pub Arc<[u32]>);

impl std::ops::Deref for TokenIds {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        &self.0
    }
}

impl From<Vec<u32>> for TokenIds {
    fn from(ids: Vec<u32>) -> Self {
        Self(ids.into())
    }
}

impl Serialize for TokenIds {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|t| t.to_le_bytes()).collect();
        s.serialize_str(&STANDARD.encode(bytes))
    }
}

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
        let bytes = STANDARD.decode(text.as_bytes()).map_err(serde::de::Error::custom)?;
        let (words, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(serde::de::Error::custom("token ids: length is not a multiple of four bytes"));
        }
        Ok(Self(words.iter().map(|w| u32::from_le_bytes(*w)).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_bad_input() {
        let ids = TokenIds::from(vec![0, 1, 49151, u32::MAX]);
        let json = serde_json::to_string(&ids).unwrap();
        assert_eq!(serde_json::from_str::<TokenIds>(&json).unwrap(), ids);
        assert!(serde_json::from_str::<TokenIds>("\"AAA=\"").is_err());
        assert!(serde_json::from_str::<TokenIds>("\"!\"").is_err());
    }
}
