//! One transfer from its ticket to its end.

use super::answers::Answers;
use super::assembly::Assembly;
use super::{Committed, Expected, OpenTransfer, Outcome, TransferControl, TransferPlan, fault};
use crate::block::block_bytes;
use crate::store::Origin;
use shared::hexbytes::Hex;
use shared::transport::{FrameReceiver, TcpFrameReceiver};
use shared::wire::{Abort, AbortCode, Commit, FrameHeader, FrameKind, Open, TransferReceipt};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Payload bytes that a sender may have under way.
const WINDOW_BYTES: u64 = 32 << 20;
/// How long an aborted sender is listened to, so that it gets to read why.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A longer frame from an aborted sender ends the draining instead.
const MAX_DRAINED_FRAME_BYTES: u64 = 4 << 20;

/// A connection that showed the right ticket.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) answers: Answers,
    pub(super) rx: TcpFrameReceiver,
    pub(super) open: Open,
}

/// Waits for the sender, receives, reports.
pub(super) async fn run(
    transfer: OpenTransfer,
    plan: TransferPlan,
    opened: oneshot::Receiver<Opened>,
    control: TransferControl,
    report: oneshot::Sender<Outcome>,
) {
    let unopened = async {
        match tokio::time::timeout(plan.idle_timeout, opened).await {
            Ok(Ok(opened)) => Ok(opened),
            Ok(Err(_)) => Err(Abort::new(AbortCode::Internal, "the bulk port is gone")),
            Err(_) => Err(Abort::new(AbortCode::Timeout, "no sender came")),
        }
    };
    let opened = tokio::select! {
        biased;
        reason = control.stopped() => Err(reason),
        opened = unopened => opened,
    };
    let Opened { mut answers, mut rx, open } = match opened {
        Ok(opened) => opened,
        Err(abort) => {
            drop((plan, transfer));
            let _ = report.send(Err(abort));
            return;
        }
    };
    let (id, expected) = (transfer.id, transfer.shared.expected.clone());
    let result = tokio::select! {
        biased;
        reason = control.stopped() => Err((reason, true)),
        result = receive(id, &expected, plan, &open, &mut answers, &mut rx) => result.map_err(|e| (e, false)),
    };
    drop(transfer);
    match result {
        Ok((committed, receipt)) => {
            let _ = report.send(Ok(committed));
            answers.receipt(&receipt).await;
        }
        Err((abort, stopped)) => {
            tracing::info!(transfer = %id, %abort, "transfer aborted");
            let _ = report.send(Err(abort.clone()));
            answers.abort(&abort).await;
            if !stopped {
                let _ = tokio::time::timeout(DRAIN_TIMEOUT, drain(&mut rx)).await;
            }
        }
    }
}

/// The protocol after a valid ticket, up to and including making the blocks visible.
async fn receive(
    id: Hex<16>,
    expected: &Expected,
    plan: TransferPlan,
    open: &Open,
    answers: &mut Answers,
    rx: &mut TcpFrameReceiver,
) -> Result<(Committed, TransferReceipt), Abort> {
    check_open(open, expected, &plan)?;
    let idle = plan.idle_timeout;
    let window = window_bytes(expected);
    answers.credit(window).await?;
    let mut assembly = Assembly::new(expected.layout.clone(), plan.token_start, plan.token_end);
    let (mut granted, mut stored) = (window, 0);
    loop {
        let header = within(idle, async { rx.header().await.map_err(|e| fault::of_transport(&e)) }).await?;
        let Some(header) = header else {
            return Err(Abort::new(AbortCode::ConnectionLost, "the connection closed before the commit"));
        };
        if header.transfer_id != id {
            return Err(Abort::new(AbortCode::ProtocolError, "a frame of another transfer"));
        }
        match header.kind {
            FrameKind::Data => {
                if header.payload_bytes > granted - assembly.payload_bytes() {
                    return Err(Abort::new(AbortCode::ProtocolError, "more payload than the credit allows"));
                }
                within(idle, assembly.take(&header, rx)).await?;
                stored += header.payload_bytes;
                if stored >= window / 4 {
                    within(idle, answers.credit(stored)).await?;
                    granted += stored;
                    stored = 0;
                }
            }
            FrameKind::Commit => {
                let commit: Commit = within(idle, parse_body(&header, rx)).await?;
                return finish(id, plan, assembly, commit);
            }
            FrameKind::Abort => return Err(within(idle, parse_body(&header, rx)).await?),
            other => {
                return Err(Abort::new(AbortCode::ProtocolError, format!("{other:?} is not for a receiver")));
            }
        }
    }
}

