//! A sink that sends pieces as cache frames over loopback TCP to a receiver that checks and counts them.
//!
//! Frames, checksums and the transfer digest are the protocol's own, on both ends. Pieces are dealt out to several
//! connections, each with its own sending and receiving thread.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use shared::hexbytes::Hex;
use shared::layout::Part;
use shared::wire::{FrameHeader, FrameKind, HEADER_BYTES, TransferDigest, payload_crc};

use super::ToolError;
use crate::ops::{Piece, Sink, SinkClosed};

/// Pieces that wait for a connection.
const QUEUE: usize = 16;

/// The sending end.
pub(super) struct CountingSink {
    queue: Mutex<Option<SyncSender<Piece>>>,
    senders: Mutex<Vec<JoinHandle<std::io::Result<Counted>>>>,
    receivers: Mutex<Vec<JoinHandle<std::io::Result<Counted>>>>,
    sent: Mutex<Vec<Counted>>,
}

/// What one end of one connection saw.
#[derive(Debug, Default)]
struct Counted {
    frames: u64,
    payload_bytes: u64,
    digest: [u8; 32],
}

impl CountingSink {
    pub(super) fn start(connections: usize) -> Result<Self, ToolError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (queue, pieces) = sync_channel(QUEUE);
        let pieces = Arc::new(Mutex::new(pieces));
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for _ in 0..connections.max(1) {
            let out = TcpStream::connect(listener.local_addr()?)?;
            let (input, _) = listener.accept()?;
            out.set_nodelay(true)?;
            input.set_nodelay(true)?;
            let pieces = pieces.clone();
            senders.push(std::thread::spawn(move || send(out, &pieces)));
            receivers.push(std::thread::spawn(move || receive(input)));
        }
        Ok(Self {
            queue: Mutex::new(Some(queue)),
            senders: Mutex::new(senders),
            receivers: Mutex::new(receivers),
            sent: Mutex::default(),
        })
    }

    /// Commits every connection and waits for the receiver's answers.
    pub(super) fn commit(&self) -> Result<(), ToolError> {
        self.queue.lock().take();
        let sent = join(&self.senders)?;
        *self.sent.lock() = sent;
        Ok(())
    }

    /// Ends every connection; frames and payload bytes that both ends agree on.
    pub(super) fn finish(&self) -> Result<(u64, u64), ToolError> {
        let received = join(&self.receivers)?;
        let mut total = (0, 0);
        for (s, r) in self.sent.lock().iter().zip(&received) {
            if (s.frames, s.payload_bytes, s.digest) != (r.frames, r.payload_bytes, r.digest) {
                return Err(ToolError::Argument(format!(
                    "the two ends disagree: sent {s:?}, received {r:?}"
                )));
            }
            total = (total.0 + r.frames, total.1 + r.payload_bytes);
        }
        Ok(total)
    }
}

impl Sink for CountingSink {
    fn deliver(&self, piece: Piece) -> Result<(), SinkClosed> {
        let queue = self.queue.lock().clone().ok_or(SinkClosed)?;
        queue.send(piece).map_err(|_| SinkClosed)
    }
}

fn join(handles: &Mutex<Vec<JoinHandle<std::io::Result<Counted>>>>) -> std::io::Result<Vec<Counted>> {
    let handles = std::mem::take(&mut *handles.lock());
    handles.into_iter().map(|handle| handle.join().map_err(|_| closed())?).collect()
}

/// Sends whatever piece is next until there are no more, then commits and waits for the receipt.
fn send(mut stream: TcpStream, pieces: &Mutex<Receiver<Piece>>) -> std::io::Result<Counted> {
    let mut digest = TransferDigest::default();
    let mut seq = 0;
    let next = || pieces.lock().recv();
    while let Ok(piece) = next() {
        for (part, payload) in [(Part::K, &piece.keys), (Part::V, &piece.values)] {
            let header = FrameHeader { seq, ..data_header(&piece, part, payload) };
            seq += 1;
            digest.add(header.layer, part, header.token_start, header.token_count, payload);
            stream.write_all(&header.encode())?;
            stream.write_all(payload)?;
        }
    }
    let totals =
        Counted { frames: digest.frames(), payload_bytes: digest.payload_bytes(), digest: digest.finish() };
    stream.write_all(&FrameHeader::control(FrameKind::Commit, Hex([0; 16]), seq, &totals.digest).encode())?;
    stream.write_all(&totals.digest)?;
    stream.read_exact(&mut [0; HEADER_BYTES])?;
    Ok(totals)
}

fn receive(mut stream: TcpStream) -> std::io::Result<Counted> {
    let mut digest = TransferDigest::default();
    let mut encoded = [0; HEADER_BYTES];
    let mut payload = Vec::new();
    while stream.read_exact(&mut encoded).is_ok() {
        let header = FrameHeader::decode(&encoded).map_err(std::io::Error::other)?;
        if header.kind == FrameKind::Commit {
            let mut claimed = [0; 32];
            stream.read_exact(&mut claimed)?;
            if claimed != digest.finish() {
                return Err(std::io::Error::other("the transfer digest is wrong"));
            }
            stream
                .write_all(&FrameHeader::control(FrameKind::Receipt, header.transfer_id, 0, &[]).encode())?;
            continue;
        }
        payload.resize(usize::try_from(header.payload_bytes).map_err(std::io::Error::other)?, 0);
        stream.read_exact(&mut payload)?;
        if payload_crc(&payload) != header.crc32c {
            return Err(std::io::Error::other("checksum of a frame is wrong"));
        }
        let part = if header.part == Part::K as u16 { Part::K } else { Part::V };
        digest.add(header.layer, part, header.token_start, header.token_count, &payload);
    }
    Ok(Counted { frames: digest.frames(), payload_bytes: digest.payload_bytes(), digest: digest.finish() })
}

fn data_header(piece: &Piece, part: Part, payload: &[u8]) -> FrameHeader {
    let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    FrameHeader {
        layer: u16::try_from(piece.layer).unwrap_or(u16::MAX),
        part: part as u16,
        token_start: small(piece.tokens.start),
        token_count: small(piece.tokens.len()),
        ..FrameHeader::control(FrameKind::Data, Hex([0; 16]), 0, payload)
    }
}

fn closed() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::BrokenPipe, "a connection ended early")
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    #[test]
    fn both_ends_count_the_same_frames() {
        let sink = CountingSink::start(3).unwrap();
        for layer in 0..7 {
            let rows = Bytes::from(vec![layer as u8; 1000 + layer]);
            sink.deliver(Piece { layer, tokens: 0..10, keys: rows.clone(), values: rows }).unwrap();
        }
        sink.commit().unwrap();
        assert_eq!(sink.finish().unwrap(), (14, 2 * (7000 + 21)));
    }
}
