//! A `tokenizer.json` from the vocabulary in a GGUF file.
//!
//! GGUF keeps tokens, merges and a name for the pre-tokenizer; what each name stands for is llama.cpp's convention, and
//! the splitting rules below are the ones of the models those names come from.

use super::TokenizerError;
use crate::weights::gguf::{GgufFile, GgufValue};
use serde_json::{Map, Value, json};

const GPT2_SPLIT: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// llama.cpp's token types.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// The rules behind a pre-tokenizer name.
struct PreTokenizer {
    splits: &'static [&'static str],
    /// Whole-word tokens win over merges.
    ignore_merges: bool,
    /// Text is composed to NFC first.
    nfc: bool,
    /// A start token goes before every text unless the file says otherwise.
    add_bos: bool,
}

fn pre_tokenizer(name: &str) -> Option<PreTokenizer> {
    let rules =
        |splits, ignore_merges, nfc, add_bos| Some(PreTokenizer { splits, ignore_merges, nfc, add_bos });
    match name {
        "smollm" | "starcoder" | "refact" | "command-r" => {
            rules(&[r"\p{N}", GPT2_SPLIT], false, false, false)
        }
        "gpt-2" | "mpt" | "olmo" | "phi-2" => rules(&[GPT2_SPLIT], false, false, false),
        "llama-bpe" | "llama3" | "llama-v3" => rules(&[LLAMA3_SPLIT], true, false, true),
        "qwen2" | "deepseek-r1-qwen" => rules(&[QWEN2_SPLIT], false, true, false),
        "default" => {
            rules(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"], false, false, false)
        }
        _ => None,
    }
}

/// Build the JSON definition.
///
/// # Errors
/// [`TokenizerError`] when the vocabulary is absent, incomplete, or of a kind that is not supported.
pub(super) fn tokenizer_json(file: &GgufFile) -> Result<Vec<u8>, TokenizerError> {
    let text = |key| file.value(key).and_then(GgufValue::as_str);
    let model = text("tokenizer.ggml.model").ok_or(TokenizerError::Missing("tokenizer.ggml.model"))?;
    if model != "gpt2" {
        return Err(TokenizerError::Unsupported { key: "tokenizer.ggml.model", value: model.to_owned() });
    }
    let pre = text("tokenizer.ggml.pre").unwrap_or("default");
    let rules = pre_tokenizer(pre)
        .ok_or_else(|| TokenizerError::Unsupported { key: "tokenizer.ggml.pre", value: pre.to_owned() })?;
    let strings = |key| file.value(key).and_then(GgufValue::as_strings).ok_or(TokenizerError::Missing(key));
    let tokens = strings("tokenizer.ggml.tokens")?;
    let merges = strings("tokenizer.ggml.merges")?;
    let types = match file.value("tokenizer.ggml.token_type") {
        Some(value) => value
            .as_i64s()
            .filter(|types| types.len() == tokens.len())
            .ok_or_else(|| TokenizerError::Invalid("token types do not match the tokens".to_owned()))?,
        None => vec![1; tokens.len()],
    };

    let mut vocab = Map::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if vocab.insert(token.clone(), id.into()).is_some() {
            return Err(TokenizerError::Invalid(format!("token {token:?} occurs twice")));
        }
    }
    let added: Vec<Value> = tokens
        .iter()
        .zip(&types)
        .enumerate()
        .filter(|(_, (_, kind))| matches!(**kind, CONTROL | USER_DEFINED))
        .map(|(id, (token, kind))| {
            json!({"id": id, "content": token, "special": *kind == CONTROL, "normalized": false,
                   "single_word": false, "lstrip": false, "rstrip": false})
        })
        .collect();
    let prefix_space =
        file.value("tokenizer.ggml.add_space_prefix").and_then(GgufValue::as_bool).unwrap_or(false);
    let definition = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": rules.nfc.then(|| json!({"type": "NFC"})),
        "pre_tokenizer": splitting(&rules, prefix_space),
        "post_processor": start_token(&rules, file, tokens)?,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": rules.ignore_merges, "vocab": vocab, "merges": merges},
    });
    serde_json::to_vec(&definition).map_err(|e| TokenizerError::Invalid(e.to_string()))
}

fn splitting(rules: &PreTokenizer, prefix_space: bool) -> Value {
    let mut steps: Vec<Value> = rules
        .splits
        .iter()
        .map(|regex| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}))
        .collect();
    steps.push(json!({"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": true, "use_regex": false}));
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// The post-processor that puts the start token before a text, where the model wants one.
fn start_token(rules: &PreTokenizer, file: &GgufFile, tokens: &[String]) -> Result<Value, TokenizerError> {
    let wanted =
        file.value("tokenizer.ggml.add_bos_token").and_then(GgufValue::as_bool).unwrap_or(rules.add_bos);
    if !wanted {
        return Ok(Value::Null);
    }
    let id = file
        .value("tokenizer.ggml.bos_token_id")
        .and_then(GgufValue::as_u64)
        .ok_or(TokenizerError::Missing("tokenizer.ggml.bos_token_id"))?;
    let token = usize::try_from(id)
        .ok()
        .and_then(|i| tokens.get(i))
        .ok_or_else(|| TokenizerError::Invalid(format!("start token {id} is not in the vocabulary")))?;
    let start = json!({"SpecialToken": {"id": token, "type_id": 0}});
    let text = |id: &str, type_id: u32| json!({"Sequence": {"id": id, "type_id": type_id}});
    let mut special = Map::new();
    special.insert(token.clone(), json!({"id": token, "ids": [id], "tokens": [token]}));
    Ok(json!({"type": "TemplateProcessing", "single": [start, text("A", 0)],
              "pair": [start, text("A", 0), text("B", 1)], "special_tokens": special}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{
        OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, PreTokenizerWrapper,
    };

    fn pieces(name: &str, text: &str) -> Vec<String> {
        let rules = pre_tokenizer(name).unwrap();
        let splitter: PreTokenizerWrapper = serde_json::from_value(splitting(&rules, false)).unwrap();
        let mut text = PreTokenizedString::from(text);
        splitter.pre_tokenize(&mut text).unwrap();
        let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits
            .into_iter()
            .map(|(piece, _, _)| piece.replace('\u{120}', " ").replace('\u{10A}', "\n"))
            .collect()
    }

    #[test]
    fn each_name_splits_as_its_models_do() {
        let text = "We'LL see 1234 things!\n\n  ok";
        for (name, want) in [
            ("gpt-2", &["We", "'", "LL", " see", " 1234", " things", "!", "\n\n ", " ok"][..]),
            ("smollm", &["We", "'", "LL", " see", " ", "1", "2", "3", "4", " things", "!", "\n\n ", " ok"]),
            ("llama-bpe", &["We", "'LL", " see", " ", "123", "4", " things", "!\n\n", " ", " ok"]),
            ("qwen2", &["We", "'LL", " see", " ", "1", "2", "3", "4", " things", "!\n\n", " ", " ok"]),
            ("default", &["We", "'", "LL", " see", " ", "123", "4", " things", "!", "\n\n ", " ok"]),
        ] {
            assert_eq!(pieces(name, text), want, "{name}");
        }
        assert!(pre_tokenizer("tekken").is_none());
    }
}
