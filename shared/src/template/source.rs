//! Where templates and special tokens are found.

use super::TemplateError;
use crate::weights::gguf::{GgufFile, GgufValue};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the template that is used without tools.
pub(super) const DEFAULT: &str = "default";
/// Name of the template that some models have for requests with tools.
pub(super) const TOOL_USE: &str = "tool_use";

const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Texts before compilation.
#[derive(Debug)]
pub(super) struct TemplateSource {
    pub(super) templates: BTreeMap<String, String>,
    pub(super) special_tokens: Map<String, Value>,
}

impl TemplateSource {
    pub(super) fn single(text: String, special_tokens: Map<String, Value>) -> Self {
        Self { templates: BTreeMap::from([(DEFAULT.to_owned(), text)]), special_tokens }
    }

    /// `chat_template.jinja` wins over `tokenizer_config.json`, as in transformers.
    pub(super) fn from_directory(dir: &Path) -> Result<Self, TemplateError> {
        let path = dir.join("tokenizer_config.json");
        let config = match read(&path)? {
            None => Value::Null,
            Some(text) => serde_json::from_str(&text)
                .map_err(|e| TemplateError::Malformed { path: path.clone(), reason: e.to_string() })?,
        };
        let mut templates = match config.get("chat_template") {
            None | Some(Value::Null) => BTreeMap::new(),
            Some(Value::String(text)) => BTreeMap::from([(DEFAULT.to_owned(), text.clone())]),
            Some(list) => named(list)
                .ok_or_else(|| TemplateError::Malformed { path, reason: "chat_template".to_owned() })?,
        };
        if let Some(text) = read(&dir.join("chat_template.jinja"))? {
            templates.insert(DEFAULT.to_owned(), text);
        }
        if let Some(text) = read(&dir.join("additional_chat_templates").join("tool_use.jinja"))? {
            templates.insert(TOOL_USE.to_owned(), text);
        }
        Self { templates, special_tokens: special_tokens(&config) }.present()
    }

    pub(super) fn from_gguf(file: &GgufFile) -> Result<Self, TemplateError> {
        let text = |key: &str| file.value(key).and_then(GgufValue::as_str).map(str::to_owned);
        let mut templates = BTreeMap::new();
        for (name, key) in
            [(DEFAULT, "tokenizer.chat_template"), (TOOL_USE, "tokenizer.chat_template.tool_use")]
        {
            if let Some(text) = text(key) {
                templates.insert(name.to_owned(), text);
            }
        }
        let tokens = file.value("tokenizer.ggml.tokens").and_then(GgufValue::as_strings).unwrap_or_default();
        let mut special_tokens = Map::new();
        for (name, key) in [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        ] {
            let id = file.value(key).and_then(GgufValue::as_u64).and_then(|id| usize::try_from(id).ok());
            if let Some(token) = id.and_then(|id| tokens.get(id)) {
                special_tokens.insert(name.to_owned(), token.clone().into());
            }
        }
        Self { templates, special_tokens }.present()
    }

    pub(super) fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"pd-bridge/template/v1");
        let mut add = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        for (name, text) in &self.templates {
            add(name);
            add(text);
        }
        for name in SPECIAL_TOKENS {
            if let Some(token) = self.special_tokens.get(name).and_then(Value::as_str) {
                add(name);
                add(token);
            }
        }
        *hasher.finalize().as_bytes()
    }

    fn present(self) -> Result<Self, TemplateError> {
        if self.templates.contains_key(DEFAULT) { Ok(self) } else { Err(TemplateError::Absent) }
    }
}

/// A list of `{"name": …, "template": …}`.
fn named(list: &Value) -> Option<BTreeMap<String, String>> {
    let entry =
        |v: &Value| Some((v.get("name")?.as_str()?.to_owned(), v.get("template")?.as_str()?.to_owned()));
    list.as_array()?.iter().map(entry).collect()
}

/// Special tokens are strings, or objects with the string in `content`.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let spelling = |v: &Value| v.as_str().or_else(|| v.get("content")?.as_str()).map(str::to_owned);
    SPECIAL_TOKENS
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), config.get(*name).and_then(spelling)?.into())))
        .collect()
}

fn read(path: &Path) -> Result<Option<String>, TemplateError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TemplateError::Io { path: path.to_owned(), source }),
    }
}
