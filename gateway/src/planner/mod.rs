//! The route of a request: pure functions of what is known when the prompt is prepared. [`rank`] says which workers
//! to take, [`plan`] what to do with the chosen ones.

mod rank;

pub(crate) use rank::{DecoderOutlook, Peer, Ranked, Tier, Wanted, closest, rank};

use shared::control::Require;

/// Fixed cost of a transfer: opening it, connecting, the commit's round trip.
const TRANSFER_OVERHEAD_MS: f64 = 5.0;
/// Measured rates are noisy: a bridge is given up only if it looks slower by this factor.
const CLEARLY_SLOWER: f64 = 1.2;

/// What the plan depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Situation {
    /// Prompt length T.
    pub(crate) prompt_tokens: u32,
    /// Leading positions that the decoder holds, at most T − 1.
    pub(crate) resident_tokens: u32,
    /// The decoder's own prompt speed in tokens per second; 0 when unknown.
    pub(crate) native_tokens_per_s: f64,
    /// A connected and paired prefill worker.
    pub(crate) prefill: Option<PrefillOutlook>,
    /// Bytes of the decoder's cache for one token.
    pub(crate) bytes_per_token: u64,
    /// What the client wants.
    pub(crate) route: Route,
    /// What the client demands.
    pub(crate) require: Require,
    /// Fewest tokens worth a transfer.
    pub(crate) min_bridge_tokens: u32,
}

/// What is known of the prefill worker and the link to the decoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PrefillOutlook {
    /// Prompt speed in tokens per second; 0 when unknown.
    pub(crate) tokens_per_s: f64,
    /// Bytes per second that transfers to this decoder reached; 0 when unknown.
    pub(crate) link_bytes_per_s: f64,
    /// Prompt tokens that it has been asked for, by anyone, and that are not done.
    pub(crate) queued_tokens: u64,
    /// Leading prompt positions that its own prefix cache is likely to hold.
    pub(crate) reusable_tokens: u32,
}

/// `X-PD-Bridge-Route`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Route {
    /// The planner decides.
    #[default]
    Auto,
    /// The decoder alone.
    Native,
    /// A transfer wherever one is possible.
    Bridge,
}

/// Where the prompt's cache comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// The decoder alone.
    Native(NativeReason),
    /// The decoder's resident prefix is enough.
    Warm,
    /// A transfer of positions `start..end`.
    Bridge {
        /// First position sent.
        start: u32,
        /// End (exclusive), always T − 1.
        end: u32,
    },
    /// The client requires a bridge and there is none to be had.
    Refuse(NativeReason),
}

/// Why the decoder works alone; the verdict's `reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NativeReason {
    /// Too few tokens for a transfer to pay.
    ShortPrompt,
    /// None connected and paired.
    NoPrefillWorker,
    /// Transfers from every prefill worker there is have failed again and again; they rest for a while.
    PrefillFailing,
    /// Measured rates say that the decoder is faster.
    PredictedSlower,
    /// `X-PD-Bridge-Route: native`.
    Forced,
}

impl NativeReason {
    /// The snake_case code in the verdict.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::ShortPrompt => "short_prompt",
            Self::NoPrefillWorker => "no_prefill_worker",
            Self::PrefillFailing => "prefill_worker_failing",
            Self::PredictedSlower => "predicted_slower",
            Self::Forced => "forced",
        }
    }
}

/// Chooses the route.
///
/// A requirement beats the estimate of speed and the least size, never an explicit `native`: that
/// combination is refused.
pub(crate) fn plan(s: &Situation) -> Plan {
    let end = s.prompt_tokens.saturating_sub(1);
    let start = s.resident_tokens.min(end);
    let missing = end - start;
    let required = s.require != Require::Nothing;
    let alone = |reason| {
        if required && !satisfied(s.require, start, end) {
            Plan::Refuse(reason)
        } else {
            Plan::Native(reason)
        }
    };
    if s.route == Route::Native {
        return alone(NativeReason::Forced);
    }
    if missing == 0 {
        return if start > 0 { Plan::Warm } else { alone(NativeReason::ShortPrompt) };
    }
    let insist = s.route == Route::Bridge || (required && !satisfied(s.require, start, end));
    if !insist && missing < s.min_bridge_tokens {
        return if start > 0 { Plan::Warm } else { Plan::Native(NativeReason::ShortPrompt) };
    }
    let Some(prefill) = s.prefill else { return alone(NativeReason::NoPrefillWorker) };
    if !insist && bridge_ms(s, &prefill, missing) > CLEARLY_SLOWER * native_ms(s, missing) {
        return Plan::Native(NativeReason::PredictedSlower);
    }
    Plan::Bridge { start, end }
}

