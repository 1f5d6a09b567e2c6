//! Names of nodes.

use serde::{Deserialize, Serialize};

/// Name of a machine on the bus: 1 to 63 of `a-z`, `0-9` and `-`, so it is one token of a subject and a file name
/// anywhere.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeId(String);

/// A text that names no node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no node name: 1 to 63 of a-z, 0-9 and -")]
pub struct IdError(String);

impl NodeId {
    /// Takes a name as it is.
    ///
    /// # Errors
    /// [`IdError`] unless every character is allowed.
    pub fn new(name: impl Into<String>) -> Result<Self, IdError> {
        let name = name.into();
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if (1..=63).contains(&name.len()) && name.bytes().all(allowed) {
            return Ok(Self(name));
        }
        Err(IdError(name.chars().take(80).collect()))
    }

    /// Makes a name from a host name: lower case, the first label only, other characters as `-`.
    ///
    /// # Errors
    /// [`IdError`] when nothing usable is left.
    pub fn from_host(host: &str) -> Result<Self, IdError> {
        let first = host.split('.').next().unwrap_or_default().to_lowercase();
        let name: String =
            first.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(63).collect();
        Self::new(name.trim_matches('-')).map_err(|_| IdError(host.to_owned()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for NodeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for NodeId {
    type Err = IdError;
    fn from_str(name: &str) -> Result<Self, IdError> {
        Self::new(name)
    }
}

impl TryFrom<String> for NodeId {
    type Error = IdError;
    fn try_from(name: String) -> Result<Self, IdError> {
        Self::new(name)
    }
}

impl From<NodeId> for String {
    fn from(id: NodeId) -> Self {
        id.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_token_of_a_subject() {
        for good in ["a", "spark-1", "0"] {
            assert_eq!(NodeId::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "A", "a.b", "a*", ">", "a b", "ä", &"x".repeat(64)] {
            assert!(NodeId::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_host_name_becomes_a_name() {
        assert_eq!(NodeId::from_host("Annas-Mac_Studio.local").unwrap().as_str(), "annas-mac-studio");
        assert!(NodeId::from_host("...").is_err());
    }
}
