//! Tests of opening models.

use super::testing::{TinyModel, TinyWeights};
use super::*;
use crate::weights::{TensorFormat, kv_projection_digest};
use proptest::prelude::*;
use serde_json::{Map, json};
use std::fs;

fn written(tiny: &TinyModel) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    tiny.write(dir.path()).unwrap();
    dir
}

fn separate_head() -> TinyModel {
    TinyModel {
        tie_word_embeddings: false,
        attention_bias: true,
        mlp_bias: true,
        seed: 7,
        ..TinyModel::default()
    }
}

fn refusal(dir: &Path) -> String {
    Model::open(dir).err().map(|e| e.to_string()).unwrap_or_default()
}

/// Rewrite the safetensors header.
fn edit_header(dir: &Path, edit: impl Fn(&mut Map<String, Value>)) {
    let path = dir.join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: Map<String, Value> = serde_json::from_slice(&file[8..8 + n]).unwrap();
    edit(&mut header);
    let text = Value::Object(header).to_string();
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.bytes());
    out.extend(&file[8 + n..]);
    fs::write(path, out).unwrap();
}

#[test]
fn every_precision_opens_and_loads() {
    for weights in [
        TinyWeights::F32,
        TinyWeights::F16,
        TinyWeights::BF16,
        TinyWeights::Affine { bits: 4, group_size: 32 },
        TinyWeights::Affine { bits: 8, group_size: 64 },
    ] {
        let tiny = TinyModel { weights, ..separate_head() };
        let dir = written(&tiny);
        let model = Model::open(dir.path()).unwrap();
        let worst = match weights {
            TinyWeights::F32 => 0.0,
            TinyWeights::F16 | TinyWeights::BF16 => 0.005,
            TinyWeights::Affine { bits, .. } => 2.1 / (f32::from(bits) - 3.0).exp2() / 8.0,
        };
        for (name, shape, data) in tiny.tensors() {
            let loaded = model.source.load(&name).unwrap();
            assert_eq!(loaded.shape(), shape);
            assert_eq!(Some(loaded.format()), model.source.info(&name).map(|i| i.format));
            let got = loaded.to_f32();
            assert_eq!(got.len(), data.len());
            let difference = got.iter().zip(&data).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(difference <= worst, "{weights:?} {name} {difference}");
        }
        let ids = model.tokenizer.encode("<|im_start|>é 1", false).unwrap();
        assert_eq!(ids.len(), 5);
        assert_eq!(model.tokenizer.decode(&ids).unwrap(), "é 1");
        assert!(model.template.is_some());
    }
}

#[test]
fn a_gguf_file_is_the_same_model_as_its_directory() {
    for tiny in [separate_head(), TinyModel::default()] {
        let dir = written(&tiny);
        let path = dir.path().join("tiny.gguf");
        tiny.write_gguf(&path).unwrap();
        let (hf, gguf) = (Model::open(dir.path()).unwrap(), Model::open(&path).unwrap());
        assert_eq!(gguf.spec, ModelSpec { name: "tiny".into(), ..hf.spec.clone() });
        assert_eq!(gguf.source.names(), hf.source.names());
        for name in hf.source.names() {
            assert_eq!(gguf.source.load(&name).unwrap(), hf.source.load(&name).unwrap(), "{name}");
        }
        for layer in 0..2 {
            let digest = |m: &Model| kv_projection_digest(m.source.as_ref(), layer).unwrap();
            assert_eq!(digest(&gguf), digest(&hf));
        }
        assert_eq!(gguf.digests().config, hf.digests().config);
        assert_eq!(gguf.digests().index, hf.digests().index);
        assert_eq!(
            gguf.tokenizer.encode("a b\n12", true).unwrap(),
            hf.tokenizer.encode("a b\n12", true).unwrap()
        );
    }
}

