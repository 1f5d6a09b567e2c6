//! Who is served next: a pure function of what everybody needs.
//!
//! In each round all answers under way get one token, together in one pass, then one prompt gets one chunk. A prompt
//! that runs alone always gets the engine's own chunk size; while answers wait for their next token, chunks are cut
//! by time, from the measured speed. A request whose reader does not keep up needs nothing, so nobody waits for it.

use shared::control::Rates;

/// Shortest chunk, in tokens: less makes a pass inefficient.
pub const MIN_CHUNK_TOKENS: usize = 16;
/// How long a chunk may keep answers waiting, in seconds.
const SHARED_CHUNK_S: f64 = 0.15;

/// Most answers that get a token in one pass; of more, all get their turn.
pub const MAX_ROWS: usize = 64;

/// What a prompt or an answer needs next.
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
    /// Nothing.
    Nothing,
}

/// One thing for the engine to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Compute up to that many prompt tokens.
    Prefill {
        /// Most tokens to compute.
        max_tokens: usize,
    },
    /// Copy one finished block to the store.
    Export,
    /// Copy what is left and say that the answer is complete.
    Finish,
}

/// What is done before everybody is asked again; all by index of the need.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Round {
    /// Get a token, in one pass.
    pub decode: Vec<usize>,
    /// Then these, in order.
    pub steps: Vec<(usize, Action)>,
}

/// The next round. `turn` counts rounds, so that over several of them everybody is first once.
#[must_use]
pub fn round(needs: &[Need], rates: Rates, lone_chunk_tokens: usize, turn: usize) -> Round {
    let n = needs.len();
    let rotated = (0..n).map(|i| (i + turn) % n).map(|i| (i, needs[i]));
    let mut answers: Vec<usize> = (0..n).filter(|&i| matches!(needs[i], Need::Decode { .. })).collect();
    if answers.len() > MAX_ROWS {
        let first = turn.wrapping_mul(MAX_ROWS) % answers.len();
        answers.rotate_left(first);
        answers.truncate(MAX_ROWS);
    }
    let mut steps: Vec<_> =
        rotated.clone().filter(|(_, need)| *need == Need::Finish).map(|(i, _)| (i, Action::Finish)).collect();
    let export = rotated.clone().find(|(_, need)| *need == Need::Decode { export: true });
    steps.extend(export.map(|(i, _)| (i, Action::Export)));
    let prompts: Vec<usize> = (0..n).filter(|&i| needs[i] == Need::Prefill).collect();
    if !prompts.is_empty() {
        let max_tokens = if answers.is_empty() {
            lone_chunk_tokens
        } else {
            shared_chunk_tokens(rates, lone_chunk_tokens)
        };
        steps.push((prompts[turn % prompts.len()], Action::Prefill { max_tokens }));
    }
    Round { decode: answers, steps }
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
        let plan = round(&[Need::Prefill, DECODE, Need::Nothing, DECODE], RATES, 512, 0);
        let chunk = Action::Prefill { max_tokens: 144 };
        assert_eq!(plan, Round { decode: vec![1, 3], steps: vec![(0, chunk)] });
        let alone = (0, Action::Prefill { max_tokens: 512 });
        assert_eq!(round(&[Need::Prefill], RATES, 512, 5).steps, [alone]);
    }

    #[test]
    fn prompts_take_turns() {
        let first = |turn| round(&[Need::Prefill, Need::Prefill, Need::Prefill], RATES, 512, turn).steps[0].0;
        assert_eq!([first(0), first(1), first(2), first(3)], [0, 1, 2, 0]);
    }

    #[test]
    fn one_block_is_exported_per_round() {
        let wants = Need::Decode { export: true };
        for turn in 0..4 {
            let plan = round(&[wants, wants], RATES, 512, turn);
            assert_eq!(plan, Round { decode: vec![0, 1], steps: vec![(turn % 2, Action::Export)] });
        }
    }

    #[test]
    fn of_many_answers_all_get_their_turn() {
        let needs = vec![DECODE; 3 * MAX_ROWS + 7];
        let mut tokens = vec![0; needs.len()];
        for turn in 0..needs.len() {
            let plan = round(&needs, RATES, 512, turn);
            assert_eq!(plan.decode.len(), MAX_ROWS);
            plan.decode.into_iter().for_each(|i| tokens[i] += 1);
        }
        assert!(tokens.iter().all(|&n| n == MAX_ROWS), "{tokens:?}");
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
            Just(Need::Nothing),
        ];
        prop::collection::vec(need, 0..12)
    }

    proptest! {
        #[test]
        fn every_round_is_fair(needs in needs(), turn in 0usize..1000) {
            let Round { decode, steps } = round(&needs, RATES, 512, turn);
            for (i, need) in needs.iter().enumerate() {
                let mine: Vec<Action> = steps.iter().filter(|(j, _)| *j == i).map(|(_, a)| *a).collect();
                prop_assert_eq!(decode.contains(&i), matches!(need, Need::Decode { .. }));
                match need {
                    Need::Decode { export } => prop_assert!(mine.is_empty() || *export && mine == [Action::Export]),
                    Need::Finish => prop_assert_eq!(&mine[..], &[Action::Finish]),
                    Need::Nothing => prop_assert!(mine.is_empty()),
                    Need::Prefill => prop_assert!(mine.len() <= 1),
                }
            }
            let count = |wanted: fn(&Action) -> bool| steps.iter().filter(|(_, a)| wanted(a)).count();
            let chunks = count(|a| matches!(a, Action::Prefill { .. }));
            prop_assert_eq!(chunks, usize::from(needs.contains(&Need::Prefill)));
            let exports = count(|a| *a == Action::Export);
            prop_assert_eq!(exports, usize::from(needs.contains(&Need::Decode { export: true })));
        }
    }
}
