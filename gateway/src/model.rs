//! What the gateway needs of a model: its name, tokenizer, chat template and end tokens. No weights.

use crate::dialect::Dialect;
use shared::model::{Model, ModelError};
use shared::spec::{ModelSpec, SpecError, from_hf};
use shared::template::{ChatTemplate, TemplateError};
use shared::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

/// The served model, as far as text is concerned.
pub(crate) struct TextModel {
    /// Name that clients see.
    pub(crate) name: String,
    /// Description, for end tokens and limits.
    pub(crate) spec: ModelSpec,
    /// Text to ids and back.
    pub(crate) tokenizer: Tokenizer,
    /// Absent on base models, which serve `/v1/completions` only.
    pub(crate) template: Option<ChatTemplate>,
    /// How it writes tool calls and thoughts.
    pub(crate) dialect: Dialect,
}

impl TextModel {
    /// Opens a GGUF file or a model directory. A directory needs no weights here.
    ///
    /// # Errors
    /// [`ModelError`] saying which part was refused.
    pub(crate) fn open(path: &Path, name: Option<String>) -> Result<Self, ModelError> {
        let (spec, tokenizer, template) = if path.is_dir() {
            let config = read_json(&path.join("config.json"))?
                .ok_or_else(|| ModelError::NotAModel(path.to_owned()))?;
            let generation = read_json(&path.join("generation_config.json"))?;
            let folder =
                path.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
            let spec =
                from_hf(&folder.unwrap_or_else(|| "model".to_owned()), &config, generation.as_ref(), true)?;
            let template = match ChatTemplate::open(path) {
                Ok(template) => Some(template),
                Err(TemplateError::Absent) => None,
                Err(error) => return Err(error.into()),
            };
            (spec, Tokenizer::open(path)?, template)
        } else {
            let model = Model::open(path)?;
            (model.spec, model.tokenizer, model.template)
        };
        let dialect = Dialect::detect(template.as_ref(), &spec.name);
        Ok(Self { name: name.unwrap_or_else(|| spec.name.clone()), spec, tokenizer, template, dialect })
    }
}

fn read_json(path: &Path) -> Result<Option<serde_json::Value>, SpecError> {
    let path = PathBuf::from(path);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(SpecError::Io { path, source }),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|source| SpecError::Json { path, source })
}
