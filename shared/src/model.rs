//! A model on disk: its description, its tensors, and the digests that identify it.

use crate::spec::{ModelSpec, Quantization, SpecError, from_gguf, from_hf};
use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use crate::weights::gguf::{GgufFile, ROPE_FACTORS};
use crate::weights::{GgufSource, HfSource, TensorSource, WeightsError, check_complete, index_digest};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

#[cfg(test)]
mod tests;

/// Why a model was refused.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The path holds nothing that is a model.
    #[error("{0} is neither a GGUF file nor a directory with config.json")]
    NotAModel(PathBuf),
    /// Its configuration.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Its tensors.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Its tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Its chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// What identifies a model: BLAKE3 over each of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelDigests {
    /// Of the specification without its name, which is only for people.
    pub config: [u8; 32],
    /// Of the tokenizer's definition.
    pub tokenizer: [u8; 32],
    /// Of the chat template with its special tokens; of nothing where the model has none.
    pub template: [u8; 32],
    /// Of the sorted tensor names with shapes, formats and sizes.
    pub index: [u8; 32],
}

/// An opened model.
pub struct Model {
    /// What it is.
    pub spec: ModelSpec,
    /// Its tensors: all there, all of the right shape, none besides.
    pub source: Box<dyn TensorSource>,
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// Conversations to prompts, if the model was made for them.
    pub template: Option<ChatTemplate>,
    index_digest: [u8; 32],
}

impl Model {
    /// Open a GGUF file, a Hugging Face directory or an MLX-quantized directory.
    ///
    /// # Errors
    /// [`ModelError`] says which part was refused and names the tensor, key or file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let (spec, source, tokenizer, template) =
            if path.is_dir() { open_directory(path)? } else { open_gguf(path)? };
        check_complete(&spec, source.as_ref())?;
        let index_digest = index_digest(source.as_ref());
        Ok(Self { spec, source, tokenizer, template, index_digest })
    }

    /// What identifies this model.
    #[must_use]
    pub fn digests(&self) -> ModelDigests {
        ModelDigests {
            config: config_digest(&self.spec),
            tokenizer: self.tokenizer.digest(),
            template: self.template.as_ref().map_or_else(ChatTemplate::absent_digest, ChatTemplate::digest),
            index: self.index_digest,
        }
    }
}

type Parts = (ModelSpec, Box<dyn TensorSource>, Tokenizer, Option<ChatTemplate>);

fn open_gguf(path: &Path) -> Result<Parts, ModelError> {
    let file = Arc::new(GgufFile::open(path)?);
    let divisors = match file.tensors().get(ROPE_FACTORS) {
        None => None,
        Some(tensor) => {
            let bytes = file.read(tensor)?;
            let decoded = tensor.format.decode(tensor.shape.clone(), &bytes);
            let decoded = decoded
                .map_err(|reason| WeightsError::Quantization { tensor: ROPE_FACTORS.to_owned(), reason })?;
            Some(decoded.into_f32())
        }
    };
    let spec = from_gguf(&stem(path), &file, divisors.as_deref())?;
    let tokenizer = Tokenizer::from_gguf(&file)?;
    let template = absent_is_none(ChatTemplate::from_gguf(&file))?;
    let source = GgufSource::new(file, spec.head_dim)?;
    Ok((spec, Box::new(source), tokenizer, template))
}

fn open_directory(dir: &Path) -> Result<Parts, ModelError> {
    let config = read_json(&dir.join("config.json"))?.ok_or_else(|| ModelError::NotAModel(dir.to_owned()))?;
    let generation = read_json(&dir.join("generation_config.json"))?;
    let name = dir.canonicalize().map_or_else(|_| stem(dir), |full| stem(&full));
    // The architecture is refused before its tensors are looked at, so that the reason is the right one.
    from_hf(&name, &config, generation.as_ref(), true)?;
    let mut source = HfSource::open(dir, &Quantization::from_config(&config)?)?;
    let spec = from_hf(&name, &config, generation.as_ref(), source.has_lm_head())?;
    if spec.tie_word_embeddings {
        source.drop_lm_head();
    }
    let tokenizer = Tokenizer::open(dir)?;
    let template = absent_is_none(ChatTemplate::open(dir))?;
    Ok((spec, Box::new(source), tokenizer, template))
}

fn absent_is_none(
    opened: Result<ChatTemplate, TemplateError>,
) -> Result<Option<ChatTemplate>, TemplateError> {
    match opened {
        Ok(template) => Ok(Some(template)),
        Err(TemplateError::Absent) => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_json(path: &Path) -> Result<Option<Value>, SpecError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(SpecError::Io { path: path.to_owned(), source }),
    };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|source| SpecError::Json { path: path.to_owned(), source })
}

fn stem(path: &Path) -> String {
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned())
}

fn config_digest(spec: &ModelSpec) -> [u8; 32] {
    let nameless = ModelSpec { name: String::new(), ..spec.clone() };
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"pd-bridge/config/v1");
    // Plain numbers, strings and lists: writing them as JSON cannot fail.
    hasher.update(&serde_json::to_vec(&nameless).unwrap_or_default());
    *hasher.finalize().as_bytes()
}
