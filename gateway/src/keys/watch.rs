//! Takes over changes of the key file: on SIGHUP, and by itself when the file changes.

use super::{KeyRing, read};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// How often the file's time and size are looked at.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Keeps a ring in step with its file until `shutdown`. A file that can't be used changes nothing: the keys that were
/// in force stay so, and the log says why.
pub(crate) async fn keep_current(ring: Arc<KeyRing>, shutdown: CancellationToken) {
    let Some(file) = ring.file.clone() else { return };
    let mut hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => hangup,
        Err(error) => {
            tracing::warn!(%error, "SIGHUP can't be caught");
            return;
        }
    };
    let mut seen = stamp(&file);
    loop {
        let asked = tokio::select! {
            () = shutdown.cancelled() => return,
            _ = hangup.recv() => true,
            () = tokio::time::sleep(POLL_INTERVAL) => false,
        };
        let now = stamp(&file);
        if !asked && now == seen {
            continue;
        }
        seen = now;
        match read(&file, ring.defaults) {
            Ok(keys) => {
                tracing::info!(keys = keys.len(), "API keys read again");
                ring.replace(keys);
            }
            Err(error) => tracing::error!(%error, "the API keys stay as they were"),
        }
    }
}

fn stamp(file: &Path) -> Option<(SystemTime, u64)> {
    let meta = std::fs::metadata(file).ok()?;
    Some((meta.modified().ok()?, meta.len()))
}
