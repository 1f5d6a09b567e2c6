//! Chat templates: from a list of messages to the text of a prompt.
//!
//! Templates are written for the Jinja of Python's transformers; this module gives them the same globals, filters,
//! white-space rules and methods.

mod error;
mod functions;
mod json;
mod source;
mod variables;

pub use error::TemplateError;

use crate::weights::gguf::GgufFile;
use minijinja::Environment;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use serde_json::{Map, Value};
use source::{DEFAULT, TOOL_USE, TemplateSource};
use std::path::Path;
use std::sync::Arc;
use variables::Variables;

/// A model's chat template, compiled. Clones share it.
#[derive(Clone)]
pub struct ChatTemplate {
    inner: Arc<Inner>,
}

struct Inner {
    environment: Environment<'static>,
    special_tokens: Map<String, Value>,
    has_tool_use: bool,
    digest: [u8; 32],
}

impl ChatTemplate {
    /// Open the template of a model: a GGUF file, or a directory with `chat_template.jinja` or a template in
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`TemplateError::Absent`] when the model has none; other variants when it is damaged.
    pub fn open(path: &Path) -> Result<Self, TemplateError> {
        if path.is_dir() {
            return Self::compile(&TemplateSource::from_directory(path)?);
        }
        Self::from_gguf(&GgufFile::open(path)?)
    }

    /// Compile a template's text. `special_tokens` are globals such as `bos_token`.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] says where the text is not Jinja.
    pub fn from_text(text: &str, special_tokens: Map<String, Value>) -> Result<Self, TemplateError> {
        Self::compile(&TemplateSource::single(text.to_owned(), special_tokens))
    }

    pub(crate) fn from_gguf(file: &GgufFile) -> Result<Self, TemplateError> {
        Self::compile(&TemplateSource::from_gguf(file)?)
    }

    /// Render a conversation. `extra` holds further variables, as `chat_template_kwargs` of an API request would; they
    /// cannot replace the messages, the tools or `add_generation_prompt`.
    ///
    /// # Errors
    /// [`TemplateError::Raised`] with the template's own words when it refuses the conversation,
    /// [`TemplateError::Render`] when it cannot cope with it.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, TemplateError> {
        let variables = Variables {
            template: self.clone(),
            messages: minijinja::Value::from(Serde(messages)),
            tools: tools.map_or_else(|| ().into(), |tools| minijinja::Value::from(Serde(tools))),
            add_generation_prompt,
            extra: extra.clone(),
        };
        let name = if tools.is_some() && self.inner.has_tool_use { TOOL_USE } else { DEFAULT };
        let template =
            self.inner.environment.get_template(name).map_err(|e| TemplateError::from_render(&e))?;
        let variables = minijinja::Value::from_object(variables);
        template.render(variables).map_err(|e| TemplateError::from_render(&e))
    }

    /// A special token by its name in the configuration, such as `bos_token`.
    #[must_use]
    pub fn special_token(&self, name: &str) -> Option<&str> {
        self.inner.special_tokens.get(name).and_then(Value::as_str)
    }

    /// BLAKE3 of the template's text and its special tokens.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.inner.digest
    }

    /// What stands for [`Self::digest`] in a model without a template.
    #[must_use]
    pub fn absent_digest() -> [u8; 32] {
        *blake3::hash(b"pd-bridge/template/v1").as_bytes()
    }

    fn compile(source: &TemplateSource) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| TemplateError::from_syntax(&e))?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        functions::register(&mut environment);
        for (name, text) in &source.templates {
            environment
                .add_template_owned(name.clone(), functions::without_generation_tags(text))
                .map_err(|e| TemplateError::from_syntax(&e))?;
        }
        let inner = Inner {
            environment,
            special_tokens: source.special_tokens.clone(),
            has_tool_use: source.templates.contains_key(TOOL_USE),
            digest: source.digest(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("special_tokens", &self.inner.special_tokens)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
