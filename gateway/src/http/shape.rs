//! The JSON of answers: chat completions and completions, whole and in chunks.

use serde_json::{Value, json};
use shared::verdict::Verdict;

/// Which endpoint's objects to make, and what is the same in all of one answer.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    pub(super) kind: Kind,
    /// `chatcmpl-…` or `cmpl-…`.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created_unix_s: u64,
    pub(super) model: String,
}

/// The endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

impl Shape {
    /// The shape of one answer.
    pub(super) fn new(kind: Kind, request_id: &str, created_unix_s: u64, model: String) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        Self { kind, id: format!("{prefix}-{request_id}"), created_unix_s, model }
    }

    /// The first chunk: chat says who speaks; completions have none.
    pub(super) fn first_chunk(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (self.kind == Kind::Chat).then(|| self.chunk(json!([choice("delta", delta, None)])))
    }

    /// A chunk of text.
    pub(super) fn text_chunk(&self, text: &str) -> Value {
        self.chunk(json!([match self.kind {
            Kind::Chat => choice("delta", json!({"content": text}), None),
            Kind::Completion => choice("text", json!(text), None),
        }]))
    }

    /// The last chunk with a choice: why the answer ended.
    pub(super) fn last_chunk(&self, finish_reason: &str) -> Value {
        self.chunk(json!([match self.kind {
            Kind::Chat => choice("delta", json!({}), Some(finish_reason)),
            Kind::Completion => choice("text", json!(""), Some(finish_reason)),
        }]))
    }

    /// The chunk that carries usage, after the last choice.
    pub(super) fn usage_chunk(&self, usage: &Value) -> Value {
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = usage.clone();
        chunk
    }

    /// A whole answer.
    pub(super) fn whole(&self, text: &str, finish_reason: &str, usage: &Value) -> Value {
        let (object, choice) = match self.kind {
            Kind::Chat => {
                let message = json!({"role": "assistant", "content": text, "refusal": null});
                ("chat.completion", choice("message", message, Some(finish_reason)))
            }
            Kind::Completion => ("text_completion", choice("text", json!(text), Some(finish_reason))),
        };
        json!({"id": self.id, "object": object, "created": self.created_unix_s, "model": self.model,
            "choices": [choice], "usage": usage})
    }

    fn chunk(&self, choices: Value) -> Value {
        let object = match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        };
        let mut chunk =
            json!({"id": self.id, "object": object, "created": self.created_unix_s, "model": self.model});
        chunk["choices"] = choices;
        chunk
    }
}

fn choice(key: &str, value: Value, finish_reason: Option<&str>) -> Value {
    let mut choice = json!({"index": 0});
    choice[key] = value;
    choice["logprobs"] = Value::Null;
    choice["finish_reason"] = finish_reason.map_or(Value::Null, Value::from);
    choice
}

/// OpenAI's usage object.
pub(super) fn usage(verdict: &Verdict, completion_tokens: u32) -> Value {
    json!({"prompt_tokens": verdict.prompt_tokens, "completion_tokens": completion_tokens,
        "total_tokens": verdict.prompt_tokens.saturating_add(completion_tokens),
        "prompt_tokens_details": {"cached_tokens": verdict.cached_tokens}})
}
