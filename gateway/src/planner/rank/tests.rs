use super::*;
use proptest::prelude::*;

fn wanted(prefix: u64) -> Wanted {
    Wanted {
        prompt_tokens: 2000,
        prefix,
        route: Route::Auto,
        require: Require::Nothing,
        min_bridge_tokens: 64,
    }
}

fn decoder(identity: u64) -> DecoderOutlook {
    DecoderOutlook {
        identity,
        tier: Tier::Alive,
        native_tokens_per_s: 100.0,
        decode_tokens_per_s: 20.0,
        requests: 0,
        resident_tokens: 0,
        bytes_per_token: 23_040,
        peers: vec![peer(100)],
    }
}

fn peer(identity: u64) -> Peer {
    let outlook =
        PrefillOutlook { tokens_per_s: 1000.0, link_bytes_per_s: 1e9, queued_tokens: 0, reusable_tokens: 0 };
    Peer { identity, outlook, is_resting: false }
}

fn first(wanted: &Wanted, decoders: &[DecoderOutlook]) -> (u64, Option<u64>) {
    let r = rank(wanted, decoders)[0];
    let d = &decoders[r.decoder];
    (d.identity, r.peer.map(|p| d.peers[p].identity))
}

#[test]
fn equal_decoders_share_the_prefixes_and_a_prefix_stays_where_it_is() {
    let decoders: Vec<_> = (1..=4).map(decoder).collect();
    let home: Vec<u64> = (0..1000).map(|prefix| first(&wanted(prefix), &decoders).0).collect();
    for d in 1..=4 {
        let share = home.iter().filter(|h| **h == d).count();
        assert!((150..350).contains(&share), "decoder {d} got {share} of 1000");
    }
    // One leaves: only its own prefixes move.
    for (prefix, before) in home.iter().enumerate().filter(|(_, h)| **h != 3) {
        let left: Vec<_> = decoders.iter().filter(|d| d.identity != 3).cloned().collect();
        assert_eq!(first(&wanted(prefix as u64), &left).0, *before);
    }
}

#[test]
fn what_a_decoder_holds_outweighs_the_hash_and_a_long_queue_outweighs_what_it_holds() {
    for prefix in 0..50 {
        let holds = DecoderOutlook { resident_tokens: 1984, ..decoder(1) };
        assert_eq!(first(&wanted(prefix), &[holds.clone(), decoder(2), decoder(3)]).0, 1);
        let busy = DecoderOutlook { requests: 40, ..holds };
        assert_ne!(first(&wanted(prefix), &[busy, decoder(2), decoder(3)]).0, 1);
    }
}

#[test]
fn a_resting_pair_is_for_those_who_insist() {
    let insisting = Wanted { route: Route::Bridge, ..wanted(0) };
    let demanding = Wanted { require: Require::Any, ..wanted(0) };
    let resting = |identity| Peer { is_resting: true, ..peer(identity) };
    let alone = DecoderOutlook { peers: vec![resting(10)], ..decoder(1) };
    let ranked = rank(&wanted(0), std::slice::from_ref(&alone))[0];
    assert_eq!((ranked.peer, ranked.plan), (None, Plan::Native(NativeReason::PrefillFailing)));
    for wanted in [&insisting, &demanding] {
        let ranked = rank(wanted, std::slice::from_ref(&alone))[0];
        assert_eq!((ranked.peer, matches!(ranked.plan, Plan::Bridge { .. })), (Some(0), true));
    }
    // A pair in good standing is better, for everyone and however slow.
    let mut slower = peer(11);
    slower.outlook.tokens_per_s = 300.0;
    let both = DecoderOutlook { peers: vec![resting(10), slower], ..decoder(1) };
    for wanted in [&wanted(0), &insisting, &demanding] {
        assert_eq!(first(wanted, std::slice::from_ref(&both)).1, Some(11));
    }
    let none = DecoderOutlook { peers: Vec::new(), ..decoder(1) };
    assert_eq!(rank(&wanted(0), &[none])[0].plan, Plan::Native(NativeReason::NoPrefillWorker));
}

