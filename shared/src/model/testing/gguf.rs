//! The tiny model as a GGUF file.

use super::{CHAT_TEMPLATE, TinyModel, tokenizer};
use serde_json::Value;
use std::io;
use std::path::Path;

const ALIGNMENT: usize = 32;
const F32: u32 = 0;

/// Types of metadata values, as numbered in the format.
enum Meta<'a> {
    U32(u32),
    F32(f32),
    Str(&'a str),
    Strs(Vec<String>),
    I32s(Vec<i32>),
}

impl TinyModel {
    /// Write the model as one GGUF file: F32 weights, query and key rows interleaved as llama.cpp keeps them.
    /// [`TinyModel::weights`] and [`TinyModel::rope_scaling`] are not looked at.
    ///
    /// # Errors
    /// Whatever the file system refuses.
    pub fn write_gguf(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, self.gguf_bytes())
    }

    /// The bytes [`Self::write_gguf`] writes.
    #[must_use]
    pub fn gguf_bytes(&self) -> Vec<u8> {
        let definition = tokenizer();
        let tokens: Vec<String> = match &definition["model"]["vocab"] {
            Value::Object(vocab) => vocab.keys().cloned().collect(),
            _ => Vec::new(),
        };
        let types = (0..tokens.len()).map(|id| if id < 3 { 3 } else { 1 }).collect();
        let size = |n: usize| Meta::U32(u32::try_from(n).unwrap_or(u32::MAX));
        let metadata = [
            ("general.architecture", Meta::Str("llama")),
            ("llama.block_count", size(self.n_layers)),
            ("llama.context_length", size(self.max_positions)),
            ("llama.embedding_length", size(self.hidden)),
            ("llama.feed_forward_length", size(self.intermediate)),
            ("llama.attention.head_count", size(self.n_heads)),
            ("llama.attention.head_count_kv", size(self.n_kv_heads)),
            ("llama.attention.key_length", size(self.head_dim)),
            ("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
            ("llama.rope.freq_base", Meta::F32(10_000.0)),
            ("tokenizer.ggml.model", Meta::Str("gpt2")),
            ("tokenizer.ggml.pre", Meta::Str("gpt-2")),
            ("tokenizer.ggml.tokens", Meta::Strs(tokens)),
            ("tokenizer.ggml.token_type", Meta::I32s(types)),
            ("tokenizer.ggml.merges", Meta::Strs(Vec::new())),
            ("tokenizer.ggml.bos_token_id", Meta::U32(1)),
            ("tokenizer.ggml.eos_token_id", Meta::U32(2)),
            ("tokenizer.chat_template", Meta::Str(CHAT_TEMPLATE)),
        ];
        let tensors = self.tensors();
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((tensors.len() as u64).to_le_bytes());
        file.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            write_str(&mut file, key);
            write_value(&mut file, value);
        }
        let mut data = Vec::new();
        for (name, shape, values) in tensors {
            write_str(&mut file, &llama_cpp_name(&name));
            file.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|d| file.extend((*d as u64).to_le_bytes()));
            file.extend(F32.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            let values = if name.contains("q_proj") || name.contains("k_proj") {
                interleave(&values, shape[0], self.head_dim)
            } else {
                values
            };
            values.iter().for_each(|x| data.extend(x.to_le_bytes()));
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend(data);
        file
    }
}

fn write_str(file: &mut Vec<u8>, text: &str) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text.as_bytes());
}

fn write_value(file: &mut Vec<u8>, value: Meta<'_>) {
    let mut array = |element: u32, count: usize| {
        file.extend(9u32.to_le_bytes());
        file.extend(element.to_le_bytes());
        file.extend((count as u64).to_le_bytes());
    };
    match value {
        Meta::U32(v) => {
            file.extend(4u32.to_le_bytes());
            file.extend(v.to_le_bytes());
        }
        Meta::F32(v) => {
            file.extend(6u32.to_le_bytes());
            file.extend(v.to_le_bytes());
        }
        Meta::Str(v) => {
            file.extend(8u32.to_le_bytes());
            write_str(file, v);
        }
        Meta::Strs(v) => {
            array(8, v.len());
            v.iter().for_each(|s| write_str(file, s));
        }
        Meta::I32s(v) => {
            array(5, v.len());
            v.iter().for_each(|x| file.extend(x.to_le_bytes()));
        }
    }
}

fn llama_cpp_name(name: &str) -> String {
    let names = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ];
    names.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// llama.cpp's conversion: row `j · head_dim / 2 + i` of a head goes to row `2i + j`.
fn interleave(values: &[f32], rows: usize, head_dim: usize) -> Vec<f32> {
    let row = values.len() / rows;
    let half = head_dim / 2;
    (0..rows)
        .flat_map(|r| {
            let (head, within) = (r / head_dim, r % head_dim);
            let from = head * head_dim + (within % 2) * half + within / 2;
            values[from * row..(from + 1) * row].iter().copied()
        })
        .collect()
}
