//! A request under way, driven by whoever reads its events.
//!
//! It has no task of its own: what it has to say is asked for by the connection's task, which is woken by the decoder's
//! messages directly. A client that takes nothing makes its request stand still, and with it what the decoder sends.

use super::Event;
use futures_util::Stream;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// What a request has said and nobody has read yet. The request runs only while this is empty.
#[derive(Debug, Default)]
pub(super) struct Said(Mutex<VecDeque<Event>>);

impl Said {
    pub(super) fn push(&self, event: Event) {
        self.0.lock().push_back(event);
    }

    /// Says all that was said to `other`.
    pub(super) fn take_over(&self, other: &Self) {
        self.0.lock().append(&mut other.0.lock());
    }

    fn pop(&self) -> Option<Event> {
        self.0.lock().pop_front()
    }
}

/// A request's events. Dropping it before the last one ends the request and cancels on both workers.
pub(crate) struct Running {
    said: Arc<Said>,
    work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Running {
    pub(super) fn new(said: Arc<Said>, work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { said, work: Some(Box::pin(work)) }
    }
}

impl Stream for Running {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        if let Some(event) = self.said.pop() {
            return Poll::Ready(Some(event));
        }
        let Some(work) = &mut self.work else { return Poll::Ready(None) };
        if work.as_mut().poll(cx).is_ready() {
            self.work = None;
        }
        match self.said.pop() {
            None if self.work.is_some() => Poll::Pending,
            event => Poll::Ready(event),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::StreamExt as _;

    fn progress(done_tokens: u32) -> Event {
        Event::Progress { done_tokens, total_tokens: 9 }
    }

    #[tokio::test]
    async fn events_come_in_order_and_the_work_waits_for_its_reader() {
        let said = Arc::new(Said::default());
        let steps = Arc::new(Mutex::new(0));
        let work = {
            let (said, steps) = (said.clone(), steps.clone());
            async move {
                for i in 0..3 {
                    said.push(progress(2 * i));
                    said.push(progress(2 * i + 1));
                    *steps.lock() += 1;
                    tokio::task::yield_now().await;
                }
            }
        };
        let mut running = Running::new(said, work);
        assert_eq!(*steps.lock(), 0);
        for i in 0..6 {
            let next = running.next().await;
            assert!(
                matches!(next, Some(Event::Progress { done_tokens, .. }) if done_tokens == i),
                "{next:?}"
            );
            assert_eq!(*steps.lock(), i / 2 + 1);
        }
        assert!(running.next().await.is_none() && running.next().await.is_none());
    }
}
