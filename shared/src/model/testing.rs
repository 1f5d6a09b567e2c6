//! Tiny random models for tests: complete directories that every part of this project can open.

mod gguf;

use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::io;
use std::path::Path;

/// Control tokens of the tiny tokenizer, ids 0 to 2. After them comes one token per byte, in the order of GPT-2's byte
/// alphabet, so `vocab_size` must be at least [`TinyModel::MIN_VOCAB`].
const CONTROL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\n' }}{% endif %}";

/// Precision of the written weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TinyWeights {
    /// safetensors F32.
    F32,
    /// safetensors F16.
    F16,
    /// safetensors BF16.
    BF16,
    /// MLX affine quantization of every matrix, scales and biases in F16.
    Affine {
        /// 4 or 8.
        bits: u8,
        /// Divides `hidden`, `intermediate` and `n_heads · head_dim`.
        group_size: u32,
    },
}

/// A tiny llama. The weights follow from the seed alone, so two precisions of one seed are the same model.
#[derive(Clone, Debug)]
pub struct TinyModel {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Feed-forward width.
    pub intermediate: usize,
    /// Embedding rows, at least [`Self::MIN_VOCAB`].
    pub vocab_size: usize,
    /// Longest sequence in tokens.
    pub max_positions: usize,
    /// Use the embedding as the head.
    pub tie_word_embeddings: bool,
    /// Biases on the attention projections.
    pub attention_bias: bool,
    /// Biases on the feed-forward projections.
    pub mlp_bias: bool,
    /// `rope_scaling` of `config.json`; null for none.
    pub rope_scaling: Value,
    /// Stored precision.
    pub weights: TinyWeights,
    /// Chooses the weights.
    pub seed: u64,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            hidden: 64,
            n_layers: 2,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 16,
            intermediate: 128,
            vocab_size: 320,
            max_positions: 2048,
            tie_word_embeddings: true,
            attention_bias: false,
            mlp_bias: false,
            rope_scaling: Value::Null,
            weights: TinyWeights::F32,
            seed: 0,
        }
    }
}

impl TinyModel {
    /// Tokens of the tiny tokenizer.
    pub const MIN_VOCAB: usize = 256 + CONTROL.len();

    /// Write `config.json`, `model.safetensors`, `tokenizer.json` and `tokenizer_config.json` into a directory, which
    /// is created.
    ///
    /// # Errors
    /// Whatever the file system refuses.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let json = |name: &str, value: &Value| std::fs::write(dir.join(name), format!("{value:#}\n"));
        json("config.json", &self.config())?;
        json("tokenizer.json", &tokenizer())?;
        json(
            "tokenizer_config.json",
            &json!({"bos_token": CONTROL[1], "eos_token": CONTROL[2], "chat_template": CHAT_TEMPLATE}),
        )?;
        std::fs::write(dir.join("model.safetensors"), safetensors(&self.stored()))
    }

    /// The model's tensors in f32, before they are rounded to [`Self::weights`], under canonical names.
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        let (hidden, inner) = (self.hidden, self.intermediate);
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let mut shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden]),
            ("model.norm.weight".to_owned(), vec![hidden]),
        ];
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden]));
        }
        for layer in 0..self.n_layers {
            let at = format!("model.layers.{layer}");
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                shapes.push((format!("{at}.{norm}.weight"), vec![hidden]));
            }
            for (module, rows, columns, bias) in [
                ("self_attn.q_proj", q, hidden, self.attention_bias),
                ("self_attn.k_proj", kv, hidden, self.attention_bias),
                ("self_attn.v_proj", kv, hidden, self.attention_bias),
                ("self_attn.o_proj", hidden, q, self.attention_bias),
                ("mlp.gate_proj", inner, hidden, self.mlp_bias),
                ("mlp.up_proj", inner, hidden, self.mlp_bias),
                ("mlp.down_proj", hidden, inner, self.mlp_bias),
            ] {
                shapes.push((format!("{at}.{module}.weight"), vec![rows, columns]));
                if bias {
                    shapes.push((format!("{at}.{module}.bias"), vec![rows]));
                }
            }
        }
        shapes.into_iter().map(|(name, shape)| self.fill(name, shape)).collect()
    }

    /// Matrices of unit gain, norms near one, small biases.
    fn fill(&self, name: String, shape: Vec<usize>) -> (String, Vec<usize>, Vec<f32>) {
        let mut state =
            name.bytes().fold(self.seed ^ 0x9E37_79B9_7F4A_7C15, |s, b| split_mix(s ^ u64::from(b)).1);
        let (middle, spread) = match (shape.len(), name.ends_with(".bias")) {
            (2, _) if name.contains("embed") => (0.0, 1.0),
            (2, _) => (0.0, (3.0 / shape[1] as f32).sqrt()),
            (_, true) => (0.0, 0.2),
            _ => (1.0, 0.2),
        };
        let data = (0..shape.iter().product())
            .map(|_| {
                let (next, bits) = split_mix(state);
                state = next;
                middle + spread * ((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
            })
            .collect();
        (name, shape, data)
    }

    fn config(&self) -> Value {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "hidden_size": self.hidden, "num_hidden_layers": self.n_layers, "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.intermediate, "vocab_size": self.vocab_size, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "rope_scaling": self.rope_scaling,
            "max_position_embeddings": self.max_positions, "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias, "bos_token_id": 1, "eos_token_id": 2,
        });
        if let TinyWeights::Affine { bits, group_size } = self.weights {
            config["quantization"] = json!({"bits": bits, "group_size": group_size});
        }
        config
    }

    fn stored(&self) -> Vec<Stored> {
        self.tensors()
            .into_iter()
            .flat_map(|(name, shape, data)| match self.weights {
                TinyWeights::F32 => vec![Stored::f32(name, shape, &data)],
                TinyWeights::F16 => vec![Stored::f16(name, shape, &data)],
                TinyWeights::BF16 => vec![Stored::bf16(name, shape, &data)],
                TinyWeights::Affine { bits, group_size } if shape.len() == 2 => {
                    quantize(&name, &shape, &data, u32::from(bits), group_size as usize)
                }
                TinyWeights::Affine { .. } => vec![Stored::f16(name, shape, &data)],
            })
            .collect()
    }
}