#[test]
fn the_prefill_worker_is_the_one_that_is_done_first() {
    let fast = |identity, tokens_per_s| Peer {
        outlook: PrefillOutlook { tokens_per_s, ..peer(0).outlook },
        ..peer(identity)
    };
    for prefix in 0..50 {
        let mut d = decoder(1);
        d.peers = vec![fast(10, 500.0), fast(11, 5000.0), fast(12, 1000.0)];
        assert_eq!(first(&wanted(prefix), &[d.clone()]).1, Some(11));
        // Its queue makes it slower than the next, a prefix in its cache makes up for the queue.
        d.peers[1].outlook.queued_tokens = 100_000;
        assert_eq!(first(&wanted(prefix), &[d.clone()]).1, Some(12));
        d.peers[0].outlook.reusable_tokens = 1990;
        assert_eq!(first(&wanted(prefix), &[d.clone()]).1, Some(10));
        // A slow link is slow whatever computes.
        d.peers[0].outlook.link_bytes_per_s = 1e6;
        assert_eq!(first(&wanted(prefix), &[d]).1, Some(12));
    }
}

#[test]
fn a_suspect_is_taken_only_when_there_is_no_other_and_never_bridged() {
    let suspect = DecoderOutlook { tier: Tier::Suspect, resident_tokens: 1984, ..decoder(1) };
    let busy = DecoderOutlook { requests: 100, ..decoder(2) };
    assert_eq!(first(&wanted(7), &[suspect.clone(), busy]).0, 2);
    let alone = rank(&Wanted { route: Route::Bridge, ..wanted(7) }, &[suspect]);
    assert_eq!((alone[0].peer, matches!(alone[0].plan, Plan::Bridge { .. })), (None, false));
}

#[test]
fn a_demand_is_met_where_it_can_be() {
    let without = DecoderOutlook { peers: vec![], ..decoder(1) };
    let with = DecoderOutlook { requests: 50, ..decoder(2) };
    let any = Wanted { require: Require::Any, ..wanted(1) };
    assert_eq!(first(&any, &[without.clone(), with]).0, 2);
    assert!(matches!(rank(&any, &[without])[0].plan, Plan::Refuse(_)));
}

#[test]
fn nothing_to_choose_from_is_no_choice() {
    assert!(rank(&wanted(1), &[]).is_empty());
    assert_eq!(closest(5, [1, 2, 3].into_iter(), 8), [1, 2, 3]);
    let eight = |all: &mut dyn Iterator<Item = u64>| {
        let mut chosen = closest(5, all, 8);
        chosen.sort_unstable();
        chosen
    };
    let all = eight(&mut (0..1000));
    assert_eq!(all.len(), 8);
    // Others' leaving changes nothing.
    assert_eq!(eight(&mut (0..1000).filter(|n| n % 7 != 0 || all.contains(n))), all);
}

prop_compose! {
    fn peers()(identity in any::<u64>(), tokens_per_s in 0f64..1e5, link_bytes_per_s in 0f64..1e10,
        queued_tokens in 0u64..1_000_000, reusable_tokens in 0u32..10_000,
        is_resting in prop::bool::weighted(0.2)) -> Peer {
        Peer { identity, outlook: PrefillOutlook { tokens_per_s, link_bytes_per_s, queued_tokens, reusable_tokens }, is_resting }
    }
}

prop_compose! {
    fn decoders()(identity in any::<u64>(), native_tokens_per_s in 0f64..1e4, decode_tokens_per_s in 0f64..200.0,
        requests in 0u64..100, resident_tokens in 0u32..10_000, bytes_per_token in 0u64..1_000_000,
        tier in prop_oneof![4 => Just(Tier::Alive), 1 => Just(Tier::Suspect), 1 => Just(Tier::Lost)],
        peers in prop::collection::vec(peers(), 0..4)) -> DecoderOutlook {
        DecoderOutlook { identity, tier, native_tokens_per_s, decode_tokens_per_s, requests, resident_tokens,
            bytes_per_token, peers }
    }
}

