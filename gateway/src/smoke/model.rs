//! A model directory without weights: one token per byte.

use serde_json::{Map, Value, json};

/// Ids 0..=255 are bytes in GPT-2's alphabet order of code points; 256 ends an answer.
pub(super) fn byte_level() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
    let config = json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
        "vocab_size": 257, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048,
        "hidden_act": "silu", "tie_word_embeddings": true, "bos_token_id": null, "eos_token_id": 256});
    write("config.json", config.to_string());
    let vocab: Map<String, Value> = (0u32..256).map(|b| (alphabet(b as u8).to_string(), b.into())).collect();
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "post_processor": null,
        "added_tokens": [{"id": 256, "content": "<|end|>", "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    write("tokenizer.json", tokenizer.to_string());
    let template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}";
    write("tokenizer_config.json", json!({"chat_template": template}).to_string());
    dir
}

/// GPT-2's character for a byte.
fn alphabet(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u32::from(byte),
        0..=0x20 => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x121 + u32::from(byte) - 0x7F,
        0xAD => 0x143,
    };
    char::from_u32(code).unwrap()
}
