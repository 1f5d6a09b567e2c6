//! The connections of the front door: how many there are, which are idle, which take too long.
//!
//! A connection costs memory and a descriptor whether it asks for anything or not. When all places are taken the
//! longest idle ones give way to a new one; if none is idle the new one is refused.

use parking_lot::Mutex;
use prometheus::IntGauge;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Part of the idle connections that gives way at once, so that a flood does not make every accept search for one.
const EVICTED_SHARE: usize = 64;

/// How long a connection may take for what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// From the first byte of a request's head to its last.
    pub(crate) head: Duration,
    /// Between requests.
    pub(crate) idle: Duration,
    /// With written bytes that the client does not take.
    pub(crate) write: Duration,
}

impl Patience {
    /// How often connections are looked at.
    pub(super) fn interval(&self) -> Duration {
        let least = self.head.min(self.idle).min(self.write);
        (least / 4).clamp(Duration::from_millis(20), Duration::from_secs(1))
    }
}

/// All open connections.
pub(super) struct Connections {
    most: usize,
    seats: Mutex<HashMap<u64, Arc<Seat>>>,
    next: AtomicU64,
    start: Instant,
    gauge: IntGauge,
}

/// One connection's place. Times are milliseconds since the server's start, 0 is "not now".
pub(super) struct Seat {
    id: u64,
    start: Instant,
    requests: AtomicUsize,
    idle_since: AtomicU64,
    head_since: AtomicU64,
    write_since: AtomicU64,
    leave: Notify,
    cut: Notify,
}

impl Connections {
    pub(super) fn new(most: usize, gauge: IntGauge) -> Arc<Self> {
        let (seats, next) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(Self { most, seats, next, start: Instant::now(), gauge })
    }

    /// A place for a new connection, if need be that of idle ones; `None` when all are busy.
    pub(super) fn seat(self: &Arc<Self>) -> Option<Seated> {
        let mut seats = self.seats.lock();
        if seats.len() >= self.most && !evict(&mut seats) {
            return None;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let seat = Arc::new(Seat {
            id,
            start: self.start,
            requests: AtomicUsize::new(0),
            idle_since: AtomicU64::new(0),
            head_since: AtomicU64::new(0),
            write_since: AtomicU64::new(0),
            leave: Notify::new(),
            cut: Notify::new(),
        });
        seat.idle_since.store(seat.now_ms(), Ordering::Relaxed);
        seats.insert(id, seat.clone());
        self.gauge.inc();
        Some(Seated { seat, connections: self.clone() })
    }

    /// Ends what took longer than it may.
    pub(super) fn sweep(&self, patience: &Patience) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        let over = |since: &AtomicU64, limit: Duration| {
            let since = since.load(Ordering::Relaxed);
            since != 0 && u128::from(now.saturating_sub(since)) > limit.as_millis()
        };
        for seat in self.seats.lock().values() {
            let is_busy = seat.requests.load(Ordering::Relaxed) > 0;
            if over(&seat.write_since, patience.write) || (!is_busy && over(&seat.head_since, patience.head))
            {
                seat.cut.notify_one();
            } else if !is_busy && over(&seat.idle_since, patience.idle) {
                seat.leave.notify_one();
            }
        }
    }
}

/// Asks the longest idle connections to leave, and gives up their places; whether there were any.
fn evict(seats: &mut HashMap<u64, Arc<Seat>>) -> bool {
    let mut idle: Vec<(u64, u64)> = seats
        .values()
        .filter(|s| s.requests.load(Ordering::Relaxed) == 0)
        .map(|s| (s.idle_since.load(Ordering::Relaxed), s.id))
        .collect();
    if idle.is_empty() {
        return false;
    }
    let count = (idle.len() / EVICTED_SHARE).max(1);
    idle.select_nth_unstable(count - 1);
    for (_, id) in &idle[..count] {
        if let Some(seat) = seats.remove(id) {
            seat.leave.notify_one();
        }
    }
    true
}

impl Seat {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }

    /// A request's head is complete; the answer is being made until the result is dropped.
    pub(super) fn request(self: &Arc<Self>) -> Busy {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.head_since.store(0, Ordering::Relaxed);
        Busy(self.clone())
    }

    /// Bytes came in.
    pub(super) fn read(&self) {
        if self.requests.load(Ordering::Relaxed) == 0 && self.head_since.load(Ordering::Relaxed) == 0 {
            self.head_since.store(self.now_ms(), Ordering::Relaxed);
        }
    }

    /// Bytes wait for the client, or do not any more.
    pub(super) fn blocked(&self, is_blocked: bool) {
        let since = self.write_since.load(Ordering::Relaxed);
        if is_blocked && since == 0 {
            self.write_since.store(self.now_ms(), Ordering::Relaxed);
        } else if !is_blocked && since != 0 {
            self.write_since.store(0, Ordering::Relaxed);
        }
    }

    /// Resolves when the connection is to end as soon as it is idle.
    pub(super) async fn asked_to_leave(&self) {
        self.leave.notified().await;
    }

    /// Resolves when the connection is to end at once.
    pub(super) async fn cut_off(&self) {
        self.cut.notified().await;
    }
}

/// A connection that is counted until this is dropped.
pub(super) struct Seated {
    pub(super) seat: Arc<Seat>,
    connections: Arc<Connections>,
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.connections.seats.lock().remove(&self.seat.id);
        self.connections.gauge.dec();
    }
}

/// A request on a connection.
pub(super) struct Busy(Arc<Seat>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.idle_since.store(self.0.now_ms(), Ordering::Relaxed);
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;

    fn connections(most: usize) -> Arc<Connections> {
        Connections::new(most, IntGauge::new("x", "y").unwrap())
    }

    #[test]
    fn the_longest_idle_one_gives_way_and_a_busy_one_never() {
        let all = connections(2);
        let (busy, idle) = (all.seat().unwrap(), all.seat().unwrap());
        let request = busy.seat.request();
        let third = all.seat().expect("the idle one gives way");
        assert!(idle.seat.asked_to_leave().now_or_never().is_some());
        let also_busy = third.seat.request();
        assert!(all.seat().is_none());
        drop(request);
        assert!(all.seat().is_some());
        drop(also_busy);
        assert!(busy.seat.asked_to_leave().now_or_never().is_some());
    }

    #[test]
    fn each_kind_of_slowness_has_its_limit() {
        let patience = |head, idle, write| Patience {
            head: Duration::from_millis(head),
            idle: Duration::from_millis(idle),
            write: Duration::from_millis(write),
        };
        let all = connections(9);
        let seated = all.seat().unwrap();
        let seat = &seated.seat;
        let wait = || std::thread::sleep(Duration::from_millis(15));
        wait();
        all.sweep(&patience(1, 1000, 1));
        assert!(seat.asked_to_leave().now_or_never().is_none() && seat.cut_off().now_or_never().is_none());
        all.sweep(&patience(1000, 5, 1000));
        assert!(seat.asked_to_leave().now_or_never().is_some());
        seat.read();
        wait();
        all.sweep(&patience(5, 1000, 1000));
        assert!(seat.cut_off().now_or_never().is_some());
        let _request = seat.request();
        wait();
        all.sweep(&patience(5, 5, 1000));
        assert!(seat.cut_off().now_or_never().is_none());
        seat.blocked(true);
        wait();
        all.sweep(&patience(1000, 1000, 5));
        assert!(seat.cut_off().now_or_never().is_some());
        seat.blocked(false);
        all.sweep(&patience(1000, 1000, 5));
        assert!(seat.cut_off().now_or_never().is_none());
    }
}
