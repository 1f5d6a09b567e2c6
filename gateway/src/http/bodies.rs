//! Reading request bodies: each of a limited size and within a limited time, all of them within limited memory.

use super::error::ApiError;
use axum::body::Body;
use http_body_util::BodyExt as _;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Time that a client gets to finish sending a body that is too large.
const DISCARD_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for the next piece of a body.
const STALL_LIMIT: Duration = Duration::from_secs(30);
/// Longest time that a whole body may take.
const BODY_LIMIT: Duration = Duration::from_secs(120);
/// When a client that found no memory may try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The place where bodies are kept.
#[derive(Debug)]
pub(crate) struct Bodies {
    limit_bytes: usize,
    total_bytes: usize,
    held_bytes: Arc<AtomicUsize>,
}

/// A body. It counts against the memory of all until it is dropped.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Held {
    bytes: Vec<u8>,
    share: Share,
}

impl Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Held {
    /// Forgets the bytes and keeps their share, for as long as something made from them is as large.
    pub(super) fn into_share(self) -> Share {
        self.share
    }
}

impl Bodies {
    /// Bodies of at most `limit_bytes`, and of `total_bytes` together.
    pub(crate) fn new(limit_bytes: usize, total_bytes: usize) -> Self {
        Self { limit_bytes, total_bytes, held_bytes: Arc::default() }
    }

    /// Reads one.
    ///
    /// # Errors
    /// 413, 408 when it stalls or takes too long, 429 when all bodies together are too much.
    pub(super) async fn read(&self, body: Body) -> Result<Held, ApiError> {
        self.read_within(body, STALL_LIMIT, BODY_LIMIT).await
    }

    async fn read_within(&self, mut body: Body, stall: Duration, total: Duration) -> Result<Held, ApiError> {
        let mut held = Held { bytes: Vec::new(), share: Share { of: self.held_bytes.clone(), bytes: 0 } };
        let end = Instant::now() + total;
        loop {
            let limit = end.min(Instant::now() + stall);
            let next = timeout_at(limit, body.frame()).await.map_err(|_| ApiError::body_too_slow())?;
            let Some(frame) = next else { break };
            let frame = frame.map_err(|e| ApiError::bad_body(format!("the body could not be read: {e}")))?;
            let Ok(data) = frame.into_data() else { continue };
            let error = if held.len() + data.len() > self.limit_bytes {
                ApiError::body_too_large(self.limit_bytes)
            } else if !held.share.grow(data.len(), self.total_bytes) {
                let why = "the bodies of all requests together need more memory than the server gives them";
                ApiError::too_many_requests(why, RETRY_AFTER)
            } else {
                held.bytes.extend_from_slice(&data);
                continue;
            };
            drop(held);
            // What the error costs is bounded, too.
            let _ = tokio::time::timeout(DISCARD_LIMIT, discard(body, self.limit_bytes)).await;
            return Err(error);
        }
        Ok(held)
    }
}

/// A part of the memory for bodies.
#[derive(Debug)]
pub(super) struct Share {
    of: Arc<AtomicUsize>,
    bytes: usize,
}

impl PartialEq for Share {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Share {}

impl Share {
    fn grow(&mut self, more: usize, most: usize) -> bool {
        let room = |held: usize| held.checked_add(more).filter(|sum| *sum <= most);
        let grown = self.of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_ok();
        if grown {
            self.bytes += more;
        }
        grown
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Reads on without keeping anything: a connection closed on unread bytes is reset, and the client would
/// never see why.
async fn discard(mut body: Body, limit_bytes: usize) {
    let mut seen = 0;
    while let Some(Ok(frame)) = body.frame().await {
        seen += frame.data_ref().map_or(0, |d| d.len());
        if seen > limit_bytes {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;

    #[tokio::test]
    async fn a_body_that_stalls_or_trickles_is_given_up() {
        let bodies = Bodies::new(4096, 4096);
        let ms = Duration::from_millis;
        let piece = || Ok::<_, std::convert::Infallible>(bytes::Bytes::from_static(b" "));
        let stalled =
            Body::from_stream(futures_util::stream::iter([piece()]).chain(futures_util::stream::pending()));
        let got = bodies.read_within(stalled, ms(20), ms(60_000)).await;
        assert_eq!(got.err(), Some(ApiError::body_too_slow()));
        let trickle = Body::from_stream(futures_util::stream::repeat(()).then(move |()| async move {
            tokio::time::sleep(ms(5)).await;
            piece()
        }));
        let got = bodies.read_within(trickle, ms(60_000), ms(40)).await;
        assert_eq!(got.err(), Some(ApiError::body_too_slow()));
        assert_eq!(bodies.held_bytes.load(Ordering::Relaxed), 0, "given up is given back");
    }

    #[tokio::test]
    async fn all_bodies_together_have_a_limit_and_each_gives_back_its_share() {
        let bodies = Bodies::new(600, 1000);
        let body = |bytes: usize| Body::from(vec![b' '; bytes]);
        let first = bodies.read(body(600)).await.unwrap();
        let refused = bodies.read(body(401)).await.unwrap_err();
        assert_eq!(refused.reason(), "too_many_requests");
        let second = bodies.read(body(400)).await.unwrap();
        assert_eq!((first.len(), second.len()), (600, 400));
        let share = first.into_share();
        assert!(bodies.read(body(1)).await.is_err(), "what was made of it is still there");
        drop(share);
        assert!(bodies.read(body(600)).await.is_ok());
        assert_eq!(bodies.read(body(601)).await.err(), Some(ApiError::body_too_large(600)));
        drop(second);
        assert_eq!(bodies.held_bytes.load(Ordering::Relaxed), 0);
    }
}
