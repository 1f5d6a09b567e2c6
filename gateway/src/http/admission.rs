//! The way in: so many requests run, so many more wait in a queue, the rest are told to come back.

use super::error::ApiError;
use crate::metrics::Metrics;
use crate::record;
use prometheus::IntGauge;
use shared::trace::{self, Span};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Longest time that `Retry-After` tells anyone.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// How much is let in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Requests that run at once.
    pub(crate) max_in_flight: usize,
    /// Requests that wait for that.
    pub(crate) max_queue: usize,
    /// Longest wait.
    pub(crate) queue_timeout: Duration,
}

/// The queue before the pipeline: first come, first served.
pub(crate) struct Admission {
    limits: Limits,
    permits: Arc<Semaphore>,
    waiting: AtomicUsize,
    /// The last wait that ended, which is the best guess for the next one.
    last_wait_ms: AtomicU64,
    metrics: Arc<Metrics>,
}

impl Admission {
    /// An empty house.
    pub(crate) fn new(limits: Limits, metrics: Arc<Metrics>) -> Self {
        let limits = Limits { max_in_flight: limits.max_in_flight.min(u32::MAX as usize), ..limits };
        let permits = Arc::new(Semaphore::new(limits.max_in_flight.min(Semaphore::MAX_PERMITS)));
        Self { limits, permits, waiting: AtomicUsize::new(0), last_wait_ms: AtomicU64::new(0), metrics }
    }

    /// Waits for a place. Dropping the wait, as when the client leaves, frees its place in the queue.
    ///
    /// # Errors
    /// 429 when the queue is full or the wait takes too long.
    pub(crate) async fn enter(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let _span = Span::below("queue", trace::current().as_ref());
        // The semaphore hands free places to those who wait before anyone can snatch one here.
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            self.metrics.queue_wait.observe(0.0);
            return Ok(permit);
        }
        let since = Instant::now();
        let place = Place::take(self).ok_or_else(|| self.refuse("the queue is full"))?;
        let permit =
            tokio::time::timeout(self.limits.queue_timeout, self.permits.clone().acquire_owned()).await;
        drop(place);
        let waited = since.elapsed();
        self.metrics.queue_wait.observe(waited.as_secs_f64());
        record::current().queued(waited);
        self.last_wait_ms.store(u64::try_from(waited.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        match permit {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) | Err(_) => Err(self.refuse("the wait in the queue took too long")),
        }
    }

    /// Resolves when nothing runs and nothing waits. Nobody comes in after that.
    pub(crate) async fn emptied(&self) {
        let all = u32::try_from(self.limits.max_in_flight).unwrap_or(u32::MAX);
        if let Ok(permits) = self.permits.acquire_many(all).await {
            permits.forget();
        }
    }

    fn refuse(&self, why: &str) -> ApiError {
        self.metrics.queue_refused.inc();
        let retry_after =
            Duration::from_millis(self.last_wait_ms.load(Ordering::Relaxed)).min(MAX_RETRY_AFTER);
        ApiError::too_many_requests(format!("too many requests at once: {why}"), retry_after)
    }
}

/// A place in the queue.
struct Place<'a> {
    waiting: &'a AtomicUsize,
    gauge: &'a IntGauge,
}

impl<'a> Place<'a> {
    fn take(admission: &'a Admission) -> Option<Self> {
        let Admission { waiting, limits, metrics, .. } = admission;
        let room = |n: usize| (n < limits.max_queue).then_some(n + 1);
        waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        metrics.queued.inc();
        Some(Self { waiting, gauge: &metrics.queued })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.gauge.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(max_queue: usize, queue_timeout: Duration) -> Arc<Admission> {
        let limits = Limits { max_in_flight: 1, max_queue, queue_timeout };
        Arc::new(Admission::new(limits, Arc::new(Metrics::new("m").unwrap())))
    }

    #[tokio::test]
    async fn one_runs_one_waits_the_third_is_sent_away() {
        let gate = admission(1, Duration::from_secs(60));
        let first = gate.enter().await.unwrap();
        let second = tokio::spawn({
            let gate = gate.clone();
            async move { gate.enter().await }
        });
        while gate.waiting.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        assert!(gate.enter().await.is_err());
        drop(first);
        assert!(second.await.unwrap().is_ok());
        assert_eq!((gate.metrics.queued.get(), gate.metrics.queue_refused.get()), (0, 1));
    }

    #[tokio::test]
    async fn who_leaves_the_queue_or_waits_too_long_frees_the_place() {
        let gate = admission(1, Duration::from_millis(20));
        let held = gate.enter().await.unwrap();
        assert!(gate.enter().await.is_err());
        let mut leaving = Box::pin(gate.enter());
        assert!(futures_util::poll!(&mut leaving).is_pending());
        assert_eq!(gate.waiting.load(Ordering::Relaxed), 1);
        drop(leaving);
        assert_eq!((gate.waiting.load(Ordering::Relaxed), gate.metrics.queued.get()), (0, 0));
        drop(held);
        gate.emptied().await;
        assert!(gate.permits.try_acquire().is_err());
    }
}