#[test]
fn digests_tell_models_apart() {
    let open = |tiny: &TinyModel| Model::open(written(tiny).path()).unwrap();
    let base = open(&TinyModel::default());
    assert_eq!(open(&TinyModel::default()).digests(), base.digests());
    let seeded = open(&TinyModel { seed: 1, ..TinyModel::default() });
    let digest = |m: &Model, layer| kv_projection_digest(m.source.as_ref(), layer).unwrap();
    assert_ne!(digest(&seeded, 0), digest(&base, 0));
    assert_ne!(digest(&base, 0), digest(&base, 1));
    let half = open(&TinyModel { weights: TinyWeights::F16, ..TinyModel::default() });
    assert_eq!(half.digests().config, base.digests().config);
    assert_ne!(half.digests().index, base.digests().index);
    let longer = open(&TinyModel { max_positions: 4096, ..TinyModel::default() });
    assert_ne!(longer.digests().config, base.digests().config);
    assert!(kv_projection_digest(base.source.as_ref(), 2).is_err());
}

#[test]
fn faulty_tensors_are_refused_by_name() {
    let victim = "model.layers.1.mlp.up_proj.weight";
    type Edit = fn(&mut Map<String, Value>, &str);
    let edits: [(Edit, &str); 7] = [
        (
            |h, v| drop(h.insert("model.layers.2.input_layernorm.weight".into(), h[v].clone())),
            "layers.2.input_layernorm",
        ),
        (
            |h, v| {
                let entry = h.shift_remove(v).unwrap();
                h.insert("model.layers.1.mlp.gain".into(), entry);
            },
            victim,
        ),
        (|h, v| h[v]["dtype"] = json!("F64"), victim),
        (|h, v| h[v]["shape"] = json!([64, 128]), victim),
        (|h, v| h[v]["shape"] = json!([u64::MAX, u64::MAX]), victim),
        (|h, v| h[v]["data_offsets"] = json!([0, u64::MAX]), victim),
        (|h, v| h[v]["dtype"] = json!("F4_NEW"), victim),
    ];
    for (number, (edit, named)) in edits.into_iter().enumerate() {
        let dir = written(&TinyModel::default());
        edit_header(dir.path(), |header| edit(header, victim));
        let refusal = refusal(dir.path());
        assert!(refusal.contains(named), "{number}: {refusal}");
    }
}

#[test]
fn an_unknown_tensor_is_refused_and_a_derived_one_is_not() {
    let dir = written(&TinyModel::default());
    let path = dir.path().join("model.safetensors");
    let original = fs::read(&path).unwrap();
    let append = |name: &str| {
        let mut grown = original.clone();
        grown.extend([0; 8]);
        fs::write(&path, grown).unwrap();
        edit_header(dir.path(), |header| {
            let end = header.values().map(|t| t["data_offsets"][1].as_u64().unwrap()).max().unwrap();
            let entry = json!({"dtype": "F32", "shape": [2], "data_offsets": [end, end + 8]});
            header.insert(name.to_owned(), entry);
        });
        refusal(dir.path())
    };
    assert!(append("model.layers.0.self_attn.q_norm.weight").contains("q_norm"));
    assert!(append("vision.weight").contains("vision.weight"));
    assert_eq!(append("model.layers.0.self_attn.rotary_emb.inv_freq"), "");
    assert_eq!(append("lm_head.weight"), "");
}

#[test]
fn a_short_file_is_refused_by_tensor() {
    let dir = written(&TinyModel::default());
    let path = dir.path().join("model.safetensors");
    let file = fs::read(&path).unwrap();
    fs::write(&path, &file[..file.len() - 4]).unwrap();
    assert!(refusal(dir.path()).contains("is short"));
    let path = dir.path().join("tiny.gguf");
    let file = TinyModel::default().gguf_bytes();
    fs::write(&path, &file[..file.len() - 64]).unwrap();
    let refusal = refusal(&path);
    assert!(
        refusal.contains("tensor model.")
            || refusal.contains("tensor blk.")
            || refusal.contains("tensor output")
    );
    assert!(refusal.contains("is short"), "{refusal}");
}

