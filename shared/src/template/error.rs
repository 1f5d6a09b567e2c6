//! Why a prompt could not be rendered.

use crate::weights::WeightsError;
use std::error::Error;
use std::path::PathBuf;

/// Failures of opening or rendering a chat template.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model was not made for conversations.
    #[error("the model has no chat template")]
    Absent,
    /// A file that should hold the template could not be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A configuration file is damaged.
    #[error("{path}: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The GGUF file that should hold the template is damaged.
    #[error(transparent)]
    Container(#[from] WeightsError),
    /// The template is not valid Jinja.
    #[error("chat template: {0}")]
    Syntax(String),
    /// The template refused the conversation, in its own words.
    #[error("{0}")]
    Raised(String),
    /// The template failed on this conversation.
    #[error("chat template: {0}")]
    Render(String),
}

impl TemplateError {
    pub(super) fn from_syntax(error: &minijinja::Error) -> Self {
        Self::Syntax(describe(error))
    }

    pub(super) fn from_render(error: &minijinja::Error) -> Self {
        let mut cause: Option<&(dyn Error + 'static)> = Some(error);
        while let Some(current) = cause {
            if let Some(Raised(message)) = current.downcast_ref::<Raised>() {
                return Self::Raised(message.clone());
            }
            cause = current.source();
        }
        Self::Render(describe(error))
    }
}

/// What a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

fn describe(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(current) = cause {
        text.push_str(": ");
        text.push_str(&current.to_string());
        cause = current.source();
    }
    text
}
