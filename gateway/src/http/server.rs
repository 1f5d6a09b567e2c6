//! The accept loop: header-read timeout and caps, which `axum::serve` lacks, and draining.

use super::write_clock::{ClockedStream, WriteClock};
use super::{App, router};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Most headers of a request; more get 431.
const MAX_HEADERS: usize = 128;
/// After the last answer, time for its bytes to leave.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

/// Serves until `shutdown`, then lets running answers finish within the drain limit.
pub(crate) async fn serve(listener: TcpListener, app: Arc<App>, shutdown: CancellationToken) {
    let service = TowerToHyperService::new(router(app.clone()));
    let graceful = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(app.settings.header_read_timeout)
        .max_buf_size(app.settings.max_header_bytes)
        .max_headers(MAX_HEADERS);
    let drained = drained(&app, &shutdown);
    tokio::pin!(drained);
    loop {
        let stream = tokio::select! {
            () = &mut drained => break,
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
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        let clock = WriteClock::new(app.ctx.metrics.token_write.clone());
        let io = TokioIo::new(ClockedStream::new(stream, clock.clone()));
        let service = service.clone();
        let clocked = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(clock.clone());
            service.call(request)
        });
        let connection = http.serve_connection(io, clocked);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection");
            }
        });
    }
    drop(listener);
    if tokio::time::timeout(FLUSH_LIMIT, graceful.shutdown()).await.is_err() {
        tracing::warn!("closing connections that are still open");
    }
}

/// Resolves when shutdown was asked for and nothing runs any more, or the drain limit has passed.
async fn drained(app: &App, shutdown: &CancellationToken) {
    shutdown.cancelled().await;
    app.draining.store(true, Ordering::Relaxed);
    let all = u32::try_from(app.settings.max_in_flight).unwrap_or(u32::MAX);
    tracing::info!("draining");
    if tokio::time::timeout(app.settings.drain_limit, app.permits.acquire_many(all)).await.is_err() {
        tracing::warn!("drain limit reached with answers still running");
    }
}
