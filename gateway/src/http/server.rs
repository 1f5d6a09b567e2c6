//! The accept loop: caps and timeouts that `axum::serve` lacks, TLS, and draining.

use super::connections::{Connections, Seated};
use super::front::Front;
use super::held::Held;
use super::tls::Acceptor;
use super::write_clock::{ClockedStream, WriteClock};
use super::{App, overload, unread};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Most headers of a request; more get 431.
const MAX_HEADERS: usize = 128;
/// After the last answer, time for its bytes to leave.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// What every connection needs.
struct Shared {
    app: Arc<App>,
    front: Front,
    http: http1::Builder,
    tls: Option<Acceptor>,
    /// Cancelled when idle connections are to end.
    closing: CancellationToken,
}

/// Serves until `shutdown`, then lets running answers finish within the drain limit.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    tls: Option<Acceptor>,
    shutdown: CancellationToken,
) {
    let mut http = http1::Builder::new();
    http.max_buf_size(app.settings.max_header_bytes).max_headers(MAX_HEADERS);
    let shared = Arc::new(Shared {
        app: app.clone(),
        front: Front::new(app.clone()),
        http,
        tls,
        closing: CancellationToken::new(),
    });
    let connections = Connections::new(app.max_connections, app.ctx.metrics.connections.clone());
    let tracker = TaskTracker::new();
    let mut sweep = tokio::time::interval(app.settings.patience.interval());
    let mut drained = pin!(drained(&app, &shutdown));
    loop {
        let stream = tokio::select! {
            () = &mut drained => break,
            _ = sweep.tick() => {
                connections.sweep(&app.settings.patience);
                continue;
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // A full descriptor table passes; accepting in a tight loop would not help.
                    tracing::warn!(%error, "accept");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            },
        };
        match connections.seat() {
            Some(seated) => drop(tracker.spawn(shared.clone().connection(stream, seated))),
            None => overload::turn_away(stream, shared.tls.is_some(), &app.ctx.metrics),
        }
    }
    drop(listener);
    shared.closing.cancel();
    app.viewers_shutdown.cancel();
    tracker.close();
    if tokio::time::timeout(FLUSH_LIMIT, tracker.wait()).await.is_err() {
        tracing::warn!("closing connections that are still open");
    }
}

/// Resolves when shutdown was asked for and nothing runs any more, or the drain limit has passed.
async fn drained(app: &App, shutdown: &CancellationToken) {
    shutdown.cancelled().await;
    app.draining.store(true, Ordering::Relaxed);
    tracing::info!("draining");
    if tokio::time::timeout(app.settings.drain_limit, app.admission.emptied()).await.is_err() {
        tracing::warn!("drain limit reached with answers still running");
    }
}

impl Shared {
    async fn connection(self: Arc<Self>, stream: TcpStream, seated: Seated) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        match &self.tls {
            None => self.http(stream, &seated).await,
            Some(tls) => match tls.accept(stream, self.app.settings.patience.head).await {
                Ok(stream) => self.http(stream, &seated).await,
                Err(error) => tracing::debug!(%error, "TLS handshake"),
            },
        }
    }

    async fn http(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        Seated { seat, .. }: &Seated,
    ) {
        let clock = WriteClock::new(self.app.ctx.metrics.token_write.clone());
        let io = TokioIo::new(ClockedStream::new(stream, clock.clone(), seat.clone()));
        let answer = service_fn(|request: hyper::Request<Incoming>| {
            let busy = seat.request();
            // An idle connection must not hold room for the largest answer.
            let (request, unread) = unread::watch(request);
            let answer = Box::pin(self.front.answer(request, clock.clone()));
            async move {
                let mut response = answer.await;
                unread.tell(&mut response);
                Ok::<_, Infallible>(response.map(|body| Held::new(body, busy)))
            }
        });
        let mut connection = pin!(self.http.serve_connection(io, answer).with_upgrades());
        let ended = tokio::select! {
            ended = &mut connection => Some(ended),
            () = seat.cut_off() => return,
            () = seat.asked_to_leave() => None,
            () = self.closing.cancelled() => None,
        };
        let ended = match ended {
            Some(ended) => ended,
            None => {
                // An idle connection ends at once; one that has just been asked something answers first.
                connection.as_mut().graceful_shutdown();
                match tokio::time::timeout(FLUSH_LIMIT, connection).await {
                    Ok(ended) => ended,
                    Err(_) => return,
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "connection");
        }
    }
}
