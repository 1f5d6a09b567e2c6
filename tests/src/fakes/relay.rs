//! A bad network between a real prefill worker and a real decode worker: it knows frames and meddles with them.

use shared::hexbytes::Hex;
use shared::layout::Part;
use shared::wire::{
    Commit, FrameHeader, FrameKind, HEADER_BYTES, TransferDigest, TransferReceipt, parse_credit,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// What happens to one frame on its way to the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// It arrives.
    Pass,
    /// It does not; the numbering closes over the hole.
    Drop,
    /// It arrives twice.
    Double,
    /// One bit of its payload changes.
    FlipBit,
    /// The connection ends before it.
    Cut,
    /// The connection ends in the middle of its payload.
    CutInside,
    /// It arrives late.
    Delay(Duration),
    /// Neither it nor anything after it arrives, and the connection stays open.
    Stall,
}

type Decide = Arc<dyn Fn(&FrameHeader, u64) -> Act + Send + Sync>;

/// What is done with the frames of a transfer.
#[derive(Clone)]
pub struct Meddle {
    decide: Decide,
    /// The commit is rewritten to fit what was let through, as an honest sender of exactly that would say it.
    repair: bool,
    /// The repaired commit ends here.
    end: Option<u32>,
    /// Only the receiver's first credit reaches the sender.
    hold_credit: bool,
}

impl Meddle {
    /// Everything arrives.
    #[must_use]
    pub fn nothing() -> Self {
        Self::with(|_, _| Act::Pass)
    }

    /// `decide` sees each frame's header and its number in the sender's order.
    #[must_use]
    pub fn with(decide: impl Fn(&FrameHeader, u64) -> Act + Send + Sync + 'static) -> Self {
        Self { decide: Arc::new(decide), repair: false, end: None, hold_credit: false }
    }

    /// As [`Meddle::with`], and the commit covers up what is missing.
    #[must_use]
    pub fn covered_up(decide: impl Fn(&FrameHeader, u64) -> Act + Send + Sync + 'static) -> Self {
        Self { repair: true, ..Self::with(decide) }
    }

    /// Everything arrives, but the sender hears of no credit after the first.
    #[must_use]
    pub fn no_more_credit() -> Self {
        Self { hold_credit: true, ..Self::nothing() }
    }

    /// Rows from `end` on are not sent, and the commit says so.
    #[must_use]
    pub fn short(end: u32) -> Self {
        let decide = move |h: &FrameHeader, _| {
            if h.kind == FrameKind::Data && h.token_start >= end { Act::Drop } else { Act::Pass }
        };
        Self { end: Some(end), ..Self::covered_up(decide) }
    }
}

/// What crossed a relay.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Data frames that the sender sent.
    pub frames: u64,
    /// Their payload bytes.
    pub payload_bytes: u64,
    /// Rows that the sender sent, per layer and part.
    pub rows: BTreeMap<(u16, u16), u32>,
    /// The sender's commit.
    pub commit: Option<Commit>,
    /// Payload bytes that the sender was allowed.
    pub credit_bytes: u64,
    /// The receiver confirmed.
    pub receipt: bool,
}

/// One relayed transfer.
pub(super) struct Relay {
    meddle: Meddle,
    seen: Mutex<Seen>,
}

impl Relay {
    /// Listens for one connection and passes it on to `target`; gives the address. What was seen is pushed to `log`
    /// when the transfer ends.
    pub(super) async fn start(target: &str, meddle: Meddle, log: Arc<Mutex<Vec<Seen>>>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let target = target.to_owned();
        tokio::spawn(async move {
            let accepted = tokio::time::timeout(Duration::from_secs(60), listener.accept()).await;
            let Ok(Ok((sender, _))) = accepted else { return };
            let Ok(receiver) = TcpStream::connect(&target).await else { return };
            let (from_sender, to_sender) = sender.into_split();
            let (from_receiver, to_receiver) = receiver.into_split();
            let relay = Self { meddle, seen: Mutex::default() };
            tokio::select! {
                () = relay.forward(from_sender, to_receiver) => {}
                () = relay.back(from_receiver, to_sender) => {}
            }
            let seen = relay.seen.into_inner().unwrap();
            log.lock().unwrap().push(seen);
        });
        addr
    }

