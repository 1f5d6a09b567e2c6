//! The requests of all connections, from `prepare` to their end.

use super::invalid;
use crate::constraint::Matcher;
use crate::engine::Stops;
use crate::ingest::{Transfer, TransferControl};
use crate::store::Lease;
use parking_lot::Mutex;
use shared::control::{ConnectionId, Window, WorkerError, WorkerErrorCode};
use shared::keys::BlockKey;
use shared::tokens::TokenIds;
use shared::wire::Abort;
use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::Arc;
use std::time::Instant;
use tokio_util::sync::CancellationToken;

/// A request's name: unique on its connection.
pub(crate) type RequestKey = (ConnectionId, String);

/// The table of requests. Removing one, however it happens, frees what it held.
pub(crate) struct Requests {
    table: Arc<Mutex<Table>>,
    limit: usize,
}

#[derive(Default)]
struct Table {
    entries: HashMap<RequestKey, Entry>,
    next_number: u64,
}

struct Entry {
    /// Tells a request from a later one of the same name.
    number: u64,
    cancel: CancellationToken,
    transfer: Option<TransferControl>,
    /// Until it starts.
    prepared: Option<(Prepared, Instant)>,
    /// Its constraint is being compiled; it cannot start before that is done.
    compiling: bool,
    /// Once it has started.
    stops: Option<Stops>,
    /// Once it has started.
    window: Option<Window>,
}

/// A request that was announced.
pub(crate) struct Prepared {
    /// The whole prompt.
    pub(crate) tokens: TokenIds,
    /// Keys of its full blocks.
    pub(crate) keys: Vec<BlockKey>,
    /// Resident blocks.
    pub(crate) lease: Lease,
    /// The transfer, if one was opened.
    pub(crate) transfer: Option<Transfer>,
    /// What the answer must look like.
    pub(crate) constraint: Option<Matcher>,
}

/// A started request's place in the table, given up on drop.
pub(crate) struct Running {
    table: Arc<Mutex<Table>>,
    key: RequestKey,
    number: u64,
    /// Cancelled when nobody wants the request any more.
    pub(crate) cancel: CancellationToken,
    /// Ends single answers.
    pub(crate) stops: Stops,
    /// How far it may run ahead of its reader.
    pub(crate) window: Window,
}

impl Requests {
    pub(crate) fn new(limit: usize) -> Self {
        Self { table: Arc::default(), limit }
    }

    /// Adds a request that must start before `expires_at`; with `compiling`, not before its constraint is set.
    pub(crate) fn insert(
        &self,
        key: RequestKey,
        prepared: Prepared,
        expires_at: Instant,
        compiling: bool,
    ) -> Result<(), WorkerError> {
        let mut table = self.table.lock();
        if table.entries.len() >= self.limit {
            let text = format!("{} requests are under way, more are not accepted", self.limit);
            return Err(WorkerError::new(WorkerErrorCode::Busy, text));
        }
        let number = table.next_number;
        table.next_number += 1;
        match table.entries.entry(key) {
            MapEntry::Occupied(_) => Err(invalid("this request exists already")),
            MapEntry::Vacant(vacant) => {
                vacant.insert(Entry {
                    number,
                    cancel: CancellationToken::new(),
                    transfer: None,
                    prepared: Some((prepared, expires_at)),
                    compiling,
                    stops: None,
                    window: None,
                });
                Ok(())
            }
        }
    }

    /// Sets the constraint that was compiled for a request.
    pub(crate) fn constrain(&self, key: &RequestKey, constraint: Matcher) -> Result<(), WorkerError> {
        let mut table = self.table.lock();
        let entry = table.entries.get_mut(key).filter(|entry| entry.compiling).ok_or_else(unknown)?;
        let (prepared, _) = entry.prepared.as_mut().ok_or_else(unknown)?;
        prepared.constraint = Some(constraint);
        entry.compiling = false;
        Ok(())
    }

    /// Ends one answer of a running request.
    pub(crate) fn stop_choice(&self, key: &RequestKey, choice: u32) {
        if let Some(stops) = self.table.lock().entries.get(key).and_then(|entry| entry.stops.as_ref()) {
            stops.stop(choice);
        }
    }

    /// So many token events of a running request have been read.
    pub(crate) fn read(&self, key: &RequestKey, events: u32) {
        if let Some(window) = self.table.lock().entries.get(key).and_then(|entry| entry.window.as_ref()) {
            window.give(events);
        }
    }

    /// Looks at a request that has not started.
    pub(crate) fn view<T>(
        &self,
        key: &RequestKey,
        look: impl FnOnce(&Prepared) -> Result<T, WorkerError>,
    ) -> Result<T, WorkerError> {
        let table = self.table.lock();
        match table.entries.get(key).and_then(|entry| entry.prepared.as_ref()) {
            Some((prepared, _)) => look(prepared),
            None => Err(unknown()),
        }
    }

    /// Takes the transfer away from a request that has not started.
    pub(crate) fn take_transfer(&self, key: &RequestKey) -> Result<Option<Transfer>, WorkerError> {
        let mut table = self.table.lock();
        let entry = table.entries.get_mut(key).ok_or_else(unknown)?;
        let (prepared, _) = entry.prepared.as_mut().ok_or_else(unknown)?;
        entry.transfer = None;
        Ok(prepared.transfer.take())
    }

