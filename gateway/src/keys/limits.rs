//! What one key may use.

use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Limits of one key; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KeyLimits {
    /// Requests per minute, evened out over time; that many may come at once after a pause.
    pub(crate) requests_per_min: Option<NonZeroU32>,
    /// Requests that may be under way at once.
    pub(crate) max_concurrent: Option<NonZeroU32>,
}

/// Which limit a request ran into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Too many per minute; another one is welcome after this time.
    Rate(Duration),
    /// Too many at once.
    Concurrent(NonZeroU32),
}

/// What a key has used.
#[derive(Debug)]
pub(super) struct Meter {
    rate: Option<DefaultDirectRateLimiter>,
    concurrent: Option<(NonZeroU32, Arc<Semaphore>)>,
}

impl Meter {
    pub(super) fn new(limits: KeyLimits) -> Self {
        let places = |n: NonZeroU32| (n, Arc::new(Semaphore::new(n.get() as usize)));
        Self {
            rate: limits.requests_per_min.map(|n| RateLimiter::direct(Quota::per_minute(n))),
            concurrent: limits.max_concurrent.map(places),
        }
    }

    pub(super) fn admit(&self) -> Result<Option<OwnedSemaphorePermit>, Refusal> {
        let permit = match &self.concurrent {
            None => None,
            Some((most, places)) => {
                Some(places.clone().try_acquire_owned().map_err(|_| Refusal::Concurrent(*most))?)
            }
        };
        // Counted last: a request that another limit refuses uses nothing up.
        if let Some(Err(not_until)) = self.rate.as_ref().map(RateLimiter::check) {
            return Err(Refusal::Rate(not_until.wait_time_from(DefaultClock::default().now())));
        }
        Ok(permit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_and_say_when() {
        let two = NonZeroU32::new(2);
        let rate = Meter::new(KeyLimits { requests_per_min: two, ..KeyLimits::default() });
        assert!(rate.admit().is_ok() && rate.admit().is_ok());
        let Err(Refusal::Rate(wait)) = rate.admit() else { panic!("the third came through") };
        assert!(wait > Duration::from_secs(25) && wait <= Duration::from_secs(30), "{wait:?}");
        let most = Meter::new(KeyLimits { max_concurrent: two, ..KeyLimits::default() });
        let held = (most.admit().unwrap(), most.admit().unwrap());
        assert_eq!(most.admit().err(), Some(Refusal::Concurrent(two.unwrap())));
        drop(held);
        assert!(most.admit().is_ok());
    }
}