    async fn forward(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut through = TransferDigest::default();
        let (mut number, mut seq) = (0, 0);
        while let Some((mut header, mut payload)) = read_frame(&mut from).await {
            self.note(&header, &payload);
            let act = (self.meddle.decide)(&header, number);
            number += 1;
            match act {
                Act::Pass | Act::Double => {}
                Act::Drop => continue,
                Act::FlipBit => payload[header.payload_bytes as usize / 2] ^= 1,
                Act::Cut => return,
                Act::CutInside => {
                    let bytes = [&header.encode()[..], &payload[..payload.len() / 2]].concat();
                    let _ = to.write_all(&bytes).await;
                    return;
                }
                Act::Delay(time) => tokio::time::sleep(time).await,
                Act::Stall => return std::future::pending().await,
            }
            if let (FrameKind::Data, Ok(part)) = (header.kind, Part::try_from(header.part)) {
                through.add(header.layer, part, header.token_start, header.token_count, &payload);
            }
            if header.kind == FrameKind::Commit && self.meddle.repair {
                payload = self.repaired(&payload, &through);
                header = FrameHeader::control(FrameKind::Commit, header.transfer_id, 0, &payload);
            }
            for _ in 0..if act == Act::Double { 2 } else { 1 } {
                header.seq = seq;
                seq += 1;
                if to.write_all(&[&header.encode()[..], &payload].concat()).await.is_err() {
                    return;
                }
            }
        }
        let _ = to.shutdown().await;
        // The sender is done; what the receiver still has to say goes through.
        std::future::pending().await
    }

    async fn back(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut seq = 0;
        while let Some((mut header, mut payload)) = read_frame(&mut from).await {
            if let (FrameKind::Credit, Some(bytes)) = (header.kind, parse_credit(&payload)) {
                let mut seen = self.seen.lock().unwrap();
                if self.meddle.hold_credit && seen.credit_bytes > 0 {
                    continue;
                }
                seen.credit_bytes += bytes;
            }
            if header.kind == FrameKind::Receipt {
                self.seen.lock().unwrap().receipt = true;
                if self.meddle.repair {
                    payload = self.flattering_receipt();
                    header = FrameHeader::control(FrameKind::Receipt, header.transfer_id, 0, &payload);
                }
            }
            header.seq = seq;
            seq += 1;
            if to.write_all(&[&header.encode()[..], &payload].concat()).await.is_err() {
                return;
            }
        }
    }

    fn note(&self, header: &FrameHeader, payload: &[u8]) {
        let mut seen = self.seen.lock().unwrap();
        match header.kind {
            FrameKind::Data => {
                seen.frames += 1;
                seen.payload_bytes += header.payload_bytes;
                *seen.rows.entry((header.layer, header.part)).or_default() += header.token_count;
            }
            FrameKind::Commit => seen.commit = serde_json::from_slice(payload).ok(),
            _ => {}
        }
    }

    fn repaired(&self, commit: &[u8], through: &TransferDigest) -> Vec<u8> {
        let mut commit: Commit = serde_json::from_slice(commit).unwrap();
        commit.frames = through.frames();
        commit.payload_bytes = through.payload_bytes();
        commit.digest = Hex(through.finish());
        if let Some(end) = self.meddle.end {
            commit.token_end = end;
            commit.short_reason = Some("timeout".to_owned());
        }
        serde_json::to_vec(&commit).unwrap()
    }

    /// The receipt that the sender expects for its own commit.
    fn flattering_receipt(&self) -> Vec<u8> {
        let commit = self.seen.lock().unwrap().commit.clone().unwrap();
        let Commit { token_end, frames, payload_bytes, digest, .. } = commit;
        serde_json::to_vec(&TransferReceipt { token_end, frames, payload_bytes, digest }).unwrap()
    }
}

async fn read_frame(from: &mut OwnedReadHalf) -> Option<(FrameHeader, Vec<u8>)> {
    let mut head = [0; HEADER_BYTES];
    from.read_exact(&mut head).await.ok()?;
    let header = FrameHeader::decode(&head).ok()?;
    let mut payload = vec![0; usize::try_from(header.payload_bytes).ok()?];
    from.read_exact(&mut payload).await.ok()?;
    Some((header, payload))
}
