//! Puts the gateway together and runs it.

use crate::access_log::AccessLog;
use crate::discovery;
use crate::fleet::{self, Discovery, Fleet};
use crate::http::{self, Admission, App, Bodies};
use crate::keys::{KeyRing, keep_current};
use crate::live::Live;
use crate::live::session::Sessions;
use crate::metrics::Metrics;
use crate::model::TextModel;
use crate::open_files::make_room;
use crate::pipeline::Context;
use crate::settings::Settings;
use crate::verdicts::VerdictStore;
use shared::bus::Bus;
use shared::settings::{SettingsError, shutdown_signal};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// At the end, time for the access log's last lines.
const LOG_FLUSH_LIMIT: Duration = Duration::from_millis(500);
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 4096;

/// Sockets of the live page at once.
const MAX_VIEWERS: usize = 64;

/// Why the program could not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    /// A bad setting.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The port is taken or not allowed.
    #[error("can't listen on {addr}: {source}")]
    Bind {
        /// The address.
        addr: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The model's text side can't be used.
    #[error("model {path}: {source}")]
    Model {
        /// The model.
        path: std::path::PathBuf,
        /// Why.
        source: Box<shared::model::ModelError>,
    },
    /// A worker program could not be started.
    #[error(transparent)]
    Child(#[from] crate::up::ChildError),
    /// Verification failed to run.
    #[error(transparent)]
    Verify(Box<crate::verify::VerifyError>),
    /// The bus's keys could not be made.
    #[error(transparent)]
    BusKeys(#[from] crate::bus_keys::BusKeysError),
    /// An operator's command failed.
    #[error(transparent)]
    Operator(#[from] crate::bus_cli::BusCliError),
    /// The bus can't be used as it is set.
    #[error(transparent)]
    Bus(#[from] shared::bus::BusError),
    /// No async runtime.
    #[error("can't start: {0}")]
    Runtime(std::io::Error),
    /// The access log can't be written.
    #[error("access_log: {0}")]
    AccessLog(std::io::Error),
    /// Two metrics share a name.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// A gateway that is about to serve.
pub(crate) struct Gateway {
    pub(crate) app: Arc<App>,
    listener: TcpListener,
    shutdown: CancellationToken,
    /// Stops the connections to the workers, after the last answer.
    fleet_shutdown: CancellationToken,
    access_log: Option<crate::access_log::Writer>,
}

impl Gateway {
    /// Opens the model and the port, and starts connecting to the workers.
    ///
    /// # Errors
    /// [`ServeError::Model`], [`ServeError::Bind`].
    pub(crate) async fn start(
        settings: Settings,
        listener: TcpListener,
        members: Discovery,
    ) -> Result<Self, ServeError> {
        let (path, name) = (settings.model.clone(), settings.model_name.clone());
        let opened = tokio::task::spawn_blocking(move || TextModel::open(&path, name)).await;
        let opened = opened.map_err(|e| ServeError::Runtime(std::io::Error::other(e)))?;
        let mut model =
            opened.map_err(|e| ServeError::Model { path: settings.model.clone(), source: Box::new(e) })?;
        model.dialect =
            model.dialect.with(settings.tool_parser.as_deref(), settings.reasoning_parser.as_deref());
        let fleet_shutdown = CancellationToken::new();
        let digest = model.tokenizer.digest();
        let bus = match &settings.bus {
            Some((id, bus)) => {
                Some((id.clone(), Bus::connect_in_background(bus, "gateway", id.as_str()).await?))
            }
            None => None,
        };
        let (members, directory) = match &bus {
            Some((_, bus)) => {
                let (heard, directory) = discovery::listen(bus.clone(), fleet_shutdown.clone());
                (fleet::both(members, heard), Some(directory))
            }
            None => (members, None),
        };
        let fleet = Fleet::start(members, &settings.cluster_key, digest, &fleet_shutdown);
        let metrics = Arc::new(Metrics::new(&model.name)?);
        let ctx = Arc::new(Context {
            fleet,
            model: Arc::new(model),
            metrics: metrics.clone(),
            verdicts: VerdictStore::default(),
            live: Arc::new(Live::new(settings.live_page)),
            min_bridge_tokens: settings.min_bridge_tokens,
            reconnect_wait: settings.reconnect_wait,
        });
        let log =
            settings.access_log.clone().map(|to| AccessLog::start(to, metrics.access_log_dropped.clone()));
        let (access_log, writer) = log.transpose().map_err(ServeError::AccessLog)?.unzip();
        let keys =
            KeyRing::new(settings.api_keys.clone(), settings.api_keys_file.clone(), settings.key_limits);
        let keys = Arc::new(keys);
        tokio::spawn(keep_current(keys.clone(), fleet_shutdown.clone()));
        let app = Arc::new(App {
            ctx,
            keys,
            bodies: Bodies::new(settings.max_body_bytes, settings.max_bodies_bytes),
            admission: Admission::new(settings.limits, metrics),
            max_connections: make_room(settings.max_connections),
            access_log,
            sessions: Sessions::new(),
            viewers: Arc::new(Semaphore::new(MAX_VIEWERS)),
            viewers_shutdown: CancellationToken::new(),
            settings,
            directory,
            draining: AtomicBool::new(false),
            started_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        });
        if let Some((id, bus)) = bus {
            let addr = listener.local_addr().map_or_else(|_| String::new(), |a| a.to_string());
            tokio::spawn(discovery::announce(bus, id, addr, app.clone(), fleet_shutdown.clone()));
        }
        Ok(Self { app, listener, shutdown: CancellationToken::new(), fleet_shutdown, access_log: writer })
    }

    /// Cancelling it starts the drain.
    pub(crate) fn shutdown_token(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Serves until the shutdown token is cancelled and answers are drained.
    pub(crate) async fn run(self) {
        let tls = self.app.settings.tls.clone();
        http::serve(self.listener, self.app, tls, self.shutdown).await;
        self.fleet_shutdown.cancel();
        if let Some(writer) = self.access_log {
            writer.finish(LOG_FLUSH_LIMIT).await;
        }
    }
}

/// Binds the API's port.
///
/// # Errors
/// [`ServeError::Bind`] naming the address.
pub(crate) fn bind(addr: SocketAddr) -> Result<TcpListener, ServeError> {
    let listen = || {
        let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // A port that was in use a moment ago is free.
        socket.set_reuseaddr(true)?;
        socket.bind(addr)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|source| ServeError::Bind { addr, source })
}

/// `pd-bridge gateway`: serves until Ctrl-C or SIGTERM.
///
/// # Errors
/// [`ServeError`].
pub(crate) async fn serve_forever(settings: Settings) -> Result<(), ServeError> {
    if settings.decode.is_empty() && settings.bus.is_none() {
        return Err(SettingsError::value("gateway.decode", "names no decode worker").into());
    }
    let members = fleet::fixed(&settings.decode, &settings.prefill);
    let listener = bind(settings.listen)?;
    let gateway = Gateway::start(settings, listener, members).await?;
    announce_when_ready(&gateway);
    let shutdown = gateway.shutdown_token();
    tokio::spawn(async move {
        shutdown_signal(false).await;
        shutdown.cancel();
    });
    gateway.run().await;
    Ok(())
}

/// Prints `ready http://HOST:PORT` once a decoder is connected.
fn announce_when_ready(gateway: &Gateway) {
    let app = gateway.app.clone();
    let addr = gateway.listener.local_addr();
    tokio::spawn(async move {
        app.ctx.fleet.any_decoder().await;
        if let Ok(addr) = addr {
            print_ready(addr);
        }
    });
}

/// The line that tells a supervisor, a script or a person that requests are welcome.
#[allow(clippy::print_stdout, reason = "the one line that this program promises on stdout")]
pub(crate) fn print_ready(addr: SocketAddr) {
    println!("ready http://{addr}");
}
