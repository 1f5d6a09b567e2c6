//! A connection to the bus that comes back by itself.

use super::{BusSettings, subjects};
use async_nats::{Client, ConnectOptions, Event};
use backon::{BackoffBuilder as _, ExponentialBuilder};
use std::time::Duration;
use tokio::sync::watch;

/// Oldest server that this software is tested with; an older one gets a warning.
pub const SERVER_FLOOR: (u64, u64, u64) = (2, 12, 7);
/// A connection that is silent for about three of these is broken: a machine that slept finds out soon, and a gateway
/// that can't hear anybody finds out before it takes them all for gone.
pub const PING_INTERVAL: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const FIRST_DELAY: Duration = Duration::from_millis(100);
const LONGEST_DELAY: Duration = Duration::from_secs(4);
/// Messages that may wait to be sent while the server is away; a publisher waits when they are used up.
const SEND_BACKLOG: usize = 256;
/// Messages of one subscription that may wait to be read. More are dropped, and the log says so.
const READ_BACKLOG: usize = 8192;
/// The same for an agent, whose commands may be long: a flood must not fill its memory.
const AGENT_READ_BACKLOG: usize = 128;

/// A connection to the bus; clones share it.
#[derive(Debug, Clone)]
pub struct Bus {
    /// Publishes, subscribes, asks. Subscriptions survive reconnects.
    pub client: Client,
    connects: watch::Receiver<u64>,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BusError {
    /// Not reachable, not trusted, or not let in.
    #[error("NATS: {0}")]
    Connect(#[from] async_nats::ConnectError),
}

impl Bus {
    /// Connects and waits until the server has let this program in. Later losses mend themselves. `role` decides
    /// the reply inboxes ([`subjects::inbox_prefix`]); `name` is what the server shows.
    ///
    /// # Errors
    /// [`BusError::Connect`].
    pub async fn connect(settings: &BusSettings, role: &str, name: &str) -> Result<Self, BusError> {
        Self::open(settings, role, name, false).await
    }

    /// Like [`Self::connect`], but returns at once and goes on trying for as long as it takes.
    ///
    /// # Errors
    /// [`BusError::Connect`] for settings that can never work.
    pub async fn connect_in_background(
        settings: &BusSettings,
        role: &str,
        name: &str,
    ) -> Result<Self, BusError> {
        Self::open(settings, role, name, true).await
    }

    async fn open(
        settings: &BusSettings,
        role: &str,
        name: &str,
        background: bool,
    ) -> Result<Self, BusError> {
        let (count, connects) = watch::channel(0);
        let mut options = ConnectOptions::new()
            .name(name)
            .custom_inbox_prefix(subjects::inbox_prefix(role))
            .ping_interval(PING_INTERVAL)
            .connection_timeout(CONNECT_TIMEOUT)
            .client_capacity(SEND_BACKLOG)
            .subscription_capacity(if role == "agent" { AGENT_READ_BACKLOG } else { READ_BACKLOG })
            .reconnect_delay_callback(delay)
            .event_callback(move |event| {
                log(&event);
                if matches!(event, Event::Connected) {
                    count.send_modify(|n| *n += 1);
                }
                std::future::ready(())
            });
        if let Some(seed) = &settings.seed {
            options = options.nkey(seed.clone());
        }
        if let Some(file) = &settings.ca_file {
            options = options.add_root_certificates(file.clone()).require_tls(true);
        }
        if let Some((cert, key)) = &settings.certificate {
            options = options.add_client_certificate(cert.clone(), key.clone()).require_tls(true);
        }
        if background {
            options = options.retry_on_initial_connect();
        }
        let client = options.connect(settings.servers.clone()).await?;
        let bus = Self { client, connects };
        bus.warn_of_old_servers();
        Ok(bus)
    }

    /// Counts connections made; a change means that state must be sent again.
    #[must_use]
    pub fn connects(&self) -> watch::Receiver<u64> {
        self.connects.clone()
    }

    /// Whether the server is reached now.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == async_nats::connection::State::Connected
    }

    fn warn_of_old_servers(&self) {
        let bus = self.clone();
        let mut connects = self.connects();
        tokio::spawn(async move {
            loop {
                if connects.wait_for(|n| *n > 0).await.is_err() {
                    return;
                }
                if let Some(info) = bus.client.try_server_info()
                    && below_floor(&info.version)
                {
                    let (a, b, c) = SERVER_FLOOR;
                    tracing::warn!(version = %info.version, "the NATS server is older than {a}.{b}.{c}: update it");
                }
                if connects.changed().await.is_err() {
                    return;
                }
            }
        });
    }
}

/// Whether a server's version is below [`SERVER_FLOOR`]; one that can't be read is.
#[must_use]
pub fn below_floor(version: &str) -> bool {
    let numbers = version.split(['-', '+']).next().unwrap_or_default();
    let mut parts = numbers.split('.').map(|p| p.parse::<u64>());
    let version = match (parts.next(), parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor)), Some(Ok(patch))) => (major, minor, patch),
        _ => return true,
    };
    version < SERVER_FLOOR
}

/// Longer after each failure, and never the same for all: a restarted server is not met by everyone at once.
fn delay(attempts: usize) -> Duration {
    let mut delays = ExponentialBuilder::new()
        .with_min_delay(FIRST_DELAY)
        .with_max_delay(LONGEST_DELAY / 2)
        .with_factor(2.0)
        .with_jitter()
        .without_max_times()
        .build();
    delays.nth(attempts.min(16)).unwrap_or(LONGEST_DELAY)
}

fn log(event: &Event) {
    match event {
        Event::Connected => tracing::info!("bus connected"),
        Event::Disconnected => tracing::warn!("bus disconnected, trying again"),
        Event::SlowConsumer(_) => tracing::warn!("more bus messages than this program can read"),
        Event::ServerError(error) => tracing::warn!(%error, "bus"),
        Event::ClientError(error) => tracing::debug!(%error, "bus"),
        other => tracing::debug!(event = %other, "bus"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_servers_are_known() {
        for old in ["2.12.6", "2.9.99", "1.99.0", "", "2.12", "x.y.z"] {
            assert!(below_floor(old), "{old}");
        }
        for good in ["2.12.7", "2.13.0-RC.1", "2.15.1", "3.0.0"] {
            assert!(!below_floor(good), "{good}");
        }
    }

    #[test]
    fn waits_grow_to_a_limit_and_differ() {
        assert!(delay(0) >= FIRST_DELAY && delay(0) <= FIRST_DELAY * 2);
        assert!((0..100).all(|n| delay(n) <= LONGEST_DELAY));
        assert!((0..20).map(|_| delay(5)).collect::<std::collections::HashSet<_>>().len() > 1);
    }
}
