//! How far a worker may run ahead of whoever reads an answer.

use std::sync::Arc;
use tokio::sync::Semaphore;

/// Events of one request that may be sent before more have been read; clones share it.
#[derive(Debug, Clone)]
pub struct Window(Option<Arc<Semaphore>>);

impl Window {
    /// So many events; 0 for any number.
    #[must_use]
    pub fn new(events: u32) -> Self {
        Self((events > 0).then(|| Arc::new(Semaphore::new(events as usize))))
    }

    /// Waits until one more event may be sent. Giving up the wait takes nothing.
    pub async fn take(&self) {
        if let Some(left) = &self.0
            && let Ok(permit) = left.acquire().await
        {
            permit.forget();
        }
    }

    /// So many have been read.
    pub fn give(&self, events: u32) {
        if let Some(left) = &self.0 {
            let room = Semaphore::MAX_PERMITS - left.available_permits().min(Semaphore::MAX_PERMITS);
            left.add_permits(room.min(events as usize));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    #[test]
    fn what_is_sent_waits_for_what_is_read() {
        let window = Window::new(2);
        let may_send = || window.take().now_or_never().is_some();
        assert_eq!([may_send(), may_send(), may_send()], [true, true, false]);
        window.give(1);
        assert_eq!([may_send(), may_send()], [true, false]);
        for _ in 0..3 {
            window.give(u32::MAX);
        }
        assert!(may_send());
        let any = Window::new(0);
        any.give(5);
        assert!((0..1000).all(|_| any.take().now_or_never().is_some()));
    }
}
