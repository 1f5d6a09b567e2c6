//! A small deterministic engine for tests: its cache holds the token ids themselves, so whatever is lost,
//! doubled or misplaced on the way changes the answer.

use super::{Engine, EngineError};
use crate::block::{BlockBytes, LayerBytes};
use bytes::Bytes;
use parking_lot::Mutex;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(crate) const VOCAB: u32 = 50;
pub(crate) const BLOCK_TOKENS: usize = 4;

/// Layers × parts, each with one head of one f32.
const LAYERS: usize = 2;

#[derive(Debug, Clone, Default)]
pub(crate) struct TestEngine {
    /// Time of one pass.
    pub(crate) pass: Duration,
    /// Tokens computed so far.
    pub(crate) computed: Arc<AtomicUsize>,
    /// Position and length of every pass.
    pub(crate) passes: Arc<Mutex<Vec<(usize, usize)>>>,
    /// Rows of every decode pass.
    pub(crate) batches: Arc<Mutex<Vec<usize>>>,
    /// Fails when this token is computed.
    pub(crate) poison: Option<u32>,
}

pub(crate) fn layout() -> CacheLayout {
    let layer = LayerCache::Full { n_kv_heads: 1, head_dim: 1, dtype: Dtype::F32 };
    CacheLayout::uniform(LAYERS, layer, BLOCK_TOKENS as u32)
}

/// The block that holds `tokens`.
pub(crate) fn block(tokens: &[u32]) -> BlockBytes {
    let bytes: Bytes = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    let layers = vec![LayerBytes { parts: vec![bytes.clone(), bytes] }; LAYERS];
    BlockBytes { tokens: tokens.len(), layers }
}

/// The greedy answer to a prompt.
pub(crate) fn answer(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..n {
        all.push(next(&all));
    }
    all.split_off(prompt.len())
}

fn next(tokens: &[u32]) -> u32 {
    let hash = blake3::hash(&tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<_>>());
    u32::from(hash.as_bytes()[0]) % VOCAB
}

impl Engine for TestEngine {
    type Sequence = Vec<u32>;

    fn new_sequence(&self, _: usize) -> Vec<u32> {
        Vec::new()
    }

    fn import(&self, blocks: &[&BlockBytes], _: usize) -> Result<Vec<u32>, EngineError> {
        let mut all = Vec::new();
        for content in blocks {
            let (words, rest) = content.layers[0].parts[0].as_chunks::<4>();
            let tokens: Vec<u32> = words.iter().map(|w| u32::from_le_bytes(*w)).collect();
            if !rest.is_empty() || **content != block(&tokens) {
                return Err(EngineError("a block is inconsistent".to_owned()));
            }
            all.extend(tokens);
        }
        Ok(all)
    }

    fn export(&self, sequence: &Vec<u32>, start: usize, end: usize) -> Result<BlockBytes, EngineError> {
        Ok(block(&sequence[start..end]))
    }

    fn forward(
        &self,
        sequence: &mut Vec<u32>,
        tokens: &[u32],
        want_logits: bool,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        std::thread::sleep(self.pass);
        if tokens.iter().any(|t| Some(*t) == self.poison) {
            return Err(EngineError("poison".to_owned()));
        }
        self.computed.fetch_add(tokens.len(), Ordering::Relaxed);
        self.passes.lock().push((sequence.len(), tokens.len()));
        sequence.extend(tokens);
        let best = next(sequence);
        Ok(want_logits.then(|| (0..VOCAB).map(|t| if t == best { 1.0 } else { 0.0 }).collect()))
    }

    fn decode_batch(&self, rows: &mut [(&mut Vec<u32>, u32)]) -> Result<Vec<Vec<f32>>, EngineError> {
        self.batches.lock().push(rows.len());
        std::thread::sleep(self.pass);
        let alone = Self { pass: Duration::ZERO, ..self.clone() };
        rows.iter_mut().map(|(sequence, t)| Ok(alone.forward(sequence, &[*t], true)?.unwrap())).collect()
    }

    fn forward_every(
        &self,
        sequence: &mut Vec<u32>,
        tokens: &[u32],
        see: &mut dyn FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        tokens.iter().try_for_each(|&t| {
            see(&self.forward(sequence, &[t], true)?.unwrap());
            Ok(())
        })
    }

    fn fork(&self, sequence: &Vec<u32>) -> Vec<u32> {
        sequence.clone()
    }

    fn forward_captured(
        &self,
        sequence: &mut Vec<u32>,
        tokens: &[u32],
    ) -> Result<(Vec<f32>, Vec<Vec<f32>>), EngineError> {
        let logits = self.forward(sequence, tokens, true)?.unwrap();
        Ok((logits, vec![tokens.iter().map(|&t| t as f32).collect(); LAYERS]))
    }

    fn prefill_chunk_tokens(&self) -> usize {
        256
    }

    fn len(&self, sequence: &Vec<u32>) -> usize {
        sequence.len()
    }

    fn sequence_bytes(&self, sequence: &Vec<u32>) -> u64 {
        sequence.len() as u64 * layout().bytes_per_token()
    }

    fn planned_bytes(&self, capacity_tokens: usize) -> u64 {
        capacity_tokens as u64 * layout().bytes_per_token()
    }

    fn release_unused_memory(&self) -> Result<(), EngineError> {
        Ok(())
    }
}
