//! The response object.

use super::repeated_metadata;
use crate::http::error::ApiError;
use crate::http::params::Fields;
use crate::http::tools::Tools;
use crate::http::usage::Usage;
use crate::http::voice::Head;
use serde_json::{Map, Value, json};
use shared::control::Sampling;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a response repeats of its request.
#[derive(Debug, Clone)]
pub(super) struct Template {
    instructions: Value,
    max_output_tokens: Value,
    parallel_tool_calls: bool,
    reasoning: Value,
    temperature: f64,
    text: Value,
    tool_choice: Value,
    tools: Value,
    top_logprobs: Value,
    top_p: f64,
    user: Value,
    metadata: Value,
    presence_penalty: f64,
    frequency_penalty: f64,
    safety_identifier: Value,
    prompt_cache_key: Value,
}

impl Template {
    /// Takes it from a request that was checked.
    pub(super) fn read(f: &Fields, sampling: &Sampling, tools: &Tools) -> Result<Self, ApiError> {
        let copy = |name: &str| f.value(name).cloned();
        let part = |name: &str, key: &str| f.value(name).and_then(|v| v.get(key)).cloned();
        let format = part("text", "format").unwrap_or_else(|| json!({"type": "text"}));
        Ok(Self {
            instructions: copy("instructions").unwrap_or_default(),
            max_output_tokens: copy("max_output_tokens").unwrap_or_default(),
            parallel_tool_calls: tools.parallel,
            reasoning: json!({"effort": part("reasoning", "effort"), "summary": null}),
            temperature: f.number("temperature", 0.0, 2.0)?.unwrap_or_else(|| sampling.temperature.into()),
            text: json!({"format": format, "verbosity": "medium"}),
            tool_choice: copy("tool_choice").unwrap_or_else(|| "auto".into()),
            tools: copy("tools").map_or_else(|| json!([]), whole_tools),
            top_logprobs: copy("top_logprobs").unwrap_or_else(|| 0.into()),
            top_p: f.number("top_p", 0.0, 1.0)?.unwrap_or(1.0),
            user: copy("user").unwrap_or_default(),
            metadata: repeated_metadata(f)?,
            presence_penalty: f.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            frequency_penalty: f.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
            safety_identifier: copy("safety_identifier").unwrap_or_default(),
            prompt_cache_key: copy("prompt_cache_key").unwrap_or_default(),
        })
    }
}

/// Tools with every field that a tool of an answer has.
fn whole_tools(mut tools: Value) -> Value {
    for tool in tools.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        for name in ["description", "parameters", "strict"] {
            tool.entry(name).or_insert(Value::Null);
        }
    }
    tools
}

/// How far a response is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    InProgress,
    Completed,
    /// The token budget is used up.
    Incomplete,
    Failed,
}

impl Status {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed => "failed",
        }
    }
}

/// The response as it stands.
pub(super) fn response(
    head: &Head,
    t: &Template,
    status: Status,
    output: &[Value],
    usage: Option<Value>,
    error: Option<Value>,
) -> Value {
    let incomplete = (status == Status::Incomplete).then(|| json!({"reason": "max_output_tokens"}));
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let completed_at = (status == Status::Completed).then(now);
    let fields = [
        ("id", head.id.as_str().into()),
        ("object", "response".into()),
        ("created_at", head.created_unix_s.into()),
        ("completed_at", completed_at.into()),
        ("status", status.as_str().into()),
        ("background", false.into()),
        ("error", error.into()),
        ("incomplete_details", incomplete.into()),
        ("instructions", t.instructions.clone()),
        ("max_output_tokens", t.max_output_tokens.clone()),
        ("max_tool_calls", Value::Null),
        ("model", head.model.as_str().into()),
        ("output", output.into()),
        ("parallel_tool_calls", t.parallel_tool_calls.into()),
        ("presence_penalty", t.presence_penalty.into()),
        ("frequency_penalty", t.frequency_penalty.into()),
        ("safety_identifier", t.safety_identifier.clone()),
        ("prompt_cache_key", t.prompt_cache_key.clone()),
        ("previous_response_id", Value::Null),
        ("reasoning", t.reasoning.clone()),
        ("service_tier", "default".into()),
        ("store", false.into()),
        ("temperature", t.temperature.into()),
        ("text", t.text.clone()),
        ("tool_choice", t.tool_choice.clone()),
        ("tools", t.tools.clone()),
        ("top_logprobs", t.top_logprobs.clone()),
        ("top_p", t.top_p.into()),
        ("truncation", "disabled".into()),
        ("usage", usage.into()),
        ("user", t.user.clone()),
        ("metadata", t.metadata.clone()),
    ];
    fields.into_iter().map(|(k, v): (&str, Value)| (k.to_owned(), v)).collect::<Map<_, _>>().into()
}

/// Usage under the names of this endpoint.
pub(super) fn usage(usage: &Usage, reasoning_tokens: u64) -> Value {
    json!({"input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.total_tokens})
}
