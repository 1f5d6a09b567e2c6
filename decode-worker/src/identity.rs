//! Who this decoder is to a cache.

use shared::angles::SinCos;
use shared::control::KvRecipe;
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

/// BLAKE3 over everything that decides what a block of cache means and which bytes it has: configuration,
/// tokenizer, template, weight index, layout, and the recipe of keys and values with the projections in it.
#[must_use]
pub fn fingerprint(digests: &ModelDigests, layout_digest: &[u8; 32], recipe: &KvRecipe) -> Hex<32> {
    let mut h = blake3::Hasher::new();
    h.update(b"pd-bridge/fingerprint/v2");
    for digest in [&digests.config, &digests.tokenizer, &digests.template, &digests.index, layout_digest] {
        h.update(digest);
    }
    h.update(&(recipe.projection_digests.len() as u32).to_le_bytes());
    for digest in &recipe.projection_digests {
        h.update(&digest.0);
    }
    h.update(&(recipe.rope.inv_freq.len() as u32).to_le_bytes());
    for frequency in &recipe.rope.inv_freq {
        h.update(&frequency.to_le_bytes());
    }
    let sin_cos = match recipe.rope.sin_cos {
        SinCos::Rounded => 0,
        SinCos::CephesFused => 1,
        SinCos::CephesSeparate => 2,
    };
    h.update(&[sin_cos]);
    h.update(&(recipe.summation_runs.len() as u32).to_le_bytes());
    for run in &recipe.summation_runs {
        h.update(&run.to_le_bytes());
    }
    Hex(*h.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared::control::RopeRecipe;

    #[test]
    fn every_part_counts() {
        let digests = ModelDigests { config: [1; 32], tokenizer: [2; 32], template: [3; 32], index: [4; 32] };
        let layout = [9; 32];
        let rope = RopeRecipe { inv_freq: vec![1.0, 0.5], sin_cos: SinCos::Rounded };
        let projection_digests = vec![Hex([5; 32]), Hex([6; 32])];
        let recipe = KvRecipe { rope, projection_digests, summation_runs: vec![8, 8] };
        let base = fingerprint(&digests, &layout, &recipe);
        let changed = |change: fn(&mut KvRecipe)| {
            let mut other = recipe.clone();
            change(&mut other);
            fingerprint(&digests, &layout, &other)
        };
        let others = [
            fingerprint(&ModelDigests { config: [0; 32], ..digests }, &layout, &recipe),
            fingerprint(&ModelDigests { tokenizer: [0; 32], ..digests }, &layout, &recipe),
            fingerprint(&ModelDigests { template: [0; 32], ..digests }, &layout, &recipe),
            fingerprint(&ModelDigests { index: [0; 32], ..digests }, &layout, &recipe),
            fingerprint(&digests, &[0; 32], &recipe),
            changed(|r| r.projection_digests.truncate(1)),
            changed(|r| r.projection_digests.swap(0, 1)),
            changed(|r| r.rope.inv_freq[1] = 0.25),
            changed(|r| r.rope.sin_cos = SinCos::CephesFused),
            changed(|r| r.rope.sin_cos = SinCos::CephesSeparate),
            changed(|r| r.summation_runs.clear()),
        ];
        assert!(others.iter().all(|other| *other != base));
    }
}