/// Whether the resident prefix alone meets the demand.
fn satisfied(require: Require, resident: u32, end: u32) -> bool {
    match require {
        Require::Nothing => true,
        Require::Any => resident > 0,
        Require::Complete => resident == end && end > 0,
    }
}

/// Time for the decoder to compute `missing` positions; infinite when its speed is unknown, so that a
/// transfer is tried.
fn native_ms(s: &Situation, missing: u32) -> f64 {
    if s.native_tokens_per_s > 0.0 {
        f64::from(missing) / s.native_tokens_per_s * 1000.0
    } else {
        f64::INFINITY
    }
}

/// Time for the prefill worker to compute what its own prefix cache lacks and send what the decoder lacks,
/// the two overlapping.
fn bridge_ms(s: &Situation, prefill: &PrefillOutlook, missing: u32) -> f64 {
    let seconds = |amount: f64, per_s: f64| if per_s > 0.0 { amount / per_s } else { 0.0 };
    let own = f64::from(s.prompt_tokens - prefill.reusable_tokens.min(s.prompt_tokens - 1));
    let compute = seconds(own + prefill.queued_tokens as f64, prefill.tokens_per_s);
    let transfer = seconds(f64::from(missing) * s.bytes_per_token as f64, prefill.link_bytes_per_s);
    TRANSFER_OVERHEAD_MS + compute.max(transfer) * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn base() -> Situation {
        Situation {
            prompt_tokens: 2000,
            resident_tokens: 0,
            native_tokens_per_s: 50.0,
            prefill: Some(PrefillOutlook {
                tokens_per_s: 200.0,
                link_bytes_per_s: 1e9,
                queued_tokens: 0,
                reusable_tokens: 0,
            }),
            bytes_per_token: 23_040,
            route: Route::Auto,
            require: Require::Nothing,
            min_bridge_tokens: 64,
        }
    }

    #[test]
    fn one_case_per_rule() {
        let s = base();
        assert_eq!(plan(&s), Plan::Bridge { start: 0, end: 1999 });
        assert_eq!(plan(&Situation { resident_tokens: 512, ..s }), Plan::Bridge { start: 512, end: 1999 });
        assert_eq!(plan(&Situation { prompt_tokens: 40, ..s }), Plan::Native(NativeReason::ShortPrompt));
        assert_eq!(plan(&Situation { prompt_tokens: 300, resident_tokens: 256, ..s }), Plan::Warm);
        assert_eq!(plan(&Situation { prefill: None, ..s }), Plan::Native(NativeReason::NoPrefillWorker));
        assert_eq!(
            plan(&Situation { native_tokens_per_s: 5000.0, ..s }),
            Plan::Native(NativeReason::PredictedSlower)
        );
        assert_eq!(plan(&Situation { route: Route::Native, ..s }), Plan::Native(NativeReason::Forced));
        let short = Situation { prompt_tokens: 10, ..s };
        assert_eq!(plan(&Situation { route: Route::Bridge, ..short }), Plan::Bridge { start: 0, end: 9 });
        assert_eq!(plan(&Situation { require: Require::Any, ..short }), Plan::Bridge { start: 0, end: 9 });
        let none = Situation { prefill: None, require: Require::Any, ..s };
        assert_eq!(plan(&none), Plan::Refuse(NativeReason::NoPrefillWorker));
        assert_eq!(
            plan(&Situation { resident_tokens: 1999, require: Require::Complete, ..none }),
            Plan::Warm
        );
    }

    #[test]
    fn a_second_turn_is_bridged_if_the_prefill_worker_still_holds_the_first() {
        let s = Situation { resident_tokens: 1792, ..base() };
        assert_eq!(plan(&s), Plan::Native(NativeReason::PredictedSlower));
        let remembers = s.prefill.map(|p| PrefillOutlook { reusable_tokens: 1792, ..p });
        assert_eq!(plan(&Situation { prefill: remembers, ..s }), Plan::Bridge { start: 1792, end: 1999 });
    }

    #[test]
    fn a_slow_link_counts() {
        let slow = PrefillOutlook {
            tokens_per_s: 200.0,
            link_bytes_per_s: 1e5,
            queued_tokens: 0,
            reusable_tokens: 0,
        };
        let s = Situation { prefill: Some(slow), ..base() };
        assert_eq!(plan(&s), Plan::Native(NativeReason::PredictedSlower));
    }

    prop_compose! {
        fn situations()(
            prompt_tokens in 1u32..300_000, resident in 0u32..300_000, native in 0f64..1e5,
            prefill in proptest::option::of((0f64..1e6, 0f64..1e11, 0u64..1_000_000, 0u32..300_000)),
            bytes_per_token in 0u64..1_000_000, min_bridge_tokens in 0u32..1000,
            route in prop_oneof![Just(Route::Auto), Just(Route::Native), Just(Route::Bridge)],
            require in prop_oneof![Just(Require::Nothing), Just(Require::Any), Just(Require::Complete)],
        ) -> Situation {
            Situation {
                prompt_tokens, resident_tokens: resident % prompt_tokens, native_tokens_per_s: native,
                prefill: prefill.map(|(tokens_per_s, link_bytes_per_s, queued_tokens, reusable_tokens)| PrefillOutlook {
                    tokens_per_s, link_bytes_per_s, queued_tokens, reusable_tokens }),
                bytes_per_token, route, require, min_bridge_tokens,
            }
        }
    }

    proptest! {
        #[test]
        fn alone_for_certain_is_alone_with_any_resident_prefix(s in situations(), resident in 0u32..300_000) {
            let other = Situation { resident_tokens: resident % s.prompt_tokens, ..s };
            let wanted = Wanted { prompt_tokens: s.prompt_tokens, prefix: 0, route: s.route, require: s.require,
                min_bridge_tokens: s.min_bridge_tokens };
            if wanted.is_alone_for_certain(s.prefill.is_some()) {
                prop_assert!(matches!(plan(&other), Plan::Native(_) | Plan::Warm), "{:?}", plan(&other));
            }
        }

        #[test]
        fn every_plan_is_possible_and_allowed(s in situations()) {
            let plan = plan(&s);
            let end = s.prompt_tokens - 1;
            match plan {
                Plan::Bridge { start, end: to } => {
                    prop_assert!(start < to && to == end && start == s.resident_tokens);
                    prop_assert!(s.prefill.is_some() && s.route != Route::Native);
                }
                Plan::Warm => prop_assert!(s.resident_tokens > 0 && s.route != Route::Native),
                Plan::Native(_) => {}
                Plan::Refuse(_) => prop_assert!(s.require != Require::Nothing),
            }
            if !matches!(plan, Plan::Bridge { .. } | Plan::Refuse(_)) {
                prop_assert!(satisfied(s.require, s.resident_tokens, end));
            }
        }

        #[test]
        fn a_faster_prefill_worker_never_loses_a_bridge(s in situations(), faster in 1f64..100.0) {
            let quicker = s.prefill.filter(|p| p.tokens_per_s > 0.0).map(|p| PrefillOutlook {
                tokens_per_s: p.tokens_per_s * faster, ..p });
            if quicker.is_some() && matches!(plan(&s), Plan::Bridge { .. }) {
                let bridges = matches!(plan(&Situation { prefill: quicker, ..s }), Plan::Bridge { .. });
                prop_assert!(bridges);
            }
        }
    }
}
