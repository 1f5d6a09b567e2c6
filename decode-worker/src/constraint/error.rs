//! Why a constraint was refused, or could not be followed.

use std::time::Duration;

/// Failures of compiling or following a constraint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConstraintError {
    /// The text is too long to be looked at.
    #[error("the {kind} has {bytes} bytes, more than the {limit} that are accepted")]
    TooLarge {
        /// What it is.
        kind: &'static str,
        /// Its size.
        bytes: usize,
        /// Most that is accepted.
        limit: usize,
    },
    /// Brackets, or objects and arrays, inside each other.
    #[error("the {kind} is nested deeper than {limit} levels")]
    TooDeep {
        /// What it is.
        kind: &'static str,
        /// Most that is accepted.
        limit: usize,
    },
    /// Not JSON, not a grammar, an unsupported keyword, nothing that could satisfy it.
    #[error("{kind}: {message}")]
    Invalid {
        /// What it is.
        kind: &'static str,
        /// The cause.
        message: String,
    },
    /// The compiler needs too long.
    #[error("the {kind} takes more than {} ms to compile", limit.as_millis())]
    TooSlow {
        /// What it is.
        kind: &'static str,
        /// Longest time that is given.
        limit: Duration,
    },
    /// The answer cannot go on: the grammar became too complex, or was handed a token that it does not allow.
    #[error("the constraint cannot be followed: {0}")]
    Stuck(String),
    /// The vocabulary does not fit the compiler.
    #[error("vocabulary: {0}")]
    Vocabulary(String),
}
