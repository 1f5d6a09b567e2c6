//! Messages of one request between the task that reads the connection and the one that asked.
//!
//! A channel made for millions of messages allocates for thirty of them at once; a request has a handful, and most wait
//! for no longer than their reader takes to wake up.

use super::Incoming;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// What waits for one reader.
pub(super) struct Inbox<Ev>(Mutex<State<Ev>>);

struct State<Ev> {
    /// With the time when each was read from the socket.
    messages: VecDeque<(Instant, Incoming<Ev>)>,
    /// Nothing more will come.
    closed: bool,
    reader: Option<Waker>,
}

impl<Ev> Inbox<Ev> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { messages: VecDeque::new(), closed: false, reader: None }))
    }

    /// Adds a message; `false` when already `most` wait, in which case it is lost and nothing more may come.
    pub(super) fn put(&self, at: Instant, message: Incoming<Ev>, most: usize) -> bool {
        let mut state = self.lock();
        let fits = state.messages.len() < most;
        if fits {
            state.messages.push_back((at, message));
        } else {
            state.closed = true;
        }
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
        fits
    }

    /// Nothing more will come.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// The oldest message; `None` when there is none and nothing more will come.
    pub(super) fn poll(&self, cx: &Context<'_>) -> Poll<Option<(Instant, Incoming<Ev>)>> {
        let mut state = self.lock();
        if let Some(message) = state.messages.pop_front() {
            return Poll::Ready(Some(message));
        }
        if state.closed {
            return Poll::Ready(None);
        }
        match &mut state.reader {
            Some(reader) => reader.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    fn lock(&self) -> MutexGuard<'_, State<Ev>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_order_and_the_end_comes_last() {
        let (inbox, now) = (Inbox::new(), Instant::now());
        let cx = Context::from_waker(Waker::noop());
        assert!(inbox.poll(&cx).is_pending());
        for n in 0..3 {
            assert!(inbox.put(now, Incoming::Event(n), 3));
        }
        assert!(!inbox.put(now, Incoming::Event(3), 3));
        for n in 0..3 {
            assert!(matches!(inbox.poll(&cx), Poll::Ready(Some((_, Incoming::Event(m)))) if m == n));
        }
        assert!(matches!(inbox.poll(&cx), Poll::Ready(None)));
    }

    #[tokio::test]
    async fn a_waiting_reader_wakes() {
        let inbox = std::sync::Arc::new(Inbox::<u8>::new());
        let next = {
            let inbox = inbox.clone();
            tokio::spawn(async move { std::future::poll_fn(|cx| inbox.poll(cx)).await.is_none() })
        };
        tokio::task::yield_now().await;
        inbox.close();
        assert!(next.await.unwrap());
    }
}
