//! Cancels what was asked of a worker unless the worker ended it first.

use crate::fleet::{DecodeLink, LoadShare, PrefillLink};
use shared::control::{DecodeRequest, PrefillRequest};
use std::sync::Arc;

/// A request on a decode worker; dropping it cancels.
pub(super) struct DecodeGuard {
    link: Arc<DecodeLink>,
    request_id: String,
    ended: bool,
    _share: LoadShare,
}

impl DecodeGuard {
    pub(super) fn new(link: &Arc<DecodeLink>, request_id: &str, tokens: u32) -> Self {
        let share = link.load.take(tokens);
        Self { link: link.clone(), request_id: request_id.to_owned(), ended: false, _share: share }
    }

    /// The worker holds nothing for the request any more.
    pub(super) fn ended(&mut self) {
        self.ended = true;
    }
}

impl Drop for DecodeGuard {
    fn drop(&mut self) {
        if !self.ended {
            self.link
                .client
                .notify(&DecodeRequest::Cancel { request_id: std::mem::take(&mut self.request_id) });
        }
    }
}

/// A request on a prefill worker; dropping it cancels.
pub(super) struct PrefillGuard {
    link: Arc<PrefillLink>,
    request_id: String,
    ended: bool,
    _share: LoadShare,
}

impl PrefillGuard {
    pub(super) fn new(link: &Arc<PrefillLink>, request_id: &str, tokens: u32) -> Self {
        let share = link.load.take(tokens);
        Self { link: link.clone(), request_id: request_id.to_owned(), ended: false, _share: share }
    }

    /// The worker holds nothing for the request any more.
    pub(super) fn ended(&mut self) {
        self.ended = true;
    }
}

impl Drop for PrefillGuard {
    fn drop(&mut self) {
        if !self.ended {
            self.link
                .client
                .notify(&PrefillRequest::Cancel { request_id: std::mem::take(&mut self.request_id) });
        }
    }
}
