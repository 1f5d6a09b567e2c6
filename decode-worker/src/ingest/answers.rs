//! The receiver's side of the conversation: credits, receipt, abort.

use super::fault;
use serde::Serialize;
use shared::hexbytes::Hex;
use shared::transport::{FrameSender, TcpFrameSender};
use shared::wire::{Abort, FrameHeader, FrameKind, TransferReceipt};
use std::time::Duration;

/// How long a peer may take to accept a last message.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

/// Numbered frames to the sender.
#[derive(Debug)]
pub(super) struct Answers {
    tx: TcpFrameSender,
    transfer_id: Hex<16>,
    next_seq: u64,
}

impl Answers {
    pub(super) fn new(tx: TcpFrameSender, transfer_id: Hex<16>) -> Self {
        Self { tx, transfer_id, next_seq: 0 }
    }

    /// Allows `bytes` more payload.
    pub(super) async fn credit(&mut self, bytes: u64) -> Result<(), Abort> {
        self.send(FrameKind::Credit, &bytes.to_le_bytes()).await
    }

    /// Confirms the commit and closes this direction. A peer that left does not matter any more.
    pub(super) async fn receipt(&mut self, receipt: &TransferReceipt) {
        self.goodbye(FrameKind::Receipt, receipt).await;
    }

    /// Says why nothing came of it and closes this direction.
    pub(super) async fn abort(&mut self, abort: &Abort) {
        self.goodbye(FrameKind::Abort, abort).await;
    }

    async fn goodbye(&mut self, kind: FrameKind, body: &impl Serialize) {
        let Ok(body) = serde_json::to_vec(body) else { return };
        let farewell = async {
            if self.send(kind, &body).await.is_ok() {
                let _ = self.tx.finish().await;
            }
        };
        let _ = tokio::time::timeout(GOODBYE_TIMEOUT, farewell).await;
    }

    async fn send(&mut self, kind: FrameKind, payload: &[u8]) -> Result<(), Abort> {
        let header = FrameHeader::control(kind, self.transfer_id, self.next_seq, payload);
        self.next_seq += 1;
        self.tx.send(&header, payload).await.map_err(|e| fault::of_transport(&e))
    }
}
