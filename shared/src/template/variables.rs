//! What a template can name: looked up when it is named, so that what it does not use costs nothing.

use super::ChatTemplate;
use minijinja::value::{Object, Serde, Value};
use serde_json::Map;
use std::sync::Arc;

/// The variables of one rendering.
#[derive(Debug)]
pub(super) struct Variables {
    pub(super) template: ChatTemplate,
    pub(super) messages: Value,
    pub(super) tools: Value,
    pub(super) add_generation_prompt: bool,
    /// What the client sets; it can hide special tokens but nothing else.
    pub(super) extra: Map<String, serde_json::Value>,
}

impl Object for Variables {
    fn get_value(self: &Arc<Self>, name: &Value) -> Option<Value> {
        match name.as_str()? {
            "messages" => Some(self.messages.clone()),
            "tools" => Some(self.tools.clone()),
            "add_generation_prompt" => Some(self.add_generation_prompt.into()),
            name => match self.extra.get(name).or_else(|| self.template.inner.special_tokens.get(name)) {
                Some(value) => Some(Value::from(Serde(value))),
                None if name == "documents" => Some(().into()),
                None => None,
            },
        }
    }
}
