//! One transfer on the bulk port: open, frames within the credit, commit, receipt.

use std::time::{Duration, Instant};

use serde::Serialize;
use shared::hexbytes::Hex;
use shared::layout::Part;
use shared::transport::{FrameSender as _, TcpFrameReceiver, TcpFrameSender, TransportError, connect};
use shared::wire::{
    Abort, AbortCode, Commit, FrameHeader, FrameKind, Open, TransferDigest, TransferReceipt, payload_crc,
};

use super::inbound::Inbound;
use crate::ops::Piece;

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the first credit after the open frame.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for an abort to leave.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// An open transfer.
pub(super) struct Transfer {
    id: Hex<16>,
    tx: TcpFrameSender,
    inbound: Inbound,
    next_seq: u64,
    digest: TransferDigest,
    /// A frame was begun and not finished: nothing sensible can follow it.
    broken: bool,
    /// Time in which something waited to be sent or confirmed.
    busy: Duration,
}

impl Transfer {
    /// Connects, announces and waits for the first credit. A connection that fails before that is tried once more: the
    /// receiver may just have restarted.
    ///
    /// # Errors
    /// The receiver's own refusal, or [`AbortCode::ConnectionLost`].
    pub(super) async fn open(addr: &str, id: Hex<16>, open: &Open) -> Result<Self, Abort> {
        match Self::try_open(addr, id, open).await {
            Err(Attempt::Broken(first)) => {
                tracing::info!(transfer = %id, error = %first, "bulk connection failed; trying once more");
                Self::try_open(addr, id, open).await.map_err(Attempt::into_abort)
            }
            other => other.map_err(Attempt::into_abort),
        }
    }

    async fn try_open(addr: &str, id: Hex<16>, open: &Open) -> Result<Self, Attempt> {
        let broken = |e: TransportError| Attempt::Broken(e.to_string());
        let (tx, rx): (TcpFrameSender, TcpFrameReceiver) =
            connect(addr, CONNECT_TIMEOUT).await.map_err(broken)?;
        let digest = TransferDigest::default();
        let mut transfer = Self {
            id,
            tx,
            inbound: Inbound::listen(id, rx),
            next_seq: 0,
            digest,
            broken: false,
            busy: Duration::ZERO,
        };
        transfer.control(FrameKind::Open, open).await.map_err(broken)?;
        match tokio::time::timeout(OPEN_TIMEOUT, transfer.inbound.first_credit()).await {
            Ok(Ok(())) => Ok(transfer),
            Ok(Err(abort)) if abort.code == AbortCode::ConnectionLost => Err(Attempt::Broken(abort.message)),
            Ok(Err(abort)) => Err(Attempt::Refused(abort)),
            Err(_) => Err(Attempt::Broken("no credit came".into())),
        }
    }

    /// Sends both arrays of a piece, as credit allows.
    ///
    /// # Errors
    /// The receiver's abort, or [`AbortCode::ConnectionLost`].
    pub(super) async fn send(&mut self, piece: &Piece) -> Result<(), Abort> {
        let start = Instant::now();
        let sent = self.send_parts(piece).await;
        self.busy += start.elapsed();
        sent
    }

    /// Time in which something waited to be sent or confirmed.
    pub(super) fn busy(&self) -> Duration {
        self.busy
    }

    async fn send_parts(&mut self, piece: &Piece) -> Result<(), Abort> {
        for (part, payload) in [(Part::K, &piece.keys), (Part::V, &piece.values)] {
            self.inbound.take_credit(payload.len()).await?;
            let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            let (token_start, token_count) = (number(piece.tokens.start), number(piece.tokens.len()));
            let layer = u16::try_from(piece.layer).unwrap_or(u16::MAX);
            self.digest.add(layer, part, token_start, token_count, payload);
            let header = FrameHeader {
                kind: FrameKind::Data,
                transfer_id: self.id,
                seq: self.next_seq,
                layer,
                part: part as u16,
                token_start,
                token_count,
                payload_bytes: payload.len() as u64,
                crc32c: payload_crc(payload),
            };
            self.frame(&header, payload).await.map_err(lost)?;
        }
        Ok(())
    }

    /// Says that `start..end` was sent and waits for the receipt.
    ///
    /// # Errors
    /// The receiver's abort, or [`AbortCode::Checksum`] if the receipt is of something else.
    pub(super) async fn commit(
        &mut self,
        start: u32,
        end: u32,
        short_reason: Option<String>,
    ) -> Result<TransferReceipt, Abort> {
        let waiting_since = Instant::now();
        let digest = Hex(self.digest.finish());
        let (frames, payload_bytes) = (self.digest.frames(), self.digest.payload_bytes());
        let commit =
            Commit { token_start: start, token_end: end, frames, payload_bytes, digest, short_reason };
        self.control(FrameKind::Commit, &commit).await.map_err(lost)?;
        let receipt = self.inbound.receipt().await?;
        self.busy += waiting_since.elapsed();
        if receipt != (TransferReceipt { token_end: end, frames, payload_bytes, digest }) {
            return Err(Abort::new(AbortCode::Checksum, "the receipt is not of what was sent"));
        }
        Ok(receipt)
    }

    /// Resolves when the receiver ends the transfer early.
    pub(super) async fn ended(&mut self) -> Abort {
        self.inbound.ended().await
    }

    /// Tells the receiver that nothing more comes, as far as that can still be told.
    pub(super) async fn abort(mut self, abort: &Abort) {
        if !self.broken {
            let told = async {
                self.control(FrameKind::Abort, abort).await?;
                self.tx.finish().await
            };
            let _ = tokio::time::timeout(ABORT_TIMEOUT, told).await;
        }
    }

    async fn control(&mut self, kind: FrameKind, body: &impl Serialize) -> Result<(), TransportError> {
        let payload = serde_json::to_vec(body).map_err(std::io::Error::other)?;
        let header = FrameHeader::control(kind, self.id, self.next_seq, &payload);
        self.frame(&header, &payload).await
    }

    async fn frame(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), TransportError> {
        self.broken = true;
        self.tx.send(header, payload).await?;
        self.next_seq += 1;
        self.broken = false;
        Ok(())
    }
}

enum Attempt {
    /// Nothing was received: worth another try.
    Broken(String),
    /// The receiver said no.
    Refused(Abort),
}

impl Attempt {
    fn into_abort(self) -> Abort {
        match self {
            Self::Broken(message) => Abort::new(AbortCode::ConnectionLost, message),
            Self::Refused(abort) => abort,
        }
    }
}

#[allow(clippy::needless_pass_by_value, reason = "used as a conversion")]
fn lost(error: TransportError) -> Abort {
    Abort::new(AbortCode::ConnectionLost, error.to_string())
}