prop_compose! {
    fn requests()(prompt_tokens in 1u32..100_000, prefix in any::<u64>(), min_bridge_tokens in 0u32..500,
        route in prop_oneof![Just(Route::Auto), Just(Route::Native), Just(Route::Bridge)],
        require in prop_oneof![Just(Require::Nothing), Just(Require::Any), Just(Require::Complete)]) -> Wanted {
        Wanted { prompt_tokens, prefix, route, require, min_bridge_tokens }
    }
}

proptest! {
    #[test]
    fn every_decoder_is_ranked_once_and_the_best_class_first(w in requests(), ds in prop::collection::vec(decoders(), 0..8)) {
        let ranked = rank(&w, &ds);
        let mut seen: Vec<usize> = ranked.iter().map(|r| r.decoder).collect();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..ds.len()).collect::<Vec<_>>());
        let class = |r: &Ranked| (matches!(r.plan, Plan::Refuse(_)), ds[r.decoder].tier);
        prop_assert!(ranked.windows(2).all(|w| class(&w[0]) <= class(&w[1])));
        for r in &ranked {
            prop_assert!(r.ttft_ms >= 0.0 && r.cost_ms >= r.ttft_ms && r.cost_ms.is_finite());
            let bridges = matches!(r.plan, Plan::Bridge { .. });
            prop_assert!(!bridges || (r.peer.is_some() && ds[r.decoder].tier == Tier::Alive));
        }
        if let Some(best) = ranked.first() {
            let least = ranked.iter().filter(|r| class(r) == class(best)).map(|r| r.cost_ms).fold(f64::INFINITY, f64::min);
            prop_assert!(!is_clearly_better(least, best.cost_ms), "{} is far from {least}", best.cost_ms);
        }
    }

    #[test]
    fn the_order_of_the_lists_does_not_matter(w in requests(), ds in prop::collection::vec(decoders(), 1..8), turn in 0usize..8) {
        let mut other = ds.clone();
        other.rotate_left(turn % ds.len());
        other.iter_mut().for_each(|d| d.peers.reverse());
        other.reverse();
        prop_assert_eq!(first(&w, &ds), first(&w, &other));
    }

    #[test]
    fn gateways_with_slightly_different_figures_agree(
        prefix in any::<u64>(), noise in prop::collection::vec((0.95f64..1.05, 0.95f64..1.05), 6),
    ) {
        // Six equal decoders, measured a little differently by each gateway: nobody leaves the common band.
        let exact: Vec<_> = (1..=6).map(decoder).collect();
        let measured: Vec<_> = exact.iter().zip(noise).map(|(d, (a, b))| {
            let mut d = d.clone();
            d.native_tokens_per_s *= a;
            d.peers[0].outlook.tokens_per_s *= b;
            d
        }).collect();
        prop_assert_eq!(first(&wanted(prefix), &exact), first(&wanted(prefix), &measured));
    }

    #[test]
    fn less_load_never_costs_a_decoder_its_place(w in requests(), ds in prop::collection::vec(decoders(), 1..6)) {
        let ranked = rank(&w, &ds);
        let chosen = ranked[0].decoder;
        let mut eased = ds.clone();
        eased[chosen].requests = 0;
        eased[chosen].peers.iter_mut().for_each(|p| p.outlook.queued_tokens = 0);
        let again = rank(&w, &eased);
        let cost = |r: &[Ranked], d| r.iter().find(|r| r.decoder == d).map(|r| r.cost_ms);
        // It may have become so much better that it is alone in its band, never worse than the new best.
        prop_assert!(cost(&again, chosen) <= cost(&ranked, chosen).map(|c| c.mul_add(ABOUT_EQUAL, ABOUT_EQUAL_MS)));
    }
}
