//! A constraint along one answer.

use super::{ConstraintError, TokenMask};
use llguidance::api::StopReason;
use std::sync::Arc;

/// Follows one answer. Clones begin where this one is, and go their own way from there.
#[derive(Clone)]
pub struct Matcher {
    inner: llguidance::Matcher,
    end_tokens: Arc<[u32]>,
}

impl Matcher {
    pub(super) fn new(inner: llguidance::Matcher, end_tokens: Arc<[u32]>) -> Self {
        Self { inner, end_tokens }
    }

    /// A matcher that shares nothing with this one, not even caches.
    pub(super) fn fresh(&self) -> Self {
        Self { inner: self.inner.deep_clone(), end_tokens: self.end_tokens.clone() }
    }

    /// Tokens that may come next; an end token is among them exactly when the answer may end here. Once the answer
    /// [is finished](Self::is_finished), end tokens only.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`] when the grammar became too complex. The answer must end then.
    pub fn mask(&mut self) -> Result<TokenMask, ConstraintError> {
        self.inner.compute_mask_or_eos().map(TokenMask::new).map_err(stuck)
    }

    /// Goes on by one token, which the mask must have allowed.
    ///
    /// # Errors
    /// [`ConstraintError::Stuck`] for a token that may not come here, or when the grammar became too complex.
    pub fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if self.is_finished() && self.end_tokens.contains(&token) {
            return Ok(());
        }
        self.inner.consume_token(token).map_err(stuck)
    }

    /// Whether the answer is complete and nothing but an end token can follow, or has followed.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        matches!(self.inner.stop_reason(), StopReason::NoExtension | StopReason::EndOfSentence)
    }

    /// Tokens that end an answer; they are no part of its text.
    #[must_use]
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("stop_reason", &self.inner.stop_reason()).finish_non_exhaustive()
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn stuck(error: anyhow::Error) -> ConstraintError {
    ConstraintError::Stuck(super::compiler::first_line(&error))
}
