//! Which decoders are introduced to which prefill workers.

use super::Workers;
use super::pairing::Pairing;
use super::slot::Slot;
use crate::planner::closest;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Prefill workers that a decoder is introduced to. Where there are more, hashing picks among the connected ones, so
/// that a thousand machines don't make a million introductions.
const MAX_PEERS: usize = 8;

/// All pairings, by the names of decoder and prefill worker.
#[derive(Default)]
pub(super) struct Pairs(BTreeMap<String, BTreeMap<String, Paired>>);

struct Paired {
    pairing: Arc<Pairing>,
    /// The members that it was made for: one that left and came back is another.
    of: (usize, usize),
    _stop: DropGuard,
}

impl Pairs {
    /// Starts what is wanted and ends what is not.
    pub(super) fn follow(
        &mut self,
        workers: &Workers,
        changed: &watch::Sender<()>,
        shutdown: &CancellationToken,
    ) {
        let names: HashMap<u64, &String> = workers.prefills.keys().map(|id| (hash(id), id)).collect();
        let everyone = names.len() <= MAX_PEERS;
        let eligible: Vec<u64> = names
            .iter()
            .filter(|(_, id)| everyone || workers.prefills.get(**id).is_some_and(|s| s.usable().is_some()))
            .map(|(hash, _)| *hash)
            .collect();
        self.0.retain(|id, _| workers.decoders.contains_key(id));
        for (decoder_id, decoder) in &workers.decoders {
            let wanted: HashSet<&String> = closest(hash(decoder_id), eligible.iter().copied(), MAX_PEERS)
                .iter()
                .map(|h| names[h])
                .collect();
            let pairs = self.0.entry(decoder_id.clone()).or_default();
            pairs.retain(|id, paired| {
                let same = |p| paired.of == (address_of(decoder), address_of(p));
                wanted.contains(id) && workers.prefills.get(id).is_some_and(same)
            });
            for id in wanted {
                if let Some(prefill) = workers.prefills.get(id)
                    && !pairs.contains_key(id)
                {
                    let stop = shutdown.child_token();
                    let (d, p) = (decoder.node.watch(), prefill.node.watch());
                    let pairing = Pairing::start(d, p, changed.clone(), stop.clone());
                    let of = (address_of(decoder), address_of(prefill));
                    pairs.insert(id.clone(), Paired { pairing, of, _stop: stop.drop_guard() });
                }
            }
        }
    }

    /// Whether there is none at all.
    pub(super) fn is_empty(&self) -> bool {
        self.0.values().all(BTreeMap::is_empty)
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Pairing>> {
        self.0.values().flat_map(BTreeMap::values).map(|p| &p.pairing)
    }

    /// Those of one decoder, with the prefill workers' names.
    pub(super) fn of(&self, decoder_id: &str) -> impl Iterator<Item = (&String, &Arc<Pairing>)> {
        self.0.get(decoder_id).into_iter().flatten().map(|(id, p)| (id, &p.pairing))
    }
}

/// A hash of a name that is the same in every process.
pub(super) fn hash(name: &str) -> u64 {
    let digest = blake3::hash(name.as_bytes());
    let (words, _) = digest.as_bytes().as_chunks::<8>();
    u64::from_le_bytes(words[0])
}

fn address_of<Req, Ev>(slot: &Arc<Slot<Req, Ev>>) -> usize {
    Arc::as_ptr(slot).addr()
}
