//! A tiny llama with random weights: real enough for every protocol test, and a prompt costs milliseconds.

use rand::{RngExt as _, SeedableRng as _};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Layers of the model.
pub const LAYERS: usize = 4;
/// Longest prompt plus answer.
pub const MAX_TOKENS: usize = 8192;
const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 128;
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const TEMPLATE: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}\
                        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// What differs between the tiny models.
#[derive(Debug, Clone, Copy)]
pub struct Attention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// 1 KiB of f32 cache per token.
pub const NARROW: Attention = Attention { heads: 4, kv_heads: 2, head_dim: 16 };
/// 16 KiB of f32 cache per token: transfers that do not fit into one credit.
pub const WIDE: Attention = Attention { heads: 8, kv_heads: 8, head_dim: 64 };

/// Directory of the model, written once per process and removed with it. One token per byte of plain text.
#[must_use]
pub fn model() -> &'static Path {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("tiny"), NARROW, 7);
        dir
    });
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| DIR.get().unwrap().path().join("tiny"))
}

/// Ids of plain text in the tiny model: three specials, then every byte in the order of [`byte_tokens`].
#[must_use]
pub fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(|b| u32::from(b) + SPECIAL.len() as u32).collect()
}

/// The text of ids in the tiny model, special tokens left out.
#[must_use]
pub fn text(ids: &[u32]) -> String {
    let byte = |id: &u32| id.checked_sub(SPECIAL.len() as u32).map(|b| u8::try_from(b).unwrap());
    String::from_utf8(ids.iter().filter_map(byte).collect()).unwrap()
}

/// Writes a model directory; the seed decides its weights.
pub fn write(dir: &Path, attention: Attention, seed: u64) {
    std::fs::create_dir_all(dir).unwrap();
    let vocab: Vec<String> = SPECIAL.iter().map(|s| (*s).to_owned()).chain(byte_tokens()).collect();
    let save = |name: &str, value: &Value| std::fs::write(dir.join(name), value.to_string()).unwrap();
    save("config.json", &config(vocab.len(), attention));
    save("tokenizer.json", &tokenizer(&vocab));
    save(
        "tokenizer_config.json",
        &json!({"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}),
    );
    write_weights(&dir.join("model.safetensors"), vocab.len(), attention, seed);
}

fn config(vocab: usize, attention: Attention) -> Value {
    let Attention { heads, kv_heads, head_dim } = attention;
    json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
           "num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
           "head_dim": head_dim, "intermediate_size": INTERMEDIATE, "vocab_size": vocab, "rms_norm_eps": 1e-5,
           "max_position_embeddings": MAX_TOKENS, "rope_theta": 10000.0, "tie_word_embeddings": true,
           "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"})
}

fn tokenizer(vocab: &[String]) -> Value {
    let ids: Map<String, Value> = vocab.iter().enumerate().map(|(i, t)| (t.clone(), i.into())).collect();
    let added: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false,
                   "lstrip": false, "rstrip": false})
        })
        .collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
           "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
           "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                     "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                     "vocab": ids, "merges": []}})
}

/// GPT-2's printable stand-ins for the 256 byte values.
fn byte_tokens() -> impl Iterator<Item = String> {
    let printable = |b: u32| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256;
    (0..256u32).map(move |b| {
        let c = if printable(b) {
            b
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(c).unwrap().to_string()
    })
}

fn write_weights(file: &Path, vocab: usize, attention: Attention, seed: u64) {
    let Attention { heads, kv_heads, head_dim } = attention;
    let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![vocab, HIDDEN])];
    for i in 0..LAYERS {
        for (name, rows, columns) in [
            ("self_attn.q_proj", heads * head_dim, HIDDEN),
            ("self_attn.k_proj", kv_heads * head_dim, HIDDEN),
            ("self_attn.v_proj", kv_heads * head_dim, HIDDEN),
            ("self_attn.o_proj", HIDDEN, heads * head_dim),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ] {
            shapes.push((format!("model.layers.{i}.{name}.weight"), vec![rows, columns]));
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            shapes.push((format!("model.layers.{i}.{name}.weight"), vec![HIDDEN]));
        }
    }
    shapes.push(("model.norm.weight".to_owned(), vec![HIDDEN]));
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let n = shape.iter().product::<usize>();
            let scale = if name.contains("embed") { 1.0 } else { 1.7 / (HIDDEN as f32).sqrt() };
            let value = |x: f32| if shape.len() == 1 { 1.0 + 0.1 * x } else { scale * x };
            let bytes = (0..n).flat_map(|_| value(rng.random_range(-1.0..1.0f32)).to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, file).unwrap();
}