fn check_open(open: &Open, expected: &Expected, plan: &TransferPlan) -> Result<(), Abort> {
    let refuse = |code, text: &str| Err(Abort::new(code, text));
    if open.fingerprint != expected.fingerprint {
        return refuse(AbortCode::FingerprintMismatch, "the sender made the cache of another decoder");
    }
    if open.layout_digest != expected.layout_digest {
        return refuse(AbortCode::LayoutMismatch, "the sender obeys another cache layout");
    }
    if open.tokens_digest.0 != plan.tokens_digest {
        return refuse(AbortCode::TokensMismatch, "the sender read another prompt");
    }
    if (open.token_start, open.token_end) != (plan.token_start, plan.token_end) {
        return refuse(AbortCode::TokensMismatch, "the sender announced another range");
    }
    Ok(())
}

/// Everything arrived and is right: the one place where blocks become visible.
fn finish(
    id: Hex<16>,
    mut plan: TransferPlan,
    assembly: Assembly,
    commit: Commit,
) -> Result<(Committed, TransferReceipt), Abort> {
    let assembled = assembly.commit(&commit)?;
    let digest = Hex(assembled.digest);
    let blocks: Vec<_> = assembled.blocks.into_iter().map(Arc::new).collect();
    // A key exists for every full block of the planned range, and committed blocks are a prefix of those.
    let full = assembled.full_blocks;
    let items: Vec<_> = plan.keys.iter().copied().zip(blocks.iter().take(full).cloned()).collect();
    let lease = plan.reservation.commit(items, Origin::Bridged { transfer_id: id });
    plan.reservation.shrink(blocks.iter().skip(full).map(|block| block_bytes(block)).sum());
    let Commit { token_start, token_end, frames, payload_bytes, short_reason, .. } = commit;
    let receipt = TransferReceipt { token_end, frames, payload_bytes, digest };
    let tail = plan.reservation;
    let committed =
        Committed { token_start, token_end, blocks, lease, tail, payload_bytes, digest, short_reason };
    Ok((committed, receipt))
}

/// Reads a small body.
pub(super) async fn read_body(header: &FrameHeader, rx: &mut impl FrameReceiver) -> Result<Vec<u8>, Abort> {
    let mut body = vec![0; header.check_body().map_err(|e| fault::of_header(&e))?];
    rx.payload(header, &mut body).await.map_err(|e| fault::of_transport(&e))?;
    Ok(body)
}

async fn parse_body<T: serde::de::DeserializeOwned>(
    header: &FrameHeader,
    rx: &mut impl FrameReceiver,
) -> Result<T, Abort> {
    let body = read_body(header, rx).await?;
    serde_json::from_slice(&body)
        .map_err(|e| Abort::new(AbortCode::ProtocolError, format!("{:?} frame: {e}", header.kind)))
}

async fn within<T>(limit: Duration, what: impl Future<Output = Result<T, Abort>>) -> Result<T, Abort> {
    match tokio::time::timeout(limit, what).await {
        Ok(result) => result,
        Err(_) => Err(Abort::new(AbortCode::Timeout, format!("nothing moved for {} ms", limit.as_millis()))),
    }
}

/// At least a few frames, however large one is.
fn window_bytes(expected: &Expected) -> u64 {
    let layers = expected.layout.layers.iter();
    let per_token = layers.flat_map(|l| l.parts().iter().map(|&p| l.bytes_per_token(p))).max().unwrap_or(0);
    WINDOW_BYTES.max(4 * per_token * u64::from(expected.layout.block_tokens))
}

/// Throws away what an aborted sender still sends: closing a socket with unread bytes would destroy the
/// abort frame on its way.
async fn drain(rx: &mut TcpFrameReceiver) {
    let mut sink = Vec::new();
    while let Ok(Some(header)) = rx.header().await {
        sink.resize(header.payload_bytes.min(MAX_DRAINED_FRAME_BYTES) as usize, 0);
        // The checksum of thrown-away bytes does not matter; a broken connection ends this at the header.
        let _ = rx.payload(&header, &mut sink).await;
    }
}
