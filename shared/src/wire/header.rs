//! The fixed frame header.

use crate::hexbytes::Hex;
use crate::layout::{CacheLayout, Part};

/// First four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"PDBR";
/// Version of the frame format.
pub const VERSION: u16 = 1;
/// Length of an encoded header.
pub const HEADER_BYTES: usize = 56;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum FrameKind {
    /// First frame of a connection: ticket and what will be sent.
    Open = 1,
    /// Reserved for a layout announcement; nothing sends it in version 1.
    Layout = 2,
    /// Rows of one array of one layer, within one block.
    Data = 3,
    /// Everything was sent.
    Commit = 4,
    /// The transfer is over and nothing of it may be used.
    Abort = 5,
    /// The receiver allows that many more payload bytes.
    Credit = 6,
    /// The receiver's answer to a commit.
    Receipt = 7,
}

/// A decoded frame header. Layer, part and token fields are zero except on data frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the frame is.
    pub kind: FrameKind,
    /// The transfer it belongs to.
    pub transfer_id: Hex<16>,
    /// Position in this direction of this connection, gapless from 0.
    pub seq: u64,
    /// Layer index.
    pub layer: u16,
    /// Array of the layer, as [`Part`] numbers.
    pub part: u16,
    /// First token position the rows belong to.
    pub token_start: u32,
    /// Number of token positions.
    pub token_count: u32,
    /// Payload bytes that follow.
    pub payload_bytes: u64,
    /// CRC-32C of the payload.
    pub crc32c: u32,
}

/// Why a header was refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// The stream is not at a frame border, or the peer speaks something else.
    #[error("not a pd-bridge frame (magic {0:02x?})")]
    Magic([u8; 4]),
    /// The peer uses another version of the frame format.
    #[error("frame version {0}, this side speaks {VERSION}")]
    Version(u16),
    /// A kind this version does not know.
    #[error("unknown frame kind {0}")]
    Kind(u16),
    /// The frame names an array that the layout does not have.
    #[error("layer {layer} part {part} is not in the cache layout")]
    NoSuchArray {
        /// Layer index.
        layer: u16,
        /// Part number.
        part: u16,
    },
    /// Rows outside the announced range, or across a block border, or none at all.
    #[error("tokens {start}+{count} are outside {allowed_start}..{allowed_end} or cross a block border")]
    TokenRange {
        /// First token of the frame.
        start: u32,
        /// Tokens in the frame.
        count: u32,
        /// First token of the transfer.
        allowed_start: u32,
        /// End of the transfer (exclusive).
        allowed_end: u32,
    },
    /// The payload length does not follow from the layout.
    #[error("payload of {got} bytes, the layout says {expected}")]
    PayloadLength {
        /// Length in the header.
        got: u64,
        /// Length that the layout implies (or the cap of a control body).
        expected: u64,
    },
}

impl FrameHeader {
    /// A header for a frame that carries no rows.
    #[must_use]
    pub fn control(kind: FrameKind, transfer_id: Hex<16>, seq: u64, payload: &[u8]) -> Self {
        Self {
            kind,
            transfer_id,
            seq,
            layer: 0,
            part: 0,
            token_start: 0,
            token_count: 0,
            payload_bytes: payload.len() as u64,
            crc32c: payload_crc(payload),
        }
    }

    /// Encodes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&(self.kind as u16).to_le_bytes());
        put(&self.transfer_id.0);
        put(&self.seq.to_le_bytes());
        put(&self.layer.to_le_bytes());
        put(&self.part.to_le_bytes());
        put(&self.token_start.to_le_bytes());
        put(&self.token_count.to_le_bytes());
        put(&self.payload_bytes.to_le_bytes());
        put(&self.crc32c.to_le_bytes());
        out
    }

    /// Decodes a header; checks magic, version and kind, and nothing that needs a layout.
    ///
    /// # Errors
    /// [`HeaderError::Magic`], [`HeaderError::Version`], [`HeaderError::Kind`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        let mut rest: &[u8] = bytes;
        let magic = take::<4>(&mut rest);
        if magic != MAGIC {
            return Err(HeaderError::Magic(magic));
        }
        let version = u16::from_le_bytes(take(&mut rest));
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        let kind = FrameKind::try_from(u16::from_le_bytes(take(&mut rest)))?;
        Ok(Self {
            kind,
            transfer_id: Hex(take(&mut rest)),
            seq: u64::from_le_bytes(take(&mut rest)),
            layer: u16::from_le_bytes(take(&mut rest)),
            part: u16::from_le_bytes(take(&mut rest)),
            token_start: u32::from_le_bytes(take(&mut rest)),
            token_count: u32::from_le_bytes(take(&mut rest)),
            payload_bytes: u64::from_le_bytes(take(&mut rest)),
            crc32c: u32::from_le_bytes(take(&mut rest)),
        })
    }

    /// Checks a data header against the layout and the range `[start, end)` of the transfer, before a
    /// byte is allocated. Returns the array that the rows belong to.
    ///
    /// # Errors
    /// [`HeaderError::NoSuchArray`], [`HeaderError::TokenRange`], [`HeaderError::PayloadLength`].
    pub fn check_data(&self, layout: &CacheLayout, start: u32, end: u32) -> Result<Part, HeaderError> {
        let missing = HeaderError::NoSuchArray { layer: self.layer, part: self.part };
        let Some(layer) = layout.layers.get(usize::from(self.layer)) else { return Err(missing) };
        let part = match Part::try_from(self.part) {
            Ok(p) if layer.parts().contains(&p) => p,
            _ => return Err(missing),
        };
        let last = self.token_start.checked_add(self.token_count).filter(|_| self.token_count > 0);
        let in_one_block =
            |last: u32| self.token_start / layout.block_tokens == (last - 1) / layout.block_tokens;
        match last {
            Some(last) if self.token_start >= start && last <= end && in_one_block(last) => {}
            _ => {
                return Err(HeaderError::TokenRange {
                    start: self.token_start,
                    count: self.token_count,
                    allowed_start: start,
                    allowed_end: end,
                });
            }
        }
        let expected = layer.bytes_per_token(part) * u64::from(self.token_count);
        if self.payload_bytes != expected {
            return Err(HeaderError::PayloadLength { got: self.payload_bytes, expected });
        }
        Ok(part)
    }

    /// Checks that a control body is small enough to be read.
    ///
    /// # Errors
    /// [`HeaderError::PayloadLength`].
    pub fn check_body(&self) -> Result<usize, HeaderError> {
        let expected = super::MAX_BODY_BYTES as u64;
        if self.payload_bytes > expected {
            return Err(HeaderError::PayloadLength { got: self.payload_bytes, expected });
        }
        Ok(self.payload_bytes as usize)
    }
}

