//! What the model itself thought of a token.

use super::scan::Scan;
use shared::control::TokenLogprobs;

/// Stands for the logarithm of zero, which JSON cannot say.
const LEAST: f32 = -9999.0;

/// Log probability of `token` under the model's own distribution, and those of the `top` likeliest tokens, likeliest
/// first (of equal ones the lower token). `logits` are the raw ones. A token that is no number or outside the
/// vocabulary has −9999.
#[must_use]
pub fn log_probabilities(logits: &[f32], token: u32, top: u32) -> TokenLogprobs {
    let mut scan = Scan::default();
    scan.read(logits);
    let Some((_, best)) = scan.best(logits) else {
        return TokenLogprobs { logprob: LEAST, top: Vec::new() };
    };
    let log_total = scan.total_weight(logits, best, 1.0).ln();
    let log_probability = |logit: f32| {
        if logit == best && best.is_infinite() {
            return 0.0;
        }
        let value = (f64::from(logit) - f64::from(best) - log_total) as f32;
        if value >= LEAST { value } else { LEAST }
    };
    TokenLogprobs {
        logprob: logits.get(token as usize).map_or(LEAST, |&logit| log_probability(logit)),
        top: likeliest(logits, &mut scan, top as usize)
            .into_iter()
            .map(|(token, logit)| (token, log_probability(logit)))
            .collect(),
    }
}

fn likeliest(logits: &[f32], scan: &mut Scan, n: usize) -> Vec<(u32, f32)> {
    let mut found = Vec::new();
    if n == 0 {
        return found;
    }
    let bound = scan.bound_of_top(n).unwrap_or(f32::NEG_INFINITY);
    scan.for_each_from(logits, bound, |token, logit| found.push((token, logit)));
    found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    found.truncate(n);
    found
}
