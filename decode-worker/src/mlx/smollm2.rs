//! The whole path from a 4-bit GGUF to greedy tokens, against mlx-lm. `testdata/smollm2.py` made the tokens; the model
//! is the one that `make setup` fetches.

use std::path::Path;

use serde_json::Value;
use shared::model::Model;

use super::{LoadOptions, MlxModel};

#[test]
fn greedy_tokens_equal_mlx_lm() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "{} is missing: run `make setup`", path.display());
    let file = Model::open(&path).unwrap();
    let model = MlxModel::load(&file.spec, file.source.as_ref(), &LoadOptions::default()).unwrap();

    let cases: Value = serde_json::from_str(include_str!("testdata/smollm2.json")).unwrap();
    for case in cases.as_array().unwrap() {
        let ids = |key: &str| -> Vec<u32> {
            let ids = case[key].as_array().unwrap().iter();
            ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
        };
        let (prompt, want) = (ids("prompt"), ids("tokens"));
        let (last, before) = prompt.split_last().unwrap();
        let mut seq = model.new_sequence(prompt.len() + want.len());
        model.forward(&mut seq, before, false).unwrap();
        let mut next = *last;
        let mut tokens = Vec::new();
        while tokens.len() < want.len() {
            let logits = model.forward(&mut seq, &[next], true).unwrap().unwrap();
            let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            next = u32::try_from(best).unwrap();
            tokens.push(next);
        }
        assert_eq!(tokens, want);
    }
}