    /// Gives a transfer to a request that has not started.
    pub(crate) fn attach(&self, key: &RequestKey, transfer: Transfer) -> Result<(), WorkerError> {
        let mut table = self.table.lock();
        let entry = table.entries.get_mut(key).ok_or_else(unknown)?;
        let (prepared, _) = entry.prepared.as_mut().ok_or_else(unknown)?;
        entry.transfer = Some(transfer.control());
        prepared.transfer = Some(transfer);
        Ok(())
    }

    /// Starts a request of so many answers that may run ahead of their reader by so many events: what was prepared, and
    /// its place in the table.
    pub(crate) fn start(
        &self,
        key: &RequestKey,
        choices: usize,
        window_events: u32,
    ) -> Result<(Prepared, Running), WorkerError> {
        let mut table = self.table.lock();
        let entry = table.entries.get_mut(key).ok_or_else(unknown)?;
        if entry.compiling {
            return Err(invalid("this request is still being prepared"));
        }
        let (prepared, _) =
            entry.prepared.take().ok_or_else(|| invalid("this request has started already"))?;
        let stops = Stops::new(choices);
        entry.stops = Some(stops.clone());
        let window = Window::new(window_events);
        entry.window = Some(window.clone());
        let running = Running {
            table: self.table.clone(),
            key: key.clone(),
            number: entry.number,
            cancel: entry.cancel.clone(),
            stops,
            window,
        };
        drop(table);
        // From here on the request's own end gives the resident blocks back, however long its transfer takes.
        // A lease that has expired already stays so, which its reader notices.
        let _ = prepared.lease.keep();
        Ok((prepared, running))
    }

    /// Ends a request's transfer, in any state.
    pub(crate) fn abort_transfer(&self, key: &RequestKey, abort: Abort) {
        let control = self.table.lock().entries.get(key).and_then(|entry| entry.transfer.clone());
        if let Some(control) = control {
            control.abort(abort);
        }
    }

    /// Ends a request in any state.
    pub(crate) fn cancel(&self, key: &RequestKey) {
        let entry = self.table.lock().entries.remove(key);
        // Dropped outside the lock: its lease takes the store's.
        if let Some(entry) = entry {
            entry.end();
        }
    }

    /// Ends all requests of a connection; returns how many.
    pub(crate) fn cancel_connection(&self, connection: ConnectionId) -> usize {
        self.remove_if(|key, _| key.0 == connection)
    }

    /// Ends requests that were not started in time; returns how many.
    pub(crate) fn expire(&self, now: Instant) -> usize {
        self.remove_if(|_, entry| entry.prepared.as_ref().is_some_and(|(_, at)| *at <= now))
    }

    /// Requests in any state.
    pub(crate) fn len(&self) -> usize {
        self.table.lock().entries.len()
    }

    fn remove_if(&self, mut unwanted: impl FnMut(&RequestKey, &mut Entry) -> bool) -> usize {
        let removed: Vec<_> =
            self.table.lock().entries.extract_if(|key, entry| unwanted(key, entry)).map(|(_, e)| e).collect();
        let n = removed.len();
        removed.into_iter().for_each(Entry::end);
        n
    }
}

impl Entry {
    fn end(self) {
        self.cancel.cancel();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut table = self.table.lock();
        if table.entries.get(&self.key).is_some_and(|entry| entry.number == self.number) {
            table.entries.remove(&self.key);
        }
    }
}

fn unknown() -> WorkerError {
    invalid("no such prepared request; it may have expired")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::{BlockBytes, LayerBytes};
    use crate::store::PrefixStore;
    use std::time::Duration;

    #[test]
    fn a_started_request_keeps_its_resident_blocks() {
        let (store, requests) = (PrefixStore::new(8), Requests::new(2));
        let layers = vec![LayerBytes { parts: vec![vec![0; 8].into()] }];
        let block_key = BlockKey([1; 32]);
        assert!(store.insert_after(&[], block_key, Arc::new(BlockBytes { tokens: 1, layers })));
        let prepare = |name: &str| {
            let lease = store.lease_prefix(&[block_key], Duration::from_secs(1));
            let prepared = Prepared {
                tokens: vec![7; 2].into(),
                keys: vec![block_key],
                lease,
                transfer: None,
                constraint: None,
            };
            let key = (ConnectionId(1), name.to_owned());
            let expires_at = Instant::now() + Duration::from_secs(60);
            requests.insert(key.clone(), prepared, expires_at, false).unwrap();
            key
        };
        let (started, waiting) = (prepare("started"), prepare("waiting"));
        let (prepared, _running) = requests.start(&started, 1, 0).unwrap();
        assert_eq!(store.expire(Instant::now() + Duration::from_secs(2)), 1);
        assert_eq!(prepared.lease.blocks().unwrap().len(), 1);
        let (late, _running) = requests.start(&waiting, 1, 0).unwrap();
        assert!(late.lease.blocks().is_none());
        drop((prepared, late));
        assert_eq!(store.stats().references, 0);
    }
}
