//! What a verification found, for people and for programs.

use super::compare::CacheDifference;
use super::session::{Engines, Transfer};
use crate::model::TextModel;
use serde::Serialize;
use shared::layout::{CacheLayout, Dtype, LayerCache};
use std::fmt::Write as _;

/// Everything measured.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Report {
    model: String,
    engines: Engines,
    cache_dtype: String,
    transfer: Transfer,
    /// Largest `same_input.worst_steps` that passes.
    bound_steps: f64,
    /// Smallest `same_input.bit_identical_share` that passes.
    bound_bit_identical_share: f64,
    same_input: CacheDifference,
    end_to_end: CacheDifference,
    greedy: Greedy,
    /// KL(native‖bridged) of the first-token distributions, in nats.
    kl_first_token: f64,
    passed: bool,
}

/// Greedy answers from both caches.
#[derive(Debug, Clone, Serialize)]
struct Greedy {
    native_tokens: usize,
    bridged_tokens: usize,
    /// Leading tokens that agree.
    equal_tokens: usize,
    identical: bool,
}

impl Report {
    #[allow(clippy::too_many_arguments, reason = "one argument per measurement")]
    pub(super) fn new(
        layout: &CacheLayout,
        model: &TextModel,
        engines: Engines,
        transfer: Transfer,
        same_input: CacheDifference,
        end_to_end: CacheDifference,
        kl_first_token: f64,
        native: &[u32],
        bridged: &[u32],
    ) -> Self {
        let dtype = match layout.layers.first() {
            Some(LayerCache::Full { dtype, .. }) => *dtype,
            _ => Dtype::F32,
        };
        let (bound_steps, bound_bit_identical_share) = bounds(dtype, model.spec.hidden);
        let equal_tokens = native.iter().zip(bridged).take_while(|(a, b)| a == b).count();
        let passed = same_input.arrays == layout.n_arrays()
            && same_input.worst_steps <= bound_steps
            && same_input.bit_identical_share >= bound_bit_identical_share;
        Self {
            model: model.name.clone(),
            engines,
            cache_dtype: dtype.to_string(),
            transfer,
            bound_steps,
            bound_bit_identical_share,
            same_input,
            end_to_end,
            greedy: Greedy {
                native_tokens: native.len(),
                bridged_tokens: bridged.len(),
                equal_tokens,
                identical: native == bridged,
            },
            kl_first_token,
            passed,
        }
    }

    /// Whether reconstruction from the same inputs is within the bound, in every array.
    pub(super) fn passes(&self) -> bool {
        self.passed
    }

    /// One line of JSON.
    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// A table for people.
    pub(super) fn to_table(&self) -> String {
        let mut out = String::new();
        let t = &self.transfer;
        let _ = writeln!(
            out,
            "model      {} ({} prompt tokens, {} cache)",
            self.model, t.prompt_tokens, self.cache_dtype
        );
        let _ = writeln!(out, "decoder    {}", self.engines.decode);
        let _ = writeln!(out, "prefill    {}", self.engines.prefill);
        let _ = writeln!(
            out,
            "transfer   {} tokens, {} bytes, prefill {:.0} ms, not hidden {:.1} ms, digests {}",
            t.bridged_tokens,
            t.payload_bytes,
            t.prefill_ms,
            t.transfer_ms,
            if t.digests_equal { "equal" } else { "DIFFER" }
        );
        let _ = writeln!(
            out,
            "\n{:<12} {:>14} {:>14} {:>12} {:>16} {:>12}",
            "", "bit-identical", "within 1 step", "worst step", "within 1 rms-ulp", "worst"
        );
        for (name, d) in [("same input", &self.same_input), ("end to end", &self.end_to_end)] {
            let _ = writeln!(
                out,
                "{name:<12} {:>13.4}% {:>14} {:>12.2} {:>16} {:>12.2}  {}",
                d.bit_identical_share * 100.0,
                format!("{}/{}", d.arrays_within_1_step, d.arrays),
                d.worst_steps,
                format!("{}/{}", d.arrays_within_1_ulp, d.arrays),
                d.worst_ulp,
                d.worst_array
            );
        }
        let _ = writeln!(
            out,
            "step: ulp of {} at the element's own magnitude or its row's RMS, whichever is larger",
            self.cache_dtype
        );
        let _ = writeln!(
            out,
            "rms-ulp: ulp at the row's RMS alone, where an outlier's last bit counts many times"
        );
        let g = &self.greedy;
        let same = if g.identical { "identical" } else { "DIFFERENT" };
        let _ = writeln!(out, "\ngreedy     {} of {} tokens equal: {same}", g.equal_tokens, g.native_tokens);
        let _ = writeln!(out, "KL(native‖bridged) of the first token: {:.3e} nats", self.kl_first_token);
        let _ = write!(
            out,
            "\n{}: same input within {:.0} step of {} in every array, {:.0}% of elements bit-identical",
            if self.passed { "PASS" } else { "FAIL" },
            self.bound_steps,
            self.cache_dtype,
            self.bound_bit_identical_share * 100.0
        );
        out
    }
}

/// Worst step and least share of equal bits that pass. Rounding to a half format hides the order in which a
/// dot product is summed, except that a few last bits fall the other way. An f32 cache shows that order in
/// every element: the error grows with the square root of the number of products.
fn bounds(dtype: Dtype, hidden: usize) -> (f64, f64) {
    match dtype {
        Dtype::F16 | Dtype::Bf16 => (1.0, 0.99),
        Dtype::F32 => (4.0 * (hidden as f64).sqrt(), 0.0),
    }
}
