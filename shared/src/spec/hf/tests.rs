//! Tests of the `config.json` parser.

use super::*;
use serde_json::json;

fn config() -> Value {
    json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 300,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "hidden_act": "silu",
        "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2})
}

fn with(key: &str, value: Value) -> Result<ModelSpec, SpecError> {
    let mut config = config();
    config[key] = value;
    from_hf("test", &config, None, true)
}

#[test]
fn a_plain_llama_is_read() {
    let spec = from_hf("test", &config(), None, true).unwrap();
    assert_eq!((spec.n_layers, spec.head_dim, spec.n_kv_heads), (2, 16, 2));
    assert_eq!(spec.rope, RopeSpec { theta: 1e4, scaling: RopeScaling::None });
    assert_eq!((spec.bos_token_id, spec.eos_token_ids), (Some(1), vec![2]));
}

#[test]
fn head_dim_may_be_explicit() {
    assert_eq!(with("head_dim", json!(32)).unwrap().head_dim, 32);
    assert_eq!(with("head_dim", Value::Null).unwrap().head_dim, 16);
}

#[test]
fn the_weights_decide_what_an_absent_tie_means() {
    let mut config = config();
    config.as_object_mut().unwrap().remove("tie_word_embeddings");
    assert!(from_hf("test", &config, None, false).unwrap().tie_word_embeddings);
    assert!(!from_hf("test", &config, None, true).unwrap().tie_word_embeddings);
}

#[test]
fn rope_scaling_has_old_and_new_spellings() {
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    let entry = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    assert_eq!(with("rope_scaling", entry.clone()).unwrap().rope.scaling, llama3);
    let mut parameters = entry;
    parameters["rope_theta"] = json!(500000.0);
    let rope = with("rope_parameters", parameters).unwrap().rope;
    assert_eq!(rope, RopeSpec { theta: 5e5, scaling: llama3 });
    let linear = with("rope_scaling", json!({"type": "linear", "factor": 2})).unwrap();
    assert_eq!(linear.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    let plain = with("rope_parameters", json!({"rope_type": "default", "rope_theta": 100000.0})).unwrap();
    assert_eq!(plain.rope, RopeSpec { theta: 1e5, scaling: RopeScaling::None });
}

#[test]
fn end_tokens_of_both_files_count() {
    let mut config = config();
    config["eos_token_id"] = json!([5, 6]);
    let generation = json!({"eos_token_id": [6, 7]});
    let spec = from_hf("test", &config, Some(&generation), true).unwrap();
    assert_eq!(spec.eos_token_ids, [6, 7, 5]);
}

#[test]
fn what_is_not_supported_is_named() {
    for (key, value, named) in [
        ("model_type", json!("mistral"), "mistral"),
        ("architectures", json!(["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor"),
        ("num_key_value_heads", json!(3), "num_key_value_heads"),
        ("num_attention_heads", json!(0), "num_attention_heads"),
        ("hidden_size", json!(-1), "hidden_size"),
        ("hidden_size", Value::Null, "hidden_size"),
        ("vocab_size", json!(u64::MAX), "vocab_size"),
        ("eos_token_id", json!("x"), "eos_token_id"),
        ("rms_norm_eps", json!(0.0), "rms_norm_eps"),
        ("rope_scaling", json!({"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
    ] {
        let error = with(key, value).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}
