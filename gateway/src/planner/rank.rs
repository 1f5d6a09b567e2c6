//! Which decoder, and which prefill worker with it.
//!
//! Gateways agree without talking: every input is the workers' own word (speeds, queues, what they hold) and small
//! differences between two gateways' knowledge of it don't matter, because among workers that are about equally good
//! a hash of the prompt's beginning and the worker's name decides, the same everywhere.

use super::{NativeReason, Plan, PrefillOutlook, Route, Situation, bridge_ms, native_ms, plan};
use shared::control::Require;

/// A worker this much slower than the best is as good as the best, so that hashing may choose it.
const ABOUT_EQUAL: f64 = 1.25;
/// And so is one that is slower by no more than this.
const ABOUT_EQUAL_MS: f64 = 15.0;
/// Answer tokens that a running request is expected to take from a decoder still.
const EXPECTED_ANSWER_TOKENS: f64 = 64.0;
/// Cost of a running request on a decoder whose speed is unknown.
const UNKNOWN_REQUEST_MS: f64 = 250.0;
/// Prompt speed assumed where no decoder knows its own.
const UNKNOWN_TOKENS_PER_S: f64 = 100.0;

/// A request, as far as choosing workers goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Wanted {
    /// Prompt length T.
    pub(crate) prompt_tokens: u32,
    /// Hash of the prompt's beginning; equal for prompts that share it.
    pub(crate) prefix: u64,
    /// What the client wants.
    pub(crate) route: Route,
    /// What the client demands.
    pub(crate) require: Require,
    /// Fewest tokens worth a transfer.
    pub(crate) min_bridge_tokens: u32,
}

impl Wanted {
    /// Whether a decoder works alone whatever its store holds, so that `generate` need not wait for `prepare`.
    pub(crate) fn is_alone_for_certain(&self, has_prefill: bool) -> bool {
        let short = self.prompt_tokens.saturating_sub(1) < self.min_bridge_tokens;
        self.require == Require::Nothing
            && match self.route {
                Route::Native => true,
                Route::Auto => short || !has_prefill,
                Route::Bridge => !has_prefill,
            }
    }
}

/// How much a worker can be counted on; an earlier one is always preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tier {
    /// All is well.
    Alive,
    /// Its machine has missed heartbeats: no new bridges.
    Suspect,
    /// Its machine is gone but its own connection lives: better than nothing, no new bridges.
    Lost,
}

/// What is known of a decoder.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DecoderOutlook {
    /// Hash of its identity, the same for every gateway.
    pub(crate) identity: u64,
    /// How far it can be counted on.
    pub(crate) tier: Tier,
    /// Its own prompt speed in tokens per second; 0 when unknown.
    pub(crate) native_tokens_per_s: f64,
    /// Its answer speed in tokens per second; 0 when unknown.
    pub(crate) decode_tokens_per_s: f64,
    /// Requests that it has been asked for, by anyone, and that are not done.
    pub(crate) requests: u64,
    /// Leading prompt positions that it holds or is likely to hold.
    pub(crate) resident_tokens: u32,
    /// Bytes of its cache for one token.
    pub(crate) bytes_per_token: u64,
    /// Prefill workers that it can bridge with.
    pub(crate) peers: Vec<Peer>,
}

/// A prefill worker paired with a decoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Peer {
    /// Hash of its identity.
    pub(crate) identity: u64,
    /// What is known of it.
    pub(crate) outlook: PrefillOutlook,
    /// Transfers from it have failed again and again: only for those who insist on a bridge.
    pub(crate) is_resting: bool,
}

/// A decoder with the prefill worker to take, and what is to be expected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ranked {
    /// Index into the decoders given.
    pub(crate) decoder: usize,
    /// Index into its peers; `None` where it has none.
    pub(crate) peer: Option<usize>,
    /// What to do with them.
    pub(crate) plan: Plan,
    /// Expected time to the first token.
    pub(crate) ttft_ms: f64,
    /// The same plus what the decoder's other requests cost.
    pub(crate) cost_ms: f64,
}

/// All decoders, the one to take first, the others in the order to fall back on them. The order in which they are
/// given does not matter.
pub(crate) fn rank(wanted: &Wanted, decoders: &[DecoderOutlook]) -> Vec<Ranked> {
    let assumed = assumed_speed(decoders);
    let mut ranked: Vec<Ranked> =
        decoders.iter().enumerate().map(|(i, d)| expect(wanted, i, d, assumed)).collect();
    let class = |r: &Ranked| (matches!(r.plan, Plan::Refuse(_)), decoders[r.decoder].tier);
    ranked.sort_by(|a, b| {
        let identity = |r: &Ranked| decoders[r.decoder].identity;
        class(a).cmp(&class(b)).then(a.cost_ms.total_cmp(&b.cost_ms)).then(identity(a).cmp(&identity(b)))
    });
    let Some(best) = ranked.first().copied() else { return ranked };
    let equals = ranked
        .iter()
        .take_while(|r| class(r) == class(&best) && !is_clearly_better(best.cost_ms, r.cost_ms))
        .count();
    ranked[..equals].sort_by_key(|r| {
        let identity = decoders[r.decoder].identity;
        (std::cmp::Reverse(weight(wanted.prefix, identity)), identity)
    });
    ranked
}

