//! Metadata values.

/// One metadata value; numbers are widened to the largest type of their kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum GgufValue {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Unsigneds(Vec<u64>),
    Signeds(Vec<i64>),
    Floats(Vec<f64>),
    Bools(Vec<bool>),
    Strings(Vec<String>),
}

impl GgufValue {
    /// The value as a non-negative integer.
    pub(crate) fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(v) => Some(*v),
            Self::Signed(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// The value as a float; integers count.
    pub(crate) fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Float(v) => Some(*v),
            Self::Unsigned(v) => Some(*v as f64),
            Self::Signed(v) => Some(*v as f64),
            _ => None,
        }
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(v) => Some(*v),
            _ => None,
        }
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(v) => Some(v),
            _ => None,
        }
    }

    pub(crate) fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Strings(v) => Some(v),
            _ => None,
        }
    }

    /// An array of integers of either sign.
    pub(crate) fn as_i64s(&self) -> Option<Vec<i64>> {
        match self {
            Self::Signeds(v) => Some(v.clone()),
            Self::Unsigneds(v) => v.iter().map(|x| i64::try_from(*x).ok()).collect(),
            _ => None,
        }
    }
}
