//! Answers that must have a form: which tokens may come next.
//!
//! - [`Compiler`]: one per worker; turns a [`Constraint`](shared::control::Constraint) into a [`Matcher`], off the
//!   engine thread
//! - [`Matcher`]: one per answer; follows it token by token and says which tokens may come next
//! - [`TokenMask`]: such a set of tokens
//!
//! The grammars, and the walk over the vocabulary, are llguidance's.

mod compiler;
mod error;
mod formats;
mod grammar;
mod mask;
mod matcher;
mod recent;
#[cfg(test)]
mod tests;
mod vocabulary;

pub use compiler::Compiler;
pub use error::ConstraintError;
pub use mask::TokenMask;
pub use matcher::Matcher;
