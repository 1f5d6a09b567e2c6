//! Frames over one TCP connection.

use super::{FrameReceiver, FrameSender, TransportError};
use crate::wire::{FrameHeader, HEADER_BYTES, payload_crc};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};

/// Sending half of a TCP connection.
#[derive(Debug)]
pub struct TcpFrameSender {
    half: OwnedWriteHalf,
}

/// Receiving half of a TCP connection.
#[derive(Debug)]
pub struct TcpFrameReceiver {
    half: BufReader<OwnedReadHalf>,
    next_seq: u64,
}

/// Connects to a decoder's bulk port.
///
/// # Errors
/// [`TransportError::Io`] when nobody answers within `timeout`.
pub async fn connect(
    addr: impl ToSocketAddrs,
    timeout: Duration,
) -> Result<(TcpFrameSender, TcpFrameReceiver), TransportError> {
    let stream = tokio::time::timeout(timeout, TcpStream::connect(addr))
        .await
        .map_err(|_| std::io::Error::new(std::io::ErrorKind::TimedOut, "connect timed out"))??;
    split(stream)
}

/// Accepts the next connection on a bulk port.
///
/// # Errors
/// [`TransportError::Io`] from the listener.
pub async fn accept(
    listener: &TcpListener,
) -> Result<(TcpFrameSender, TcpFrameReceiver, std::net::SocketAddr), TransportError> {
    let (stream, peer) = listener.accept().await?;
    let (tx, rx) = split(stream)?;
    Ok((tx, rx, peer))
}

fn split(stream: TcpStream) -> Result<(TcpFrameSender, TcpFrameReceiver), TransportError> {
    stream.set_nodelay(true)?;
    let (read, write) = stream.into_split();
    let receiver = TcpFrameReceiver { half: BufReader::with_capacity(64 * 1024, read), next_seq: 0 };
    Ok((TcpFrameSender { half: write }, receiver))
}

impl FrameSender for TcpFrameSender {
    async fn send(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), TransportError> {
        let head = header.encode();
        if payload.len() <= 1024 {
            let mut small = Vec::with_capacity(HEADER_BYTES + payload.len());
            small.extend_from_slice(&head);
            small.extend_from_slice(payload);
            self.half.write_all(&small).await?;
        } else {
            let mut both = bytes::Buf::chain(&head[..], payload);
            self.half.write_all_buf(&mut both).await?;
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), TransportError> {
        self.half.shutdown().await?;
        Ok(())
    }
}

impl FrameReceiver for TcpFrameReceiver {
    async fn header(&mut self) -> Result<Option<FrameHeader>, TransportError> {
        let mut bytes = [0; HEADER_BYTES];
        let first = self.half.read(&mut bytes).await?;
        if first == 0 {
            return Ok(None);
        }
        self.half.read_exact(&mut bytes[first..]).await?;
        let header = FrameHeader::decode(&bytes)?;
        if header.seq != self.next_seq {
            return Err(TransportError::Sequence { got: header.seq, expected: self.next_seq });
        }
        self.next_seq += 1;
        Ok(Some(header))
    }

    async fn payload(&mut self, header: &FrameHeader, out: &mut [u8]) -> Result<(), TransportError> {
        self.half.read_exact(out).await?;
        let got = payload_crc(out);
        if got != header.crc32c {
            return Err(TransportError::Checksum { got, expected: header.crc32c });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hexbytes::Hex;
    use crate::wire::FrameKind;

    async fn pair() -> (TcpFrameSender, TcpFrameReceiver) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (client, server) = tokio::join!(connect(addr, Duration::from_secs(5)), accept(&listener));
        (client.unwrap().0, server.unwrap().1)
    }

    #[tokio::test]
    async fn frames_arrive_whole_and_checked() {
        let (mut tx, mut rx) = pair().await;
        let body = vec![42; 100_000];
        let good = FrameHeader::control(FrameKind::Data, Hex([1; 16]), 0, &body);
        tx.send(&good, &body).await.unwrap();
        let broken = FrameHeader { seq: 1, crc32c: good.crc32c ^ 1, ..good };
        tx.send(&broken, &body).await.unwrap();
        tx.finish().await.unwrap();

        let head = rx.header().await.unwrap().unwrap();
        let mut out = vec![0; head.payload_bytes as usize];
        rx.payload(&head, &mut out).await.unwrap();
        assert_eq!(out, body);
        let head = rx.header().await.unwrap().unwrap();
        assert!(matches!(rx.payload(&head, &mut out).await, Err(TransportError::Checksum { .. })));
        assert!(rx.header().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_gap_is_noticed() {
        let (mut tx, mut rx) = pair().await;
        tx.send(&FrameHeader::control(FrameKind::Abort, Hex([1; 16]), 1, b""), b"").await.unwrap();
        assert!(matches!(rx.header().await, Err(TransportError::Sequence { got: 1, expected: 0 })));
    }

    #[tokio::test]
    async fn a_cut_header_is_an_error_not_an_end() {
        let (mut tx, mut rx) = pair().await;
        let head = FrameHeader::control(FrameKind::Abort, Hex([1; 16]), 0, b"").encode();
        tx.half.write_all(&head[..20]).await.unwrap();
        tx.finish().await.unwrap();
        assert!(matches!(rx.header().await, Err(TransportError::Io(_))));
    }
}
