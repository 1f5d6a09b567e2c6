//! The bulk port: connections are nobody until their first frame shows a ticket.

use super::answers::Answers;
use super::receive::{Opened, read_body};
use super::{Transfers, fault};
use shared::transport::{FrameReceiver, TcpFrameReceiver, TcpFrameSender, accept};
use shared::wire::{Abort, AbortCode, FrameKind, Open};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

/// Time for the first frame.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that may be without a ticket at once.
const MAX_STRANGERS: usize = 64;

/// Accepts senders until `shutdown`.
pub async fn serve_bulk(listener: TcpListener, transfers: Transfers, shutdown: CancellationToken) {
    let mut strangers: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = accept(&listener) => accepted,
        };
        let (tx, rx, peer) = match accepted {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(%error, "bulk accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        strangers.retain(|stranger| !stranger.is_finished());
        // A sender shows its ticket within milliseconds, so the oldest connection without one is not a sender.
        if strangers.len() >= MAX_STRANGERS
            && let Some(oldest) = strangers.pop_front()
        {
            tracing::warn!("too many bulk connections without a ticket; closing the oldest");
            oldest.abort();
        }
        let transfers = transfers.clone();
        let stranger = tokio::spawn(async move {
            let met = tokio::time::timeout(OPEN_TIMEOUT, admit(tx, rx, &transfers)).await;
            match met {
                Ok(Ok(())) => {}
                Ok(Err(abort)) => tracing::warn!(%peer, %abort, "bulk connection refused"),
                Err(_) => tracing::warn!(%peer, "bulk connection showed no ticket in time"),
            }
        });
        strangers.push_back(stranger.abort_handle());
    }
}

/// Reads the open frame and hands the connection to its transfer. Only a valid ticket reaches a transfer,
/// so a stranger can't disturb one.
async fn admit(tx: TcpFrameSender, mut rx: TcpFrameReceiver, transfers: &Transfers) -> Result<(), Abort> {
    let header = rx.header().await.map_err(|e| fault::of_transport(&e))?;
    let header = header.ok_or_else(|| Abort::new(AbortCode::ConnectionLost, "closed without a frame"))?;
    let door = match header.kind {
        FrameKind::Open => {
            let body = read_body(&header, &mut rx).await?;
            let open = serde_json::from_slice::<Open>(&body);
            let open = open.map_err(|e| Abort::new(AbortCode::ProtocolError, format!("open frame: {e}")));
            open.and_then(|open| match transfers.claim(&header.transfer_id, &open.ticket) {
                Some(door) => Ok((open, door)),
                None => Err(Abort::new(AbortCode::BadTicket, "unknown, used or expired ticket")),
            })
        }
        other => Err(Abort::new(AbortCode::ProtocolError, format!("{other:?} came before open"))),
    };
    let mut answers = Answers::new(tx, header.transfer_id);
    match door {
        Ok((open, door)) => door
            .send(Opened { answers, rx, open })
            .map_err(|_| Abort::new(AbortCode::BadTicket, "the transfer has just ended")),
        Err(abort) => {
            answers.abort(&abort).await;
            Err(abort)
        }
    }
}
