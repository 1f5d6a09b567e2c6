//! Keeps one worker process running.

use super::child::{ChildError, ChildSpec};
use backon::{BackoffBuilder as _, ExponentialBuilder};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// A worker that lived this long was good: the next restart starts with the shortest delay.
const GOOD_RUN: Duration = Duration::from_secs(10);

/// A worker that is started here, or not at all because it runs elsewhere.
pub(super) struct Supervisor {
    spec: ChildSpec,
    wanted: bool,
    address: watch::Sender<Option<String>>,
    failures: watch::Sender<u32>,
}

impl Supervisor {
    pub(super) fn new(spec: ChildSpec, wanted: bool) -> Self {
        Self { spec, wanted, address: watch::channel(None).0, failures: watch::channel(0).0 }
    }

    /// Where the worker listens, as it changes; `None` for one that is not started here.
    pub(super) fn address(&self) -> Option<watch::Receiver<Option<String>>> {
        self.wanted.then(|| self.address.subscribe())
    }

    /// Resolves when a start or run has failed.
    pub(super) async fn first_failure(&self) {
        if !self.wanted || self.failures.subscribe().wait_for(|n| *n > 0).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Starts the task. It ends with `stop`, or when the worker refuses its settings: that never mends itself.
    pub(super) fn start(&self, stop: &CancellationToken) -> JoinHandle<Result<(), ChildError>> {
        let (spec, stop) = (self.spec.clone(), stop.clone());
        let (address, failures) = (self.address.clone(), self.failures.clone());
        if !self.wanted {
            return tokio::spawn(async move {
                stop.cancelled().await;
                Ok(())
            });
        }
        tokio::spawn(async move { keep_running(&spec, &address, &failures, &stop).await })
    }
}

async fn keep_running(
    spec: &ChildSpec,
    address: &watch::Sender<Option<String>>,
    failures: &watch::Sender<u32>,
    stop: &CancellationToken,
) -> Result<(), ChildError> {
    let mut listened_before = false;
    let mut delays = delays();
    loop {
        let since = Instant::now();
        let started = tokio::select! {
            started = spec.start() => started,
            // Dropping the start kills the process.
            () = stop.cancelled() => return Ok(()),
        };
        match started {
            Ok(mut running) => {
                listened_before = true;
                tracing::info!(worker = spec.name, control = %running.control, "worker started");
                address.send_replace(Some(running.control.clone()));
                let status = tokio::select! {
                    status = running.ended() => status,
                    () = stop.cancelled() => {
                        running.stop().await;
                        return Ok(());
                    }
                };
                address.send_replace(None);
                tracing::error!(worker = spec.name, status, "worker ended, starting it again");
            }
            Err(error @ (ChildError::BadSetting { .. } | ChildError::Missing { .. })) if !listened_before => {
                return Err(error);
            }
            Err(error) => tracing::error!(worker = spec.name, %error, "worker did not start, trying again"),
        }
        failures.send_modify(|n| *n = n.saturating_add(1));
        if since.elapsed() >= GOOD_RUN {
            delays = self::delays();
        }
        tokio::select! {
            () = tokio::time::sleep(delays.next().unwrap_or(LONGEST_DELAY)) => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
}

fn delays() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::new()
        .with_min_delay(FIRST_DELAY)
        .with_max_delay(LONGEST_DELAY)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build()
}
