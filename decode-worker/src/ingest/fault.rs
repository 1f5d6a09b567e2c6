//! What a broken frame or connection means for a transfer.

use shared::transport::TransportError;
use shared::wire::{Abort, AbortCode, HeaderError};

/// The abort that a transport error amounts to.
pub(super) fn of_transport(error: &TransportError) -> Abort {
    let code = match error {
        TransportError::Io(_) => AbortCode::ConnectionLost,
        TransportError::Checksum { .. } => AbortCode::Checksum,
        TransportError::Sequence { .. } => AbortCode::Incomplete,
        TransportError::Header(header) => return of_header(header),
        _ => AbortCode::ProtocolError,
    };
    Abort::new(code, error.to_string())
}

/// The abort that a bad header amounts to.
pub(super) fn of_header(error: &HeaderError) -> Abort {
    let code = match error {
        HeaderError::NoSuchArray { .. } | HeaderError::PayloadLength { .. } => AbortCode::LayoutMismatch,
        HeaderError::TokenRange { .. } => AbortCode::Incomplete,
        _ => AbortCode::ProtocolError,
    };
    Abort::new(code, error.to_string())
}
