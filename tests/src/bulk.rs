//! A hand-made sender for a decoder's bulk port, honest or not.

use shared::control::{CacheIdentity, TransferOffer};
use shared::hexbytes::Hex;
use shared::keys::tokens_digest;
use shared::layout::{CacheLayout, Part};
use shared::wire::{
    Abort, Commit, FrameHeader, FrameKind, HEADER_BYTES, Open, TransferDigest, TransferReceipt, payload_crc,
};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// One data frame before it is sent.
#[derive(Debug, Clone)]
pub struct Rows {
    /// Layer index.
    pub layer: u16,
    /// Which array.
    pub part: Part,
    /// First token.
    pub start: u32,
    /// Tokens.
    pub count: u32,
    /// Bytes, `[n_kv_heads, count, head_dim]`.
    pub payload: Vec<u8>,
}

/// What came back in the end.
#[derive(Debug, Default, Clone)]
pub struct Reply {
    /// The receiver refused.
    pub abort: Option<Abort>,
    /// The receiver confirmed.
    pub receipt: Option<TransferReceipt>,
    /// The receiver closed the connection.
    pub closed: bool,
}

/// A connection to a bulk port.
#[derive(Debug)]
pub struct Bulk {
    stream: TcpStream,
    /// Name of the transfer in every frame.
    pub transfer_id: Hex<16>,
    /// Number of the next frame.
    pub seq: u64,
    /// Of the rows sent so far.
    pub digest: TransferDigest,
    recording: Option<Vec<u8>>,
}

impl Bulk {
    /// Connects; sends nothing yet.
    pub async fn connect(offer: &TransferOffer) -> Self {
        let stream = TcpStream::connect(&offer.bulk_addr).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            transfer_id: offer.transfer_id,
            seq: 0,
            digest: TransferDigest::default(),
            recording: None,
        }
    }

    /// Writes bytes as they are; an already closed connection is not an error here.
    pub async fn raw(&mut self, bytes: &[u8]) {
        if let Some(recording) = &mut self.recording {
            recording.extend_from_slice(bytes);
            return;
        }
        let _ = self.stream.write_all(bytes).await;
    }

    /// From now on bytes are kept instead of sent.
    pub fn record(&mut self) {
        self.recording = Some(vec![]);
    }

    /// The bytes kept since; from now on they are sent again.
    pub fn recorded(&mut self) -> Vec<u8> {
        self.recording.take().unwrap_or_default()
    }

    /// Sends a frame without rows.
    pub async fn control(&mut self, kind: FrameKind, body: &impl serde::Serialize) {
        let payload = serde_json::to_vec(body).unwrap();
        let header = FrameHeader::control(kind, self.transfer_id, self.seq, &payload);
        self.frame(&header, &payload).await;
    }

    /// Sends rows and counts them.
    pub async fn data(&mut self, rows: &Rows) {
        self.digest.add(rows.layer, rows.part, rows.start, rows.count, &rows.payload);
        let header = self.header_of(rows);
        self.frame(&header, &rows.payload).await;
    }

    /// Sends a frame and takes the next sequence number.
    pub async fn frame(&mut self, header: &FrameHeader, payload: &[u8]) {
        self.seq = header.seq.wrapping_add(1);
        self.raw(&[&header.encode()[..], payload].concat()).await;
    }

    /// The header that rows would travel with.
    #[must_use]
    pub fn header_of(&self, rows: &Rows) -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Data,
            transfer_id: self.transfer_id,
            seq: self.seq,
            layer: rows.layer,
            part: rows.part as u16,
            token_start: rows.start,
            token_count: rows.count,
            payload_bytes: rows.payload.len() as u64,
            crc32c: payload_crc(&rows.payload),
        }
    }

    /// The commit that fits what was sent.
    #[must_use]
    pub fn commit_of(&self, start: u32, end: u32) -> Commit {
        Commit {
            token_start: start,
            token_end: end,
            frames: self.digest.frames(),
            payload_bytes: self.digest.payload_bytes(),
            digest: Hex(self.digest.finish()),
            short_reason: None,
        }
    }

    /// Closes the sending direction.
    pub async fn close(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// Reads what the receiver says until it confirms, refuses or closes; gives up after `limit`.
    pub async fn reply(&mut self, limit: Duration) -> Reply {
        let mut reply = Reply::default();
        let reading = async {
            loop {
                let mut head = [0; HEADER_BYTES];
                if self.stream.read_exact(&mut head).await.is_err() {
                    reply.closed = true;
                    return;
                }
                let header = FrameHeader::decode(&head).unwrap();
                let mut body = vec![0; usize::try_from(header.payload_bytes).unwrap()];
                if self.stream.read_exact(&mut body).await.is_err() {
                    reply.closed = true;
                    return;
                }
                match header.kind {
                    FrameKind::Credit => {}
                    FrameKind::Abort => {
                        reply.abort = Some(serde_json::from_slice(&body).unwrap());
                        return;
                    }
                    FrameKind::Receipt => {
                        reply.receipt = Some(serde_json::from_slice(&body).unwrap());
                        return;
                    }
                    other => panic!("the receiver sent {other:?}"),
                }
            }
        };
        let _ = tokio::time::timeout(limit, reading).await;
        reply
    }
}

/// The `open` that fits an offer.
#[must_use]
pub fn open_of(offer: &TransferOffer, cache: &CacheIdentity, tokens: &[u32]) -> Open {
    Open {
        ticket: offer.ticket,
        fingerprint: cache.fingerprint,
        layout_digest: Hex(cache.layout.digest()),
        tokens_digest: Hex(tokens_digest(tokens)),
        token_start: offer.token_start,
        token_end: offer.token_end,
    }
}

/// Rows of every array over a range, cut at block borders, in layer order; contents are small finite numbers.
#[must_use]
pub fn rows(layout: &CacheLayout, range: std::ops::Range<u32>) -> Vec<Rows> {
    let block = layout.block_tokens;
    let mut out = vec![];
    for (layer, part) in layout.arrays() {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start / block + 1) * block);
            let bytes = layout.layers[usize::from(layer)].bytes_per_token(part) * u64::from(end - start);
            // 0x3c is 1.0 in f16, and a small normal number in f32 and bf16.
            let payload = (0..bytes).map(|i| if i % 2 == 0 { (i / 2 % 251) as u8 } else { 0x3c }).collect();
            out.push(Rows { layer, part, start, count: end - start, payload });
            start = end;
        }
    }
    out
}
