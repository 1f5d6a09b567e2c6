//! Who is served next: a pure function of what everybody needs.
//!
//! In each round every answer under way gets one token, then one prompt gets one chunk. A prompt that runs
//! alone always gets the engine's own chunk size, so that equal prompts are computed in equal pieces; while
//! answers wait for their next token, chunks are cut by time, from the measured speed.

use shared::control::Rates;

/// Shortest chunk, in tokens: less makes a pass inefficient.
pub const MIN_CHUNK_TOKENS: usize = 16;
/// How long a chunk may keep answers waiting, in seconds.
const SHARED_CHUNK_S: f64 = 0.15;

/// What a job needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Part of the prompt.
    Prefill,
    /// A token; `export` when a full block of it could go to the store.
    Decode {
        /// A finished block is not in the store yet.
        export: bool,
    },
    /// The answer is complete; its last blocks go to the store.
    Finish,
    /// Nothing until its reader catches up.
    Blocked,
}

/// One thing for the engine to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Compute up to that many prompt tokens.
    Prefill {
        /// Most tokens to compute.
        max_tokens: usize,
    },
    /// Compute one token.
    Decode,
    /// Copy one finished block to the store.
    Export,
    /// Copy what is left and say that the answer is complete.
    Finish,
}

/// The steps of one round, as (index of the job, action). `turn` counts rounds, so that over several of them
/// everybody is first once.
#[must_use]
pub fn round(needs: &[Need], rates: Rates, lone_chunk_tokens: usize, turn: usize) -> Vec<(usize, Action)> {
    let n = needs.len();
    let rotated = (0..n).map(|i| (i + turn) % n).map(|i| (i, needs[i]));
    let mut steps = Vec::with_capacity(n + 1);
    let mut export = None;
    for (i, need) in rotated {
        match need {
            Need::Decode { export: wanted } => {
                steps.push((i, Action::Decode));
                if wanted && export.is_none() {
                    export = Some((i, Action::Export));
                }
            }
            Need::Finish => steps.push((i, Action::Finish)),
            Need::Prefill | Need::Blocked => {}
        }
    }
    steps.extend(export);
    let prompts: Vec<usize> = (0..n).filter(|&i| needs[i] == Need::Prefill).collect();
    if !prompts.is_empty() {
        let answers_wait = needs.iter().any(|need| matches!(need, Need::Decode { .. }));
        let max_tokens =
            if answers_wait { shared_chunk_tokens(rates, lone_chunk_tokens) } else { lone_chunk_tokens };
        steps.push((prompts[turn % prompts.len()], Action::Prefill { max_tokens }));
    }
    steps
}

/// Tokens of a chunk while answers wait.
#[must_use]
pub fn shared_chunk_tokens(rates: Rates, lone_chunk_tokens: usize) -> usize {
    let tokens = (rates.prefill_tokens_per_s * SHARED_CHUNK_S) as usize;
    (tokens / MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS).max(MIN_CHUNK_TOKENS).min(lone_chunk_tokens.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RATES: Rates = Rates { prefill_tokens_per_s: 1000.0, decode_tokens_per_s: 10.0 };
    const DECODE: Need = Need::Decode { export: false };

    #[test]
    fn answers_come_before_prompts_and_make_their_chunks_short() {
        let steps = round(&[Need::Prefill, DECODE, Need::Blocked, DECODE], RATES, 512, 0);
        let chunk = Action::Prefill { max_tokens: 144 };
        assert_eq!(steps, [(1, Action::Decode), (3, Action::Decode), (0, chunk)]);
        assert_eq!(round(&[Need::Prefill], RATES, 512, 5), [(0, Action::Prefill { max_tokens: 512 })]);
    }

    #[test]
    fn prompts_take_turns() {
        let first = |turn| round(&[Need::Prefill, Need::Prefill, Need::Prefill], RATES, 512, turn)[0].0;
        assert_eq!([first(0), first(1), first(2), first(3)], [0, 1, 2, 0]);
    }

    #[test]
    fn one_block_is_exported_per_round() {
        let wants = Need::Decode { export: true };
        let steps = round(&[wants, wants], RATES, 512, 1);
        assert_eq!(steps, [(1, Action::Decode), (0, Action::Decode), (1, Action::Export)]);
    }

    #[test]
    fn unknown_or_absurd_speeds_give_usable_chunks() {
        for speed in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-9, 1e30] {
            let rates = Rates { prefill_tokens_per_s: speed, ..RATES };
            assert!((MIN_CHUNK_TOKENS..=512).contains(&shared_chunk_tokens(rates, 512)));
            assert_eq!(shared_chunk_tokens(rates, 8), 8);
        }
    }

    fn needs() -> impl Strategy<Value = Vec<Need>> {
        let need = prop_oneof![
            Just(Need::Prefill),
            any::<bool>().prop_map(|export| Need::Decode { export }),
            Just(Need::Finish),
            Just(Need::Blocked),
        ];
        prop::collection::vec(need, 0..12)
    }

    proptest! {
        #[test]
        fn every_round_is_fair(needs in needs(), turn in 0usize..1000) {
            let steps = round(&needs, RATES, 512, turn);
            for (i, need) in needs.iter().enumerate() {
                let mine: Vec<Action> = steps.iter().filter(|(j, _)| *j == i).map(|(_, a)| *a).collect();
                match need {
                    Need::Decode { .. } => prop_assert_eq!(mine[0], Action::Decode),
                    Need::Finish => prop_assert_eq!(&mine[..], &[Action::Finish]),
                    Need::Blocked => prop_assert!(mine.is_empty()),
                    Need::Prefill => prop_assert!(mine.len() <= 1),
                }
            }
            let chunks = steps.iter().filter(|(_, a)| matches!(a, Action::Prefill { .. })).count();
            prop_assert_eq!(chunks, usize::from(needs.contains(&Need::Prefill)));
        }
    }
}
