//! The engine against mlx-lm, on tiny random models. `testdata/golden.py` made the numbers.

use std::collections::BTreeMap;

use half::f16;
use serde_json::Value;
use shared::layout::Dtype;
use shared::spec::{Architecture, ModelSpec, RopeScaling, RopeSpec};
use shared::weights::{FloatVec, HostTensor, TensorInfo, TensorSource, WeightsError};

use super::{BlockBytes, LoadOptions, MlxError, MlxModel, Quantized, Sequence};

struct Tiny(BTreeMap<String, HostTensor>);

impl TensorSource for Tiny {
    fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.0.get(name).map(|t| TensorInfo { shape: t.shape().to_vec(), format: t.format() })
    }
    fn load(&self, name: &str) -> Result<HostTensor, WeightsError> {
        self.0.get(name).cloned().ok_or_else(|| WeightsError::Missing { tensor: name.to_owned() })
    }
}

/// The same numbers as `numbers` in golden.py.
fn numbers(name: &str, n: usize) -> Vec<f32> {
    let seed = name.bytes().fold(2_166_136_261_u32, |x, byte| (x ^ u32::from(byte)).wrapping_mul(16_777_619));
    let mut x = seed;
    let offset = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
    (0..n)
        .map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (offset + f64::from(x >> 8) / f64::from(1 << 24) - 0.5) as f32
        })
        .collect()
}

fn golden() -> Value {
    serde_json::from_str(include_str!("testdata/golden.json")).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|x| u32::try_from(x.as_u64().unwrap()).unwrap()).collect()
}

fn spec(config: &Value) -> ModelSpec {
    let size = |key: &str| usize::try_from(config[key].as_u64().unwrap()).unwrap();
    let float = |value: &Value| value.as_f64().unwrap() as f32;
    let flag = |key: &str| config[key].as_bool().unwrap_or(false);
    let scaling = &config["rope_scaling"];
    let scaling = match scaling["rope_type"].as_str() {
        None => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: float(&scaling["factor"]) },
        Some(_) => RopeScaling::Llama3 {
            factor: float(&scaling["factor"]),
            low_freq_factor: float(&scaling["low_freq_factor"]),
            high_freq_factor: float(&scaling["high_freq_factor"]),
            original_max_positions: u32::try_from(
                scaling["original_max_position_embeddings"].as_u64().unwrap(),
            )
            .unwrap(),
        },
    };
    ModelSpec {
        name: "tiny".into(),
        architecture: Architecture::Llama,
        n_layers: size("num_hidden_layers"),
        hidden: size("hidden_size"),
        n_heads: size("num_attention_heads"),
        n_kv_heads: size("num_key_value_heads"),
        head_dim: size("head_dim"),
        intermediate: size("intermediate_size"),
        vocab_size: size("vocab_size"),
        rms_norm_eps: float(&config["rms_norm_eps"]),
        max_positions: size("max_position_embeddings"),
        tie_word_embeddings: flag("tie_word_embeddings"),
        attention_bias: flag("attention_bias"),
        mlp_bias: flag("mlp_bias"),
        rope: RopeSpec { theta: float(&config["rope_theta"]), scaling },
        bos_token_id: None,
        eos_token_ids: vec![],
    }
}

fn tensors(case: &Value) -> Tiny {
    let tensors = case["tensors"].as_object().unwrap().iter().map(|(name, shape)| {
        let shape: Vec<usize> = ids(shape).into_iter().map(|n| n as usize).collect();
        (name.clone(), HostTensor::F32 { data: numbers(name, shape.iter().product()), shape })
    });
    Tiny(tensors.collect())
}

fn load(case: &Value, options: &LoadOptions) -> MlxModel {
    MlxModel::load(&spec(&case["config"]), &tensors(case), options).unwrap()
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    u32::try_from(best.0).unwrap()
}

/// Logits after the last prompt token, then greedy tokens.
fn generate(model: &MlxModel, seq: &mut Sequence, rest: &[u32], n: usize) -> (Vec<f32>, Vec<u32>) {
    let (last, before) = rest.split_last().unwrap();
    if !before.is_empty() {
        model.forward(seq, before, false).unwrap();
    }
    let first = model.forward(seq, &[*last], true).unwrap().unwrap();
    let mut tokens = vec![argmax(&first)];
    while tokens.len() < n {
        tokens.push(argmax(&model.forward(seq, &tokens[tokens.len() - 1..], true).unwrap().unwrap()));
    }
    (first, tokens)
}

fn assert_close(got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance, "element {i}: {g} against {w}");
    }
}

#[test]
fn logits_cache_and_greedy_tokens_equal_mlx_lm() {
    let golden = golden();
    let prompt = ids(&golden["prompt"]);
    for (name, case) in golden["cases"].as_object().unwrap() {
        let model = load(case, &LoadOptions::default());
        // Too little capacity on purpose: the cache must grow.
        let mut seq = model.new_sequence(1);
        model.forward(&mut seq, &prompt[..200], false).unwrap();
        let (logits, tokens) = generate(&model, &mut seq, &prompt[200..], 24);
        assert_close(&logits, &floats(&case["logits"]), 2e-5);
        assert_eq!(tokens, ids(&case["tokens"]), "{name}");

        let block = model.export(&seq, 250, 251).unwrap();
        let keys: Vec<f32> = bytemuck::cast_slice::<u8, [u8; 4]>(&block.layers[1].parts[0])
            .iter()
            .map(|&bytes| f32::from_le_bytes(bytes))
            .collect();
        let want = floats(&case["key_layer1_last_head_token250"]);
        assert_close(&keys[keys.len() - want.len()..], &want, 2e-5);
    }
}

