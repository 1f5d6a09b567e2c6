//! MLX as an [`Engine`].

use super::{Engine, EngineError};
use crate::block::BlockBytes;
use crate::mlx::{MlxError, MlxModel, Sequence};

/// A GPU needs many rows to be busy.
const GPU_CHUNK_TOKENS: usize = 512;
/// On a CPU larger passes are no faster (they leave the caches), only longer.
const CPU_CHUNK_TOKENS: usize = 64;

impl Engine for MlxModel {
    type Sequence = Sequence;

    fn new_sequence(&self, capacity_tokens: usize) -> Sequence {
        Self::new_sequence(self, capacity_tokens)
    }

    fn import(&self, blocks: &[&BlockBytes], capacity_tokens: usize) -> Result<Sequence, EngineError> {
        Ok(Self::import(self, blocks, capacity_tokens)?)
    }

    fn export(&self, sequence: &Sequence, start: usize, end: usize) -> Result<BlockBytes, EngineError> {
        Ok(Self::export(self, sequence, start, end)?)
    }

    fn forward(
        &self,
        sequence: &mut Sequence,
        tokens: &[u32],
        want_logits: bool,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        Ok(Self::forward(self, sequence, tokens, want_logits)?)
    }

    fn decode_batch(&self, rows: &mut [(&mut Sequence, u32)]) -> Result<Vec<Vec<f32>>, EngineError> {
        Ok(Self::decode_batch(self, rows)?)
    }

    fn forward_every(
        &self,
        sequence: &mut Sequence,
        tokens: &[u32],
        see: &mut dyn FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        Ok(Self::forward_every(self, sequence, tokens, see)?)
    }

    fn fork(&self, sequence: &Sequence) -> Sequence {
        sequence.clone()
    }

    fn forward_captured(
        &self,
        sequence: &mut Sequence,
        tokens: &[u32],
    ) -> Result<(Vec<f32>, Vec<Vec<f32>>), EngineError> {
        Ok(Self::forward_captured(self, sequence, tokens)?)
    }

    fn prefill_chunk_tokens(&self) -> usize {
        if self.device() == "gpu" { GPU_CHUNK_TOKENS } else { CPU_CHUNK_TOKENS }
    }

    fn len(&self, sequence: &Sequence) -> usize {
        sequence.len()
    }

    fn sequence_bytes(&self, sequence: &Sequence) -> u64 {
        self.layout(1).bytes_per_token() * sequence.capacity_tokens() as u64
    }

    fn planned_bytes(&self, capacity_tokens: usize) -> u64 {
        self.layout(1).bytes_per_token() * Sequence::round_up(capacity_tokens.max(1)) as u64
    }

    fn release_unused_memory(&self) -> Result<(), EngineError> {
        Ok(Self::release_unused_memory(self)?)
    }
}

impl From<MlxError> for EngineError {
    fn from(error: MlxError) -> Self {
        Self(error.to_string())
    }
}
