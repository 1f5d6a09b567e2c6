//! The whole path from a 4-bit GGUF to greedy tokens, against mlx-lm. `testdata/smollm2.py` made the tokens; the model
//! is the one that `make setup` fetches.

use std::path::Path;

use serde_json::Value;
use shared::model::Model;

use super::{LoadOptions, MlxModel, Sequence};

fn model() -> MlxModel {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "{} is missing: run `make setup`", path.display());
    let file = Model::open(&path).unwrap();
    MlxModel::load(&file.spec, file.source.as_ref(), &LoadOptions::default()).unwrap()
}

/// Prompts and what mlx-lm answers.
fn cases() -> Vec<(Vec<u32>, Vec<u32>)> {
    let cases: Value = serde_json::from_str(include_str!("testdata/smollm2.json")).unwrap();
    let ids = |ids: &Value| -> Vec<u32> {
        ids.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
    };
    cases.as_array().unwrap().iter().map(|case| (ids(&case["prompt"]), ids(&case["tokens"]))).collect()
}

fn argmax(logits: &[f32]) -> u32 {
    u32::try_from(logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0).unwrap()
}

/// A cache that holds all but the last token of a prompt, read in chunks, and that token.
fn read(model: &MlxModel, prompt: &[u32], chunk: usize) -> (Sequence, u32) {
    let (last, before) = prompt.split_last().unwrap();
    let mut seq = model.new_sequence(prompt.len() + 64);
    before.chunks(chunk).for_each(|tokens| drop(model.forward(&mut seq, tokens, false).unwrap()));
    (seq, *last)
}

#[test]
fn greedy_tokens_equal_mlx_lm() {
    let model = model();
    for (prompt, want) in cases() {
        let (last, before) = prompt.split_last().unwrap();
        let mut seq = model.new_sequence(prompt.len() + want.len());
        model.forward(&mut seq, before, false).unwrap();
        let mut next = *last;
        let mut tokens = Vec::new();
        while tokens.len() < want.len() {
            let logits = model.forward(&mut seq, &[next], true).unwrap().unwrap();
            next = argmax(&logits);
            tokens.push(next);
        }
        assert_eq!(tokens, want);
    }
}

/// Eight prompts decoded together, joining one after the other and leaving at different times, against each alone.
#[test]
fn a_batch_gives_every_row_what_it_gets_alone() {
    const ANSWER: usize = 20;
    let model = model();
    // Parts of the prompts of different lengths, so that rows differ in position as well as in content.
    let prompts: Vec<Vec<u32>> = cases()
        .iter()
        .cycle()
        .zip([1.0, 0.8, 0.6, 0.9, 0.5, 0.7, 0.4, 0.3])
        .map(|((prompt, _), share)| prompt[..(prompt.len() as f64 * share).ceil() as usize].to_vec())
        .collect();
    let alone: Vec<(Vec<u32>, Vec<Vec<f32>>)> = prompts
        .iter()
        .map(|prompt| {
            let (mut seq, mut next) = read(&model, prompt, 64);
            let mut all = (Vec::new(), Vec::new());
            for _ in 0..ANSWER {
                let logits = model.decode_batch(&mut [(&mut seq, next)]).unwrap().remove(0);
                next = argmax(&logits);
                all.0.push(next);
                all.1.push(logits);
            }
            all
        })
        .collect();

    let mut rows: Vec<(usize, Sequence, u32, usize)> = Vec::new();
    let (mut waiting, mut equal_bits, mut passes) = (prompts.iter().enumerate(), true, 0);
    loop {
        // Another way of cutting the prompt than above.
        if let Some((i, prompt)) = waiting.next() {
            let (seq, last) = read(&model, prompt, 48);
            rows.push((i, seq, last, 0));
        }
        if rows.is_empty() {
            break;
        }
        let mut batch: Vec<(&mut Sequence, u32)> = rows.iter_mut().map(|r| (&mut r.1, r.2)).collect();
        let all = model.decode_batch(&mut batch).unwrap();
        passes += 1;
        for ((i, _, next, done), logits) in rows.iter_mut().zip(all) {
            *next = argmax(&logits);
            assert_eq!(*next, alone[*i].0[*done], "prompt {i}, token {done}");
            equal_bits &= logits == alone[*i].1[*done];
            *done += 1;
        }
        rows.retain(|(_, _, _, done)| *done < ANSWER);
    }
    assert_eq!(passes, ANSWER + prompts.len() - 1);
    // The BLAS of deploy/setup sums alike for any number of rows; elsewhere only the tokens must agree.
    assert_eq!(equal_bits, cfg!(target_os = "linux"));
}

#[test]
fn forks_share_a_prompt_and_then_go_their_own_ways() {
    let model = model();
    let (prompt, want) = cases().swap_remove(0);
    let (seq, last) = read(&model, &prompt, 64);
    let (mut a, mut b, mut c) = (seq.clone(), seq.clone(), seq);
    let first = model.decode_batch(&mut [(&mut a, last), (&mut b, last)]).unwrap();
    assert_eq!(argmax(&first[0]), want[0]);
    assert!(first[0] == first[1], "equal rows differ");
    // One goes on with what comes next, the other with something else: neither sees the other's tokens.
    let second = model.decode_batch(&mut [(&mut a, want[0]), (&mut b, want[0] + 1)]).unwrap();
    assert_eq!(argmax(&second[0]), want[1]);
    assert!(second[0] != second[1], "different rows are equal");
    assert_eq!(argmax(&model.decode_batch(&mut [(&mut c, last)]).unwrap()[0]), want[0]);
    assert_eq!((a.len(), b.len(), c.len()), (prompt.len() + 1, prompt.len() + 1, prompt.len()));
}
