//! When bytes really leave: the time from a decoder's token message to the write on the client's socket.

use super::connections::Seat;
use parking_lot::Mutex;
use prometheus::Histogram;
use std::io::{IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Of one connection: the arrival of the oldest token whose bytes are not written yet.
#[derive(Clone)]
pub(super) struct WriteClock {
    pending: Arc<Mutex<Option<Instant>>>,
    histogram: Histogram,
}

impl WriteClock {
    pub(super) fn new(histogram: Histogram) -> Self {
        Self { pending: Arc::default(), histogram }
    }

    /// A token that arrived then is about to be written.
    pub(super) fn expect(&self, arrived: Instant) {
        self.pending.lock().get_or_insert(arrived);
    }

    fn written(&self) {
        if let Some(arrived) = self.pending.lock().take() {
            self.histogram.observe(arrived.elapsed().as_secs_f64());
        }
    }
}

/// A client's socket whose reads and writes the clock and the connection's seat see.
pub(super) struct ClockedStream<S> {
    stream: S,
    clock: WriteClock,
    seat: Arc<Seat>,
}

impl<S> ClockedStream<S> {
    pub(super) fn new(stream: S, clock: WriteClock, seat: Arc<Seat>) -> Self {
        Self { stream, clock, seat }
    }

    fn wrote(&self, polled: Poll<Result<usize>>) -> Poll<Result<usize>> {
        if matches!(polled, Poll::Ready(Ok(_))) {
            self.clock.written();
        }
        self.seat.blocked(polled.is_pending());
        polled
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClockedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.seat.read();
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClockedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.wrote(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.wrote(polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(cx);
        self.seat.blocked(polled.is_pending());
        polled
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