#[test]
fn sharded_directories_open() {
    let dir = written(&TinyModel::default());
    let single = Model::open(dir.path()).unwrap();
    fs::rename(dir.path().join("model.safetensors"), dir.path().join("model-1.safetensors")).unwrap();
    let index = |file: &str, extra: Option<&str>| {
        let names = single.source.names().into_iter().chain(extra.map(str::to_owned));
        let map: Map<String, Value> = names.map(|n| (n, Value::from(file))).collect();
        fs::write(dir.path().join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())
            .unwrap();
    };
    index("model-1.safetensors", None);
    assert_eq!(Model::open(dir.path()).unwrap().digests(), single.digests());
    index("model-1.safetensors", Some("model.layers.9.mlp.up_proj.weight"));
    assert!(refusal(dir.path()).contains("model.layers.9.mlp.up_proj.weight is missing"));
    index("../model-1.safetensors", None);
    assert!(refusal(dir.path()).contains("is not the name of a file"));
    index("other.safetensors", None);
    assert!(refusal(dir.path()).contains("other.safetensors"));
}

#[test]
fn quantization_must_agree_with_the_tensors() {
    let tiny = TinyModel { weights: TinyWeights::Affine { bits: 4, group_size: 32 }, ..TinyModel::default() };
    let dir = written(&tiny);
    let model = Model::open(dir.path()).unwrap();
    let info = model.source.info("model.layers.0.mlp.down_proj.weight").unwrap();
    assert_eq!(info.format, TensorFormat::Affine { bits: 4, group_size: 32 });
    let path = dir.path().join("config.json");
    let config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (quantization, named) in [
        (json!({"bits": 4, "group_size": 64}), "groups of 64"),
        (json!({"bits": 8, "group_size": 32}), "32 columns"),
        (json!({"bits": 4, "group_size": 32, "model.layers.1.mlp.up_proj": false}), "layers.1.mlp.up_proj"),
        (Value::Null, "packed integers"),
    ] {
        let mut config = config.clone();
        config["quantization"] = quantization;
        fs::write(&path, config.to_string()).unwrap();
        let refusal = refusal(dir.path());
        assert!(refusal.contains(named), "{refusal}");
    }
}

#[test]
fn what_is_no_model_is_said_to_be_none() {
    let dir = tempfile::tempdir().unwrap();
    assert!(refusal(dir.path()).contains("neither"));
    assert!(refusal(&dir.path().join("absent")).contains("absent"));
    fs::write(dir.path().join("x.gguf"), b"GGML rest of the file").unwrap();
    assert!(refusal(&dir.path().join("x.gguf")).contains("not a GGUF file"));
    fs::write(dir.path().join("config.json"), "{").unwrap();
    assert!(refusal(dir.path()).contains("config.json"));
}

/// Small, so that most random changes hit the header.
fn fuzz_model() -> TinyModel {
    TinyModel {
        hidden: 8,
        n_layers: 1,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 4,
        intermediate: 8,
        ..TinyModel::default()
    }
}

/// Open a damaged model; whatever happens must be an error or a model that loads.
fn survive(path: &Path) {
    if let Ok(model) = Model::open(path) {
        for name in model.source.names() {
            let _ = model.source.load(&name).map(|t| t.to_f32());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn damaged_gguf_files_never_panic(
        cut in prop::option::of(0.0f64..1.0),
        flips in prop::collection::vec((0.0f64..1.0, any::<u8>()), 0..6),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.gguf");
        fs::write(&path, damaged(fuzz_model().gguf_bytes(), cut, &flips)).unwrap();
        survive(&path);
    }

    #[test]
    fn damaged_directories_never_panic(
        file in prop::sample::select(vec!["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]),
        cut in prop::option::of(0.0f64..1.0),
        flips in prop::collection::vec((0.0f64..1.0, any::<u8>()), 0..6),
    ) {
        let dir = written(&fuzz_model());
        let path = dir.path().join(file);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, damaged(bytes, cut, &flips)).unwrap();
        survive(dir.path());
    }
}

/// Flip bits, more likely early in the file, and cut the end off.
fn damaged(mut bytes: Vec<u8>, cut: Option<f64>, flips: &[(f64, u8)]) -> Vec<u8> {
    for (place, mask) in flips {
        let at = (place * place * bytes.len() as f64) as usize;
        bytes[at] ^= mask;
    }
    if let Some(cut) = cut {
        bytes.truncate((cut * cut * bytes.len() as f64) as usize);
    }
    bytes
}
