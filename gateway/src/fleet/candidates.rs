//! What the planner is told of the workers, for one prompt.

use super::Fleet;
use super::link::{DecodeLink, PrefillLink};
use super::pairing::Pairing;
use crate::planner::{DecoderOutlook, Peer, PrefillOutlook, Tier};
use shared::keys::BlockKey;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// A decoder that could answer, and the prefill workers that could help it.
pub(crate) struct Candidate {
    /// The decoder.
    pub(crate) decoder: Arc<DecodeLink>,
    /// Keys of the prompt's full blocks on it.
    pub(crate) keys: Arc<[BlockKey]>,
    /// Prefill workers, in the order of the outlook's.
    pub(crate) peers: Vec<(Arc<PrefillLink>, Arc<Pairing>)>,
    /// What the planner sees.
    pub(crate) outlook: DecoderOutlook,
}

impl Candidate {
    /// Takes what the decoder says of the prompt: the positions that it holds.
    pub(crate) fn holds(&mut self, resident_tokens: u32) {
        self.outlook.resident_tokens = resident_tokens;
        let blocks = (resident_tokens / self.block_tokens().max(1)) as usize;
        let keys = &self.keys[..];
        self.decoder.seen.forget(keys.get(blocks..).unwrap_or_default());
    }

    fn block_tokens(&self) -> u32 {
        self.decoder.hello.cache.as_ref().map_or(0, |c| c.layout.block_tokens)
    }
}

impl Fleet {
    /// All decoders that take new requests, waiting for one that was there before and is coming back; none at once
    /// if none ever was.
    pub(crate) async fn candidates_within(&self, tokens: &[u32], limit: Duration) -> Vec<Candidate> {
        if self.decoder().is_none() && self.had_decoder() {
            // Whether that helped is seen below.
            let _ = tokio::time::timeout(limit, self.any_decoder()).await;
        }
        self.candidates(tokens)
    }

    fn candidates(&self, tokens: &[u32]) -> Vec<Candidate> {
        let length = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
        let mut chains: HashMap<BlockKey, Arc<[BlockKey]>> = HashMap::new();
        let (workers, pairs) = (self.workers.read(), self.pairs.read());
        let mut candidates = Vec::new();
        for (id, slot) in &workers.decoders {
            let Some((tier, decoder)) = slot.usable() else { continue };
            let block_tokens = decoder.hello.cache.as_ref().map_or(0, |c| c.layout.block_tokens);
            let keys = decoder.root.map_or_else(Arc::default, |root| {
                let chain = || root.chain(tokens, block_tokens.max(1) as usize).into();
                chains.entry(root).or_insert_with(chain).clone()
            });
            let held = |leading: usize| {
                u32::try_from(leading).unwrap_or(0).saturating_mul(block_tokens).min(length.saturating_sub(1))
            };
            let mut peers = Vec::new();
            let mut outlooks = Vec::new();
            for (prefill_id, pairing) in pairs.of(id) {
                let tier = workers.prefills.get(prefill_id).and_then(|slot| slot.tier());
                let Some(prefill) = pairing.prefill_for(&decoder).filter(|_| tier == Some(Tier::Alive))
                else {
                    continue;
                };
                let outlook = PrefillOutlook {
                    tokens_per_s: prefill.rates().prefill_tokens_per_s,
                    link_bytes_per_s: pairing.link_bytes_per_s(),
                    queued_tokens: prefill.load.all_tokens(length),
                    reusable_tokens: held(prefill.seen.leading(&keys)),
                };
                let is_resting = pairing.is_resting();
                outlooks.push(Peer { identity: prefill.identity, outlook, is_resting });
                peers.push((prefill, pairing.clone()));
            }
            let rates = decoder.rates();
            let outlook = DecoderOutlook {
                identity: decoder.identity,
                tier,
                native_tokens_per_s: rates.prefill_tokens_per_s,
                decode_tokens_per_s: rates.decode_tokens_per_s,
                requests: decoder.load.all_requests(),
                resident_tokens: held(decoder.seen.leading(&keys)),
                bytes_per_token: decoder.hello.cache.as_ref().map_or(0, |c| c.layout.bytes_per_token()),
                peers: outlooks,
            };
            candidates.push(Candidate { decoder, keys, peers, outlook });
        }
        candidates
    }
}
