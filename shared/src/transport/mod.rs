//! Moving frames between two workers.
//!
//! A transport gives a [`FrameSender`] and a [`FrameReceiver`] for each direction of a connection. The
//! receiver hands out the header first, so that length and place are checked before anything is allocated.

mod tcp;

pub use tcp::{TcpFrameReceiver, TcpFrameSender, accept, connect};

use crate::wire::{FrameHeader, HeaderError};
use std::future::Future;

/// Sends frames in order.
pub trait FrameSender: Send {
    /// Writes one frame. The payload's length must be the header's.
    ///
    /// # Errors
    /// [`TransportError::Io`] when the connection is gone.
    fn send(
        &mut self,
        header: &FrameHeader,
        payload: &[u8],
    ) -> impl Future<Output = Result<(), TransportError>> + Send;

    /// Closes the sending direction after everything written has left.
    ///
    /// # Errors
    /// [`TransportError::Io`] when the connection is gone.
    fn finish(&mut self) -> impl Future<Output = Result<(), TransportError>> + Send;
}

/// Receives frames in order.
pub trait FrameReceiver: Send {
    /// Reads the next header; `None` when the peer closed the connection at a frame border.
    ///
    /// # Errors
    /// [`TransportError`] when the connection breaks or the bytes are no frame.
    fn header(&mut self) -> impl Future<Output = Result<Option<FrameHeader>, TransportError>> + Send;

    /// Reads the payload of the header just read into `out`, which has exactly its length, and checks
    /// the checksum.
    ///
    /// # Errors
    /// [`TransportError::Checksum`] when the bytes differ from what was sent.
    fn payload(
        &mut self,
        header: &FrameHeader,
        out: &mut [u8],
    ) -> impl Future<Output = Result<(), TransportError>> + Send;
}

/// Why a frame could not be moved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The connection failed.
    #[error("connection: {0}")]
    Io(#[from] std::io::Error),
    /// The bytes are no frame.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The payload is not what the sender summed.
    #[error("CRC-32C of the payload is {got:08x}, the header says {expected:08x}")]
    Checksum {
        /// Computed here.
        got: u32,
        /// Sent in the header.
        expected: u32,
    },
    /// A frame is missing or doubled.
    #[error("frame {got} arrived, {expected} was due")]
    Sequence {
        /// Number in the header.
        got: u64,
        /// Number that was due.
        expected: u64,
    },
}