struct Stored {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn f32(name: String, shape: Vec<usize>, data: &[f32]) -> Self {
        Self { name, dtype: "F32", shape, bytes: data.iter().flat_map(|x| x.to_le_bytes()).collect() }
    }

    fn f16(name: String, shape: Vec<usize>, data: &[f32]) -> Self {
        let bytes = data.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        Self { name, dtype: "F16", shape, bytes }
    }

    fn bf16(name: String, shape: Vec<usize>, data: &[f32]) -> Self {
        let bytes = data.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        Self { name, dtype: "BF16", shape, bytes }
    }
}

/// Round each group to integers between its least and its greatest element.
fn quantize(name: &str, shape: &[usize], data: &[f32], bits: u32, group_size: usize) -> Vec<Stored> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let steps = ((1u32 << bits) - 1) as f32;
    let (mut words, mut scales, mut biases) = (Vec::new(), Vec::new(), Vec::new());
    for group in data.chunks(group_size) {
        let least = group.iter().copied().fold(f32::INFINITY, f32::min);
        let most = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = f16::from_f32((most - least) / steps).to_f32();
        let bias = f16::from_f32(least).to_f32();
        for word in group.chunks(32 / bits as usize) {
            let quantum = |x: f32| ((x - bias) / scale).round().clamp(0.0, steps) as u32;
            words.push(word.iter().rev().fold(0u32, |w, x| (w << bits) | quantum(*x)));
        }
        scales.push(scale);
        biases.push(bias);
    }
    let per_row = |n: usize| vec![shape[0], n / shape[0]];
    vec![
        Stored {
            name: name.to_owned(),
            dtype: "U32",
            shape: per_row(words.len()),
            bytes: words.iter().flat_map(|w| w.to_le_bytes()).collect(),
        },
        Stored::f16(format!("{module}.scales"), per_row(scales.len()), &scales),
        Stored::f16(format!("{module}.biases"), per_row(biases.len()), &biases),
    ]
}

fn safetensors(tensors: &[Stored]) -> Vec<u8> {
    let mut header = Map::new();
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes.len();
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]});
        header.insert(tensor.name.clone(), entry);
        at = end;
    }
    let mut header = Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    tensors.iter().for_each(|t| file.extend_from_slice(&t.bytes));
    file
}

/// Byte-level BPE without merges: every byte is a token.
fn tokenizer() -> Value {
    let printable = |b: u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let moved = (0u32..).map(|i| i + 0x100).take((0..=255).filter(|b| !printable(*b)).count());
    let alphabet =
        (0..=255).filter(|b| printable(*b)).chain(moved).filter_map(char::from_u32).map(String::from);
    let names: Vec<String> = CONTROL.iter().map(|s| (*s).to_owned()).chain(alphabet).collect();
    let vocab: Map<String, Value> = names.into_iter().zip((0u32..).map(Value::from)).collect();
    let added: Vec<Value> = CONTROL
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false,
                   "lstrip": false, "rstrip": false})
        })
        .collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": []},
    })
}

/// Steele, Lea and Flood's SplitMix64: the next state and its output.
fn split_mix(state: u64) -> (u64, u64) {
    let next = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (next ^ (next >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (next, z ^ (z >> 31))
}
