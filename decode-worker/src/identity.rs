//! Who this decoder is to a cache.

use shared::hexbytes::Hex;
use shared::model::{Model, ModelDigests};
use shared::weights::{WeightsError, kv_projection_digest};

/// Digests of every layer's K/V projections.
///
/// # Errors
/// [`WeightsError`] naming the tensor that can't be read.
pub fn projection_digests(model: &Model) -> Result<Vec<Hex<32>>, WeightsError> {
    (0..model.spec.n_layers).map(|layer| kv_projection_digest(&*model.source, layer).map(Hex)).collect()
}

/// BLAKE3 over everything that decides what a block of cache means: configuration, tokenizer, template,
/// weight index, and the projections that make the cache.
#[must_use]
pub fn fingerprint(digests: &ModelDigests, projections: &[Hex<32>]) -> Hex<32> {
    let mut h = blake3::Hasher::new();
    h.update(b"pd-bridge/fingerprint/v1");
    for digest in [&digests.config, &digests.tokenizer, &digests.template, &digests.index] {
        h.update(digest);
    }
    h.update(&(projections.len() as u32).to_le_bytes());
    for digest in projections {
        h.update(&digest.0);
    }
    Hex(*h.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_counts() {
        let digests = ModelDigests { config: [1; 32], tokenizer: [2; 32], template: [3; 32], index: [4; 32] };
        let projections = [Hex([5; 32]), Hex([6; 32])];
        let base = fingerprint(&digests, &projections);
        let others = [
            fingerprint(&ModelDigests { config: [0; 32], ..digests }, &projections),
            fingerprint(&ModelDigests { tokenizer: [0; 32], ..digests }, &projections),
            fingerprint(&ModelDigests { template: [0; 32], ..digests }, &projections),
            fingerprint(&ModelDigests { index: [0; 32], ..digests }, &projections),
            fingerprint(&digests, &projections[..1]),
            fingerprint(&digests, &[projections[1], projections[0]]),
        ];
        assert!(others.iter().all(|other| *other != base));
    }
}
