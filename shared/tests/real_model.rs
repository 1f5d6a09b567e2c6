//! The real model against what transformers and MLX make of it: see `golden/generate.py`.
//!
//! Needs SmolLM2-135M-Instruct as `make setup` leaves it in `.cache/models`, or wherever `PD_BRIDGE_TEST_MODEL` says.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

use serde::Deserialize;
use serde_json::{Map, Value};
use shared::model::Model;
use shared::template::ChatTemplate;
use shared::weights::{FloatVec, HostTensor, TensorFormat};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

#[derive(Deserialize)]
struct Golden {
    texts: Vec<Text>,
    chats: Vec<Chat>,
    weights: Vec<Weight>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    decoded: String,
    decoded_with_special: String,
}

#[derive(Deserialize)]
struct Chat {
    messages: Value,
    add_generation_prompt: bool,
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Weight {
    name: String,
    bits: u8,
    packed: Option<String>,
    scales: Option<String>,
    biases: Option<String>,
    f32: String,
}

fn golden<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| Model::open(&model_path()).unwrap())
}

fn model_path() -> PathBuf {
    if let Some(path) = std::env::var_os("PD_BRIDGE_TEST_MODEL") {
        return path.into();
    }
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models");
    std::fs::read_dir(&dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "gguf"))
        .unwrap_or_else(|| {
            panic!("no model in {}: run `make setup` or set PD_BRIDGE_TEST_MODEL", dir.display())
        })
}

#[test]
fn the_specification_is_smollm2s() {
    let spec = &model().spec;
    assert_eq!((spec.n_layers, spec.hidden, spec.n_heads, spec.n_kv_heads), (30, 576, 9, 3));
    assert_eq!((spec.head_dim, spec.intermediate, spec.vocab_size), (64, 1536, 49152));
    assert_eq!((spec.max_positions, spec.rope.theta, spec.rms_norm_eps), (8192, 1e5, 1e-5));
    assert!(spec.tie_word_embeddings && !spec.attention_bias && !spec.mlp_bias);
    assert_eq!((spec.bos_token_id, spec.eos_token_ids.as_slice()), (Some(1), &[2][..]));
    assert_eq!(model().source.names().len(), 272);
}

#[test]
fn texts_become_the_ids_of_transformers() {
    let tokenizer = &model().tokenizer;
    for case in golden::<Golden>("smollm2.json").texts {
        assert_eq!(tokenizer.encode(&case.text, true).unwrap(), case.ids, "{:?}", case.text);
        assert_eq!(tokenizer.decode(&case.ids).unwrap(), case.decoded);
        assert_eq!(tokenizer.decode_with_special(&case.ids).unwrap(), case.decoded_with_special);
    }
    assert_eq!(tokenizer.vocab_size(), 49152);
}

#[test]
fn pieces_add_up_to_the_whole_text() {
    let tokenizer = &model().tokenizer;
    let mut all = Vec::new();
    for case in golden::<Golden>("smollm2.json").texts {
        assert_eq!(streamed(&case.ids), case.decoded);
        all.extend(case.ids);
    }
    assert_eq!(streamed(&all), tokenizer.decode(&all).unwrap());
    // Ids in an order no text would give, so that characters break everywhere.
    let scattered: Vec<u32> = (0..6000u32).map(|i| i.wrapping_mul(2_654_435_761) % 49200).collect();
    for ids in scattered.chunks(7).chain([scattered.as_slice()]) {
        assert_eq!(streamed(ids), tokenizer.decode(ids).unwrap());
    }
}

fn streamed(ids: &[u32]) -> String {
    let mut detokenizer = model().tokenizer.detokenizer();
    let mut text: String = ids.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
    text.push_str(&detokenizer.finish().unwrap());
    text
}

#[test]
fn conversations_become_the_prompts_of_transformers() {
    let template = model().template.as_ref().unwrap();
    for case in golden::<Golden>("smollm2.json").chats {
        let text = template.render(&case.messages, None, case.add_generation_prompt, &Map::new()).unwrap();
        assert_eq!(text, case.text);
        assert_eq!(model().tokenizer.encode(&text, false).unwrap(), case.ids);
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let golden: Value = golden("templates.json");
    let special = golden["special_tokens"].as_object().unwrap();
    for case in golden["rendered"].as_array().unwrap() {
        let template = ChatTemplate::from_text(case["template"].as_str().unwrap(), special.clone()).unwrap();
        let tools = case.get("tools").filter(|t| !t.is_null());
        let text = template.render(&case["messages"], tools, true, &Map::new()).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap(), "{}: {}", case["name"], case["messages"]);
    }
}

#[test]
fn weights_are_packed_as_mlx_packs_them() {
    for case in golden::<Golden>("smollm2.json").weights {
        let tensor = model().source.load(&case.name).unwrap();
        assert_eq!(digest(tensor.to_f32().iter().flat_map(|x| x.to_le_bytes())), case.f32, "{}", case.name);
        if let HostTensor::Affine { bits, packed, scales, biases, .. } = &tensor {
            assert_eq!(*bits, case.bits);
            assert_eq!(
                Some(digest(packed.iter().flat_map(|x| x.to_le_bytes()))),
                case.packed,
                "{}",
                case.name
            );
            assert_eq!(Some(digest(half_bytes(scales))), case.scales, "{}", case.name);
            assert_eq!(Some(digest(half_bytes(biases))), case.biases, "{}", case.name);
        } else {
            assert_eq!((case.bits, tensor.format()), (32, TensorFormat::F32));
        }
    }
}

#[test]
fn mlx_quantized_matrices_dequantize_exactly() {
    let golden: Value = golden("mlx_affine.json");
    for case in golden["cases"].as_array().unwrap() {
        let numbers = |key: &str| case[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap());
        let tensor = HostTensor::Affine {
            shape: numbers("shape").map(|x| x as usize).collect(),
            bits: case["bits"].as_u64().unwrap() as u8,
            group_size: case["group_size"].as_u64().unwrap() as u32,
            packed: numbers("packed").map(|x| x as u32).collect(),
            scales: FloatVec::F32(numbers("scales").map(|x| x as f32).collect()),
            biases: FloatVec::F32(numbers("biases").map(|x| x as f32).collect()),
        };
        assert_eq!(
            digest(tensor.to_f32().iter().flat_map(|x| x.to_le_bytes())),
            case["f32"].as_str().unwrap()
        );
    }
}

fn half_bytes(values: &FloatVec) -> Vec<u8> {
    match values {
        FloatVec::F16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        other => panic!("expected halves, found {other:?}"),
    }
}

fn digest(bytes: impl IntoIterator<Item = u8>) -> String {
    blake3::hash(&bytes.into_iter().collect::<Vec<u8>>()).to_hex().to_string()
}