/// CRC-32C (Castagnoli) of a payload.
#[must_use]
pub fn payload_crc(payload: &[u8]) -> u32 {
    crc32c::crc32c(payload)
}

impl TryFrom<u16> for FrameKind {
    type Error = HeaderError;
    fn try_from(code: u16) -> Result<Self, HeaderError> {
        Ok(match code {
            1 => Self::Open,
            2 => Self::Layout,
            3 => Self::Data,
            4 => Self::Commit,
            5 => Self::Abort,
            6 => Self::Credit,
            7 => Self::Receipt,
            other => return Err(HeaderError::Kind(other)),
        })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let mut out = [0; N];
    let (head, tail) = rest.split_at(N);
    out.copy_from_slice(head);
    *rest = tail;
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Dtype, LayerCache};
    use proptest::prelude::*;

    fn data_header() -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Data,
            transfer_id: Hex([7; 16]),
            seq: 3,
            layer: 1,
            part: Part::V as u16,
            token_start: 4,
            token_count: 4,
            payload_bytes: 4 * 2 * 8 * 2,
            crc32c: 0xdead_beef,
        }
    }

    fn layout() -> CacheLayout {
        CacheLayout::uniform(2, LayerCache::Full { n_kv_heads: 2, head_dim: 8, dtype: Dtype::F16 }, 4)
    }

    #[test]
    fn fixed_vector() {
        assert_eq!(
            hex::encode(data_header().encode()),
            "504442520100030007070707070707070707070707070707030000000000000001000100\
             04000000040000008000000000000000efbeadde"
        );
    }

    #[test]
    fn layout_checks_name_the_fault() {
        let ok = data_header();
        assert_eq!(ok.check_data(&layout(), 4, 8), Ok(Part::V));
        let bad = |f: fn(&mut FrameHeader)| {
            let mut h = data_header();
            f(&mut h);
            h.check_data(&layout(), 4, 8).unwrap_err()
        };
        assert!(matches!(bad(|h| h.layer = 2), HeaderError::NoSuchArray { .. }));
        assert!(matches!(bad(|h| h.part = 9), HeaderError::NoSuchArray { .. }));
        assert!(matches!(bad(|h| h.token_start = 2), HeaderError::TokenRange { .. }));
        assert!(matches!(bad(|h| h.token_count = 0), HeaderError::TokenRange { .. }));
        assert!(matches!(bad(|h| h.token_count = u32::MAX), HeaderError::TokenRange { .. }));
        assert!(matches!(bad(|h| h.payload_bytes = u64::MAX), HeaderError::PayloadLength { .. }));
        let mut across = data_header();
        across.token_start = 2;
        assert!(matches!(across.check_data(&layout(), 0, 8), Err(HeaderError::TokenRange { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_cleanly(bytes: [u8; HEADER_BYTES]) {
            if let Ok(h) = FrameHeader::decode(&bytes) {
                prop_assert_eq!(h.encode(), bytes);
            }
        }

        #[test]
        fn decode_inverts_encode(seq: u64, layer: u16, part: u16, start: u32, count: u32, len: u64, crc: u32) {
            let h = FrameHeader { seq, layer, part, token_start: start, token_count: count,
                payload_bytes: len, crc32c: crc, ..data_header() };
            prop_assert_eq!(FrameHeader::decode(&h.encode()), Ok(h));
            let _ = h.check_data(&layout(), 0, 8);
        }
    }
}
