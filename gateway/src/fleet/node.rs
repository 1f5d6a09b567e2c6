//! Keeps one worker connected.

use super::link::Link;
use backon::{BackoffBuilder as _, ExponentialBuilder};
use serde::Serialize;
use serde::de::DeserializeOwned;
use shared::control::{ClusterKey, ControlClient, ControlError, Hello, Role};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(3);
/// A connection that lived this long was good: the next loss starts with the shortest delay.
const GOOD_CONNECTION: Duration = Duration::from_secs(5);

/// A worker, connected or not.
pub(super) struct Node<Req, Ev> {
    state: watch::Sender<State<Req, Ev>>,
    /// Told of every change, too.
    changed: watch::Sender<()>,
}

/// Where a worker listens; `None` while it is not running.
pub(super) type Address = watch::Receiver<Option<String>>;

pub(super) type Watch<Req, Ev> = watch::Receiver<State<Req, Ev>>;

/// The current link, and whether there ever was one.
pub(super) struct State<Req, Ev> {
    pub(super) link: Option<Arc<Link<Req, Ev>>>,
    seen: bool,
    /// Start, or loss of the last link.
    unlinked: Instant,
}

impl<Req, Ev> Node<Req, Ev>
where
    Req: Serialize + Send + Sync + 'static,
    Ev: DeserializeOwned + Send + 'static,
{
    /// Starts the task that connects and reconnects.
    pub(super) fn start(
        role: Role,
        addr: Address,
        key: ClusterKey,
        tokenizer_digest: [u8; 32],
        changed: watch::Sender<()>,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let (state, _) = watch::channel(State { link: None, seen: false, unlinked: Instant::now() });
        let node = Arc::new(Self { state, changed });
        let task = node.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = task.keep_connected(role, addr, &key, tokenizer_digest) => {}
            }
            task.unlink();
        });
        node
    }

    /// The link, if connected.
    pub(super) fn link(&self) -> Option<Arc<Link<Req, Ev>>> {
        self.state.borrow().link.clone().filter(|l| !l.client.is_closed())
    }

    /// Whether there ever was a connection.
    pub(super) fn was_connected(&self) -> bool {
        self.state.borrow().seen
    }

    /// How long there has been no connection; `None` while there is one.
    pub(super) fn unlinked_for(&self) -> Option<Duration> {
        let state = self.state.borrow();
        state.link.is_none().then(|| state.unlinked.elapsed())
    }

    /// Follows the state.
    pub(super) fn watch(&self) -> Watch<Req, Ev> {
        self.state.subscribe()
    }

    fn unlink(&self) {
        let had = self.state.send_if_modified(|s| {
            let had = s.link.take().is_some();
            if had {
                s.unlinked = Instant::now();
            }
            had
        });
        if had {
            self.changed.send_replace(());
        }
    }

    async fn keep_connected(&self, role: Role, mut addr: Address, key: &ClusterKey, digest: [u8; 32]) {
        let mut delays = delays();
        loop {
            let current = addr.borrow_and_update().clone();
            let Some(target) = current else {
                if addr.changed().await.is_err() {
                    return std::future::pending().await;
                }
                delays = self::delays();
                continue;
            };
            let since = Instant::now();
            let ended = tokio::select! {
                ended = self.connection(role, &target, key, digest) => Some(ended),
                () = changed(&mut addr) => None,
            };
            self.unlink();
            match &ended {
                Some(Ok(())) => tracing::warn!(?role, addr = %target, "worker disconnected"),
                Some(Err(error)) => tracing::debug!(?role, addr = %target, %error, "worker not connected"),
                None => {}
            }
            if ended.is_none() || since.elapsed() >= GOOD_CONNECTION {
                delays = self::delays();
            }
            if ended.is_some() {
                let delay = delays.next().unwrap_or(LONGEST_DELAY);
                tokio::select! {
                    () = tokio::time::sleep(delay) => {}
                    () = changed(&mut addr) => delays = self::delays(),
                }
            }
        }
    }

    /// Connects and stays until the connection ends.
    async fn connection(
        &self,
        role: Role,
        addr: &str,
        key: &ClusterKey,
        digest: [u8; 32],
    ) -> Result<(), ControlError> {
        let (client, hello) = ControlClient::connect(addr, key, CONNECT_TIMEOUT).await?;
        if let Err(reason) = check(role, &hello, digest) {
            tracing::error!(?role, addr, node = %hello.node, reason, "worker refused");
            return Err(ControlError::Handshake(reason));
        }
        tracing::info!(?role, addr, node = %hello.node, engine = %hello.engine, model = %hello.model, "worker connected");
        let link = Arc::new(Link::new(client.clone(), hello, addr.to_owned()));
        self.state.send_modify(|s| {
            s.link = Some(link);
            s.seen = true;
        });
        self.changed.send_replace(());
        client.closed().await;
        Ok(())
    }
}

/// Refuses a worker that this gateway can't drive.
fn check(role: Role, hello: &Hello, tokenizer_digest: [u8; 32]) -> Result<(), String> {
    if hello.role != role {
        return Err(format!("a {:?} worker answers where a {role:?} worker was expected", hello.role));
    }
    if hello.tokenizer_digest.0 != tokenizer_digest {
        return Err(format!("its tokenizer (model `{}`) is not the gateway's", hello.model));
    }
    if hello.vocab_size == 0 || hello.max_tokens < 2 {
        return Err(format!(
            "vocabulary of {} and limit of {} tokens are unusable",
            hello.vocab_size, hello.max_tokens
        ));
    }
    match (role, &hello.cache) {
        (Role::Decode, None) => Err("it publishes no cache layout".to_owned()),
        (Role::Decode, Some(cache)) => cache.layout.validate().map_err(|e| e.to_string()),
        (Role::Prefill, _) => Ok(()),
    }
}

/// Resolves when the address changes; never when its owner is gone.
async fn changed(addr: &mut Address) {
    if addr.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn delays() -> impl Iterator<Item = Duration> {
    ExponentialBuilder::new()
        .with_min_delay(FIRST_DELAY)
        .with_max_delay(LONGEST_DELAY)
        .with_factor(1.7)
        .with_jitter()
        .without_max_times()
        .build()
}