#[test]
fn a_cache_that_left_and_came_back_gives_the_same_bits() {
    let golden = golden();
    let prompt = ids(&golden["prompt"]);
    let case = &golden["cases"]["biased"];
    for cache in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        let model = load(case, &LoadOptions { cache: Some(cache), ..LoadOptions::default() });
        let mut native = model.new_sequence(400);
        model.forward(&mut native, &prompt[..299], false).unwrap();
        let blocks: Vec<BlockBytes> = [(0, 128), (128, 256), (256, 299)]
            .iter()
            .map(|&(a, b)| model.export(&native, a, b).unwrap())
            .collect();
        let mut imported = model.import(&blocks.iter().collect::<Vec<_>>(), 400).unwrap();
        assert_eq!((imported.len(), imported.capacity_tokens()), (299, 512));
        let got = generate(&model, &mut imported, &prompt[299..], 12);
        assert_eq!(got, generate(&model, &mut native, &prompt[299..], 12));

        // Rolled back, the same tokens give the same answer again.
        imported.truncate(299);
        assert_eq!(generate(&model, &mut imported, &prompt[299..], 12), got);
    }
}

#[test]
fn captured_inputs_are_the_first_norm_of_the_embedding() {
    let golden = golden();
    let case = &golden["cases"]["plain"];
    let model = load(case, &LoadOptions::default());
    let (logits, inputs) = model.forward_captured(&mut model.new_sequence(8), &[5, 6, 7]).unwrap();
    let plain = model.forward(&mut model.new_sequence(8), &[5, 6, 7], true).unwrap().unwrap();
    assert_eq!(logits, plain);
    assert_eq!(inputs.iter().map(Vec::len).collect::<Vec<_>>(), [3 * 32, 3 * 32]);

    let table = numbers("model.embed_tokens.weight", 97 * 32);
    let row = &table[6 * 32..7 * 32];
    let norm = (row.iter().map(|x| x * x).sum::<f32>() / 32.0 + 1e-5).sqrt();
    let weight = numbers("model.layers.0.input_layernorm.weight", 32);
    let want: Vec<f32> = row.iter().zip(&weight).map(|(x, w)| x / norm * w).collect();
    assert_close(&inputs[0][32..64], &want, 1e-5);
}

#[test]
fn packed_and_expanded_weights_agree() {
    let golden = golden();
    let case = &golden["cases"]["plain"];
    let mut source = tensors(case);
    for (name, tensor) in &mut source.0 {
        if let [rows, columns] = *tensor.shape() {
            let words = numbers(&format!("{name}/packed"), rows * columns / 8);
            let groups = rows * columns / 16;
            // Groups of 16 do not exist in MLX; the widths here are multiples of 32, except the feed-forward's 48.
            if columns % 32 == 0 {
                let groups = groups / 2;
                *tensor = HostTensor::Affine {
                    shape: vec![rows, columns],
                    bits: 4,
                    group_size: 32,
                    packed: words.iter().map(|w| w.to_bits().wrapping_mul(2_654_435_761)).collect(),
                    scales: FloatVec::F16(vec![f16::from_f32(0.0625); groups]),
                    biases: FloatVec::F16(vec![f16::from_f32(-0.5); groups]),
                };
            }
        }
    }
    let spec = spec(&case["config"]);
    let logits = |quantized| {
        let options = LoadOptions { quantized, ..LoadOptions::default() };
        let model = MlxModel::load(&spec, &source, &options).unwrap();
        model.forward(&mut model.new_sequence(8), &[5, 6, 7], true).unwrap().unwrap()
    };
    assert_close(&logits(Quantized::Always), &logits(Quantized::Never), 1e-4);
}

#[test]
fn wrong_input_is_refused() {
    let golden = golden();
    let case = &golden["cases"]["plain"];
    let model = load(case, &LoadOptions::default());
    let mut seq = model.new_sequence(8);
    assert!(matches!(model.forward(&mut seq, &[], true), Err(MlxError::Empty(_))));
    assert!(matches!(model.forward(&mut seq, &[97], true), Err(MlxError::Token { token: 97, .. })));
    model.forward(&mut seq, &[1, 2, 3], false).unwrap();
    assert!(matches!(model.export(&seq, 1, 4), Err(MlxError::Range { len: 3, .. })));
    assert!(matches!(model.export(&seq, 2, 2), Err(MlxError::Range { .. })));
    assert!(matches!(model.import(&[], 8), Err(MlxError::Empty(_))));

    let mut block = model.export(&seq, 0, 3).unwrap();
    block.tokens = 2;
    assert!(matches!(model.import(&[&block], 8), Err(MlxError::Block { block: 0, .. })));

    let mut source = tensors(case);
    source.0.remove("model.layers.1.mlp.up_proj.weight");
    let missing = MlxModel::load(&spec(&case["config"]), &source, &LoadOptions::default());
    assert!(missing.unwrap_err().to_string().contains("model.layers.1.mlp.up_proj.weight"));
}