/// Whether `a` is enough less than `b` to matter.
fn is_clearly_better(a_ms: f64, b_ms: f64) -> bool {
    b_ms > a_ms.mul_add(ABOUT_EQUAL, ABOUT_EQUAL_MS)
}

/// Rendezvous hashing: each prefix has its own order of workers, and a worker that comes or goes changes nothing
/// among the others.
fn weight(prefix: u64, identity: u64) -> u64 {
    // splitmix64's finalizer: every input bit reaches every output bit.
    let mut x = prefix ^ identity.rotate_left(32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The `count` names of `all` that go best with `name`, by rendezvous hashing.
pub(crate) fn closest(name: u64, all: impl Iterator<Item = u64>, count: usize) -> Vec<u64> {
    let mut all: Vec<_> = all.map(|other| (std::cmp::Reverse(weight(name, other)), other)).collect();
    if count < all.len() {
        all.select_nth_unstable(count);
        all.truncate(count);
    }
    all.into_iter().map(|(_, other)| other).collect()
}

/// An unmeasured decoder is taken for as fast as the fastest, so that it gets its chance to be measured.
fn assumed_speed(decoders: &[DecoderOutlook]) -> f64 {
    let known = decoders.iter().map(|d| d.native_tokens_per_s).fold(0.0, f64::max);
    if known > 0.0 { known } else { UNKNOWN_TOKENS_PER_S }
}

fn expect(wanted: &Wanted, decoder: usize, d: &DecoderOutlook, assumed: f64) -> Ranked {
    let may_bridge = d.tier == Tier::Alive;
    let situation = |prefill| Situation {
        prompt_tokens: wanted.prompt_tokens,
        resident_tokens: d.resident_tokens,
        native_tokens_per_s: d.native_tokens_per_s,
        prefill,
        bytes_per_token: d.bytes_per_token,
        route: wanted.route,
        require: wanted.require,
        min_bridge_tokens: wanted.min_bridge_tokens,
    };
    let peer = if may_bridge { best_peer(wanted, &situation(None), &d.peers) } else { None };
    let s = situation(peer.map(|p| d.peers[p].outlook));
    let plan = because(plan(&s), d);
    let end = s.prompt_tokens.saturating_sub(1);
    let missing = end - s.resident_tokens.min(end);
    // The last position is always computed by the decoder.
    let alone = || {
        native_ms(
            &Situation { native_tokens_per_s: known_or(s.native_tokens_per_s, assumed), ..s },
            missing + 1,
        )
    };
    let ttft_ms = match (plan, &s.prefill) {
        (Plan::Bridge { .. }, Some(prefill)) => bridge_ms(&s, prefill, missing),
        _ => alone(),
    };
    let per_request = if d.decode_tokens_per_s > 0.0 {
        1000.0 * EXPECTED_ANSWER_TOKENS / d.decode_tokens_per_s
    } else {
        UNKNOWN_REQUEST_MS
    };
    Ranked { decoder, peer, plan, ttft_ms, cost_ms: ttft_ms + d.requests as f64 * per_request }
}

/// Says it where resting is the reason for there being no prefill worker.
fn because(plan: Plan, d: &DecoderOutlook) -> Plan {
    let rest = d.tier == Tier::Alive && !d.peers.is_empty();
    match plan {
        Plan::Native(NativeReason::NoPrefillWorker) if rest => Plan::Native(NativeReason::PrefillFailing),
        plan => plan,
    }
}

/// The peer that is done first; one that rests only if there is no other and the client insists.
fn best_peer(wanted: &Wanted, s: &Situation, peers: &[Peer]) -> Option<usize> {
    let insists = wanted.route == Route::Bridge || wanted.require != Require::Nothing;
    let is_usable = |p: &Peer| !p.is_resting;
    let use_resting = insists && !peers.iter().any(is_usable);
    let end = s.prompt_tokens.saturating_sub(1);
    let missing = end - s.resident_tokens.min(end);
    let assumed = peers.iter().map(|p| p.outlook.tokens_per_s).fold(0.0, f64::max);
    let cost = |p: &Peer| {
        let tokens_per_s = known_or(p.outlook.tokens_per_s, assumed);
        bridge_ms(s, &PrefillOutlook { tokens_per_s, ..p.outlook }, missing)
    };
    let best = peers.iter().filter(|p| use_resting || is_usable(p)).map(cost).min_by(f64::total_cmp)?;
    let equals = peers
        .iter()
        .enumerate()
        .filter(|(_, p)| (use_resting || is_usable(p)) && !is_clearly_better(best, cost(p)));
    let chosen =
        equals.max_by_key(|(_, p)| (weight(wanted.prefix, p.identity), std::cmp::Reverse(p.identity)));
    chosen.map(|(i, _)| i)
}

fn known_or(rate: f64, assumed: f64) -> f64 {
    if rate > 0.0 { rate } else { assumed }
}

#[cfg(test)]
mod tests;
