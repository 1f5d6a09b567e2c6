//! Frames to blocks: every byte checked, nothing visible before the commit.

use super::coverage::Coverage;
use super::fault;
use crate::block::{ArrayOffsets, BlockBuffer, BlockBytes};
use shared::layout::CacheLayout;
use shared::transport::FrameReceiver;
use shared::wire::{Abort, AbortCode, Commit, FrameHeader, TransferDigest};
use std::sync::Arc;

/// Data frames that a transfer may have, whatever its size: their digests are kept until the commit.
const MIN_FRAME_LIMIT: u64 = 256 << 10;

/// The blocks of one transfer while they arrive.
pub(super) struct Assembly {
    layout: Arc<CacheLayout>,
    offsets: ArrayOffsets,
    start: u32,
    end: u32,
    /// One per block of `start..end`, made when its first frame arrives.
    blocks: Vec<Option<BlockBuffer>>,
    coverage: Coverage,
    digest: TransferDigest,
    frame_limit: u64,
    /// Rows of a frame that covers part of a block only; at most one array of one block.
    scratch: Vec<u8>,
}

/// A committed transfer's blocks: full ones first, then at most one shorter.
#[derive(Debug)]
pub(super) struct Assembled {
    pub(super) blocks: Vec<BlockBytes>,
    pub(super) full_blocks: usize,
    pub(super) digest: [u8; 32],
}

impl Assembly {
    /// For tokens `start..end`; `start` is a block border.
    pub(super) fn new(layout: Arc<CacheLayout>, start: u32, end: u32) -> Self {
        let offsets = ArrayOffsets::new(&layout);
        let n_blocks = (end - start).div_ceil(layout.block_tokens) as usize;
        Self {
            coverage: Coverage::new(offsets.n_arrays()),
            frame_limit: MIN_FRAME_LIMIT.max(4 * (offsets.n_arrays() * n_blocks) as u64),
            blocks: (0..n_blocks).map(|_| None).collect(),
            offsets,
            layout,
            start,
            end,
            digest: TransferDigest::default(),
            scratch: Vec::new(),
        }
    }

    /// Reads the payload of a data header just received. A frame that covers a whole block of its array is
    /// read straight into its place.
    pub(super) async fn take(
        &mut self,
        header: &FrameHeader,
        rx: &mut impl FrameReceiver,
    ) -> Result<(), Abort> {
        let part = header.check_data(&self.layout, self.start, self.end).map_err(|e| fault::of_header(&e))?;
        if self.digest.frames() >= self.frame_limit {
            return Err(Abort::new(AbortCode::ProtocolError, "far more frames than blocks and arrays"));
        }
        let (layer, first, count) = (header.layer, header.token_start, header.token_count);
        let array = self.offsets.index(layer, part);
        if !self.coverage.add(array, first, first + count) {
            let text = format!("layer {layer} part {}: tokens {first}+{count} came twice", header.part);
            return Err(Abort::new(AbortCode::Incomplete, text));
        }
        let index = ((first - self.start) / self.layout.block_tokens) as usize;
        let block_start = self.start + index as u32 * self.layout.block_tokens;
        let block_len = self.layout.block_tokens.min(self.end - block_start) as usize;
        let block = self.blocks[index].get_or_insert_with(|| BlockBuffer::new(&self.offsets, block_len));
        if count as usize == block.tokens() {
            let place = block.array_mut(&self.offsets, array);
            rx.payload(header, place).await.map_err(|e| fault::of_transport(&e))?;
            self.digest.add(layer, part, first, count, place);
        } else {
            self.scratch.resize(header.payload_bytes as usize, 0);
            rx.payload(header, &mut self.scratch).await.map_err(|e| fault::of_transport(&e))?;
            self.digest.add(layer, part, first, count, &self.scratch);
            block.scatter(&self.offsets, array, (first - block_start) as usize, &self.scratch);
        }
        Ok(())
    }

    /// Payload bytes so far.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.digest.payload_bytes()
    }

    /// Checks a commit against what arrived and hands out the blocks.
    pub(super) fn commit(self, commit: &Commit) -> Result<Assembled, Abort> {
        let incomplete = |text: String| Err(Abort::new(AbortCode::Incomplete, text));
        let Commit { token_start, token_end, frames, payload_bytes, .. } = *commit;
        if token_start != self.start || token_end <= token_start || token_end > self.end {
            let (start, end) = (self.start, self.end);
            return incomplete(format!("committed {token_start}..{token_end}, announced {start}..{end}"));
        }
        if (frames, payload_bytes) != (self.digest.frames(), self.digest.payload_bytes()) {
            let (got, bytes) = (self.digest.frames(), self.digest.payload_bytes());
            return incomplete(format!(
                "committed {frames} frames of {payload_bytes} bytes, {got} of {bytes} arrived"
            ));
        }
        if !self.coverage.is_exactly(token_start, token_end) {
            return incomplete(format!("not every array has exactly the tokens {token_start}..{token_end}"));
        }
        let digest = self.digest.finish();
        if digest != commit.digest.0 {
            return Err(Abort::new(AbortCode::Checksum, "the two ends computed different transfer digests"));
        }
        let mut blocks = Vec::with_capacity(self.blocks.len());
        let mut left = (token_end - token_start) as usize;
        for block in self.blocks.into_iter().flatten() {
            if left == 0 {
                break;
            }
            let tokens = left.min(block.tokens());
            left -= tokens;
            blocks.push(block.finish_prefix(&self.offsets, tokens));
        }
        let full_blocks = ((token_end - token_start) / self.layout.block_tokens) as usize;
        Ok(Assembled { blocks, full_blocks, digest })
    }
}
