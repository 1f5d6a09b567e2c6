//! How busy workers are: what this gateway has asked of them, and what others have.

use super::link::{DecodeLink, Link, PrefillLink};
use super::{Fleet, slot::Slot};
use futures_util::future::join_all;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shared::control::{DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often workers are asked, where there is a choice to make.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// More workers of a kind than this are not asked one by one; their machines' heartbeats tell.
const MAX_POLLED: usize = 32;
/// Others' load as of longer ago than this says nothing any more.
const STALE: Duration = Duration::from_secs(15);

/// Requests and prompt tokens that a worker has been asked for and that are not done.
#[derive(Debug, Default)]
pub(crate) struct Load {
    requests: AtomicU64,
    tokens: AtomicU64,
    /// Most of either since the worker's last word: that word may be seconds old, and what it counted of ours done.
    peak_requests: AtomicU64,
    peak_tokens: AtomicU64,
    others: Mutex<Option<Others>>,
}

/// What others have asked of a worker.
#[derive(Debug, Clone, Copy)]
struct Others {
    requests: u64,
    tokens: Option<u64>,
    seen: Instant,
}

impl Load {
    /// This gateway's requests that are not done.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// This gateway's prompt tokens that are not done.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// Everybody's requests that are not done.
    pub(crate) fn all_requests(&self) -> u64 {
        self.requests() + self.others().map_or(0, |o| o.requests)
    }

    /// Everybody's prompt tokens that are not done; a prompt of others whose length is unknown counts as `typical`.
    pub(crate) fn all_tokens(&self, typical: u32) -> u64 {
        let guess = |o: Others| o.tokens.unwrap_or(o.requests * u64::from(typical));
        self.tokens() + self.others().map_or(0, guess)
    }

    /// Takes the worker's own word of its requests and, if known, of the prompt tokens in them.
    pub(crate) fn observe(&self, requests: u64, tokens: Option<u64>) {
        let peak_requests = self.peak_requests.swap(self.requests(), Ordering::Relaxed);
        let peak_tokens = self.peak_tokens.swap(self.tokens(), Ordering::Relaxed);
        let others = Others {
            requests: requests.saturating_sub(peak_requests),
            tokens: tokens.map(|t| t.saturating_sub(peak_tokens)),
            seen: Instant::now(),
        };
        *self.others.lock() = Some(others);
    }

    /// Counts a request until the answer is dropped.
    pub(crate) fn take(self: &Arc<Self>, tokens: u32) -> LoadShare {
        let requests = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        self.peak_requests.fetch_max(requests, Ordering::Relaxed);
        let all_tokens = self.tokens.fetch_add(u64::from(tokens), Ordering::Relaxed) + u64::from(tokens);
        self.peak_tokens.fetch_max(all_tokens, Ordering::Relaxed);
        LoadShare { load: self.clone(), tokens }
    }

    fn others(&self) -> Option<Others> {
        self.others.lock().filter(|o| o.seen.elapsed() < STALE)
    }
}

/// One request's part of a worker's load.
#[derive(Debug)]
pub(crate) struct LoadShare {
    load: Arc<Load>,
    tokens: u32,
}

impl Drop for LoadShare {
    fn drop(&mut self) {
        self.load.requests.fetch_sub(1, Ordering::Relaxed);
        self.load.tokens.fetch_sub(u64::from(self.tokens), Ordering::Relaxed);
    }
}

/// Asks the workers how busy they are, as long as there is more than one of a kind to choose from: other gateways
/// may use them too.
pub(super) async fn poll(fleet: Arc<Fleet>) {
    let mut tick = tokio::time::interval(POLL_INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = fleet.shutdown.cancelled() => return,
            _ = tick.tick() => {}
        }
        let (decoders, prefills) = {
            let workers = fleet.workers.read();
            (to_ask(&workers.decoders), to_ask(&workers.prefills))
        };
        let decoders = join_all(decoders.into_iter().map(ask_decoder));
        let prefills = join_all(prefills.into_iter().map(ask_prefill));
        tokio::join!(decoders, prefills);
    }
}

fn to_ask<Req, Ev>(slots: &BTreeMap<String, Arc<Slot<Req, Ev>>>) -> Vec<Arc<Link<Req, Ev>>>
where
    Req: Serialize + Send + Sync + 'static,
    Ev: DeserializeOwned + Send + 'static,
{
    if (2..=MAX_POLLED).contains(&slots.len()) {
        slots.values().filter_map(|slot| slot.node.link()).collect()
    } else {
        Vec::new()
    }
}

async fn ask_decoder(link: Arc<DecodeLink>) {
    if let Ok(DecodeEvent::Stats(stats)) = link.client.call(&DecodeRequest::GetStats, POLL_INTERVAL).await {
        link.learn(stats.rates);
        link.load.observe(u64::from(stats.requests), None);
    }
}

async fn ask_prefill(link: Arc<PrefillLink>) {
    if let Ok(PrefillEvent::Stats(stats)) = link.client.call(&PrefillRequest::GetStats, POLL_INTERVAL).await {
        link.learn(stats.rates);
        link.load.observe(u64::from(stats.requests), Some(stats.queued_tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_asked_for_is_what_the_worker_says_less_our_own() {
        let load = Arc::new(Load::default());
        let share = load.take(100);
        load.observe(4, Some(500));
        assert_eq!((load.requests(), load.all_requests(), load.all_tokens(9)), (1, 4, 500));
        drop(share);
        assert_eq!((load.requests(), load.all_requests(), load.all_tokens(9)), (0, 3, 400));
        // One of these two may be ours, that was done since the last word.
        load.observe(2, None);
        assert_eq!((load.all_requests(), load.all_tokens(9)), (1, 9));
        load.observe(2, None);
        assert_eq!((load.all_requests(), load.all_tokens(9)), (2, 18));
        // A figure from before our own requests were known there is no negative load.
        let _shares = [load.take(5), load.take(5), load.take(5)];
        load.observe(1, Some(1));
        assert_eq!((load.all_requests(), load.all_tokens(9)), (3, 15));
    }
}
