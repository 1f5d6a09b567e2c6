//! `POST /v1/responses`, without a memory: every request brings its whole conversation and nothing is stored.

mod input;
mod object;
mod refused;
mod voice;

use super::App;
use super::answer::{Prompt, Request};
use super::chat::{prompt, shaped};
use super::endpoint;
use super::error::ApiError;
use super::params::{Fields, wrong_type};
use super::sampling::{Common, MAX_TOP_LOGPROBS, max_tokens};
use super::tools::{self, Tools};
use super::write_clock::WriteClock;
use super::{form, metadata};
use crate::pipeline::Shaped;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use object::Template;
use serde_json::{Map, Value};
use std::sync::Arc;
use voice::ResponseVoice;

/// Answers one turn.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(clock): Extension<WriteClock>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    endpoint::respond(app, clock, headers, body, read).await
}

fn read(app: &App, f: &Fields) -> Result<Request, ApiError> {
    refused::check(f)?;
    f.boolean("store")?;
    f.string("safety_identifier")?;
    f.string("prompt_cache_key")?;
    let model = app.ctx.model.clone();
    let Common { mut spec, stream, .. } = Common::read(f, model.spec.vocab_size)?;
    if spec.choices > 1 {
        return Err(ApiError::unsupported("n", "one answer per request; use /v1/chat/completions for more"));
    }
    spec.max_new_tokens = max_tokens(f, "max_output_tokens", 1)?;
    spec.logprobs = logprobs(f)?;
    let tools = Tools::of(f, flat_tools(f)?)?;
    let mut messages = input::read(f)?;
    if let Some(text) = f.string("instructions")? {
        messages.insert(0, serde_json::json!({"role": "system", "content": text}));
    }
    let extra = reasoning(f)?;
    let offered = if tools.offered() { tools.list.as_slice() } else { &[] };
    let text = prompt::render(&model, &Value::Array(messages), offered, true, &extra)?;
    let scored = spec.logprobs.is_some();
    let template = Template::read(f, &spec.sampling, &tools)?;
    let reading = shaped(&model, &mut spec, tools, text_format(f)?.as_ref(), &text);
    Ok(Request {
        prompts: vec![Prompt::Text(text, false)],
        spec,
        stream,
        voice: Box::new(move |head, _| {
            Box::new(ResponseVoice::new(model, head, template, &reading, scored, stream))
        }),
    })
}

/// The tools, from the flat notation of this endpoint.
fn flat_tools(f: &Fields) -> Result<Vec<Value>, ApiError> {
    let list = match f.value("tools") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong_type("tools", "a list", other)),
    };
    let flat = |(i, tool): (usize, &Value)| {
        let param = format!("tools[{i}]");
        let Value::Object(map) = tool else { return Err(wrong_type(&param, "an object", tool)) };
        tools::check_type(&param, map)?;
        tools::check_function(&param, map)?;
        Ok(tools::in_chat_notation(map))
    };
    list.iter().enumerate().map(flat).collect()
}

fn text_format(f: &Fields) -> Result<Option<Shaped>, ApiError> {
    match f.value("text") {
        None => Ok(None),
        Some(Value::Object(text)) if text.get("verbosity").is_some_and(|v| !v.is_null() && v != "medium") => {
            let why = "the model has no such control; say it in the instructions";
            Err(ApiError::unsupported("text.verbosity", why))
        }
        Some(Value::Object(text)) => match text.get("format").filter(|v| !v.is_null()) {
            None => Ok(None),
            Some(format) => form::openai("text.format", format),
        },
        Some(other) => Err(wrong_type("text", "an object", other)),
    }
}

/// Variables of the template that say how much to think.
fn reasoning(f: &Fields) -> Result<Map<String, Value>, ApiError> {
    let mut extra = Map::new();
    match f.value("reasoning") {
        None => {}
        Some(Value::Object(map)) => match map.get("effort") {
            None | Some(Value::Null) => {}
            Some(Value::String(effort)) => {
                extra.insert("reasoning_effort".to_owned(), effort.as_str().into());
                if effort == "none" {
                    extra.insert("enable_thinking".to_owned(), false.into());
                }
            }
            Some(other) => return Err(wrong_type("reasoning.effort", "a string", other)),
        },
        Some(other) => return Err(wrong_type("reasoning", "an object", other)),
    }
    Ok(extra)
}

/// Log probabilities are asked for by `include`, the alternatives by `top_logprobs`.
fn logprobs(f: &Fields) -> Result<Option<u32>, ApiError> {
    let included = match f.value("include") {
        None => false,
        Some(Value::Array(list)) if list.iter().all(Value::is_string) => {
            list.iter().any(|v| v == "message.output_text.logprobs")
        }
        Some(other) => return Err(wrong_type("include", "a list of strings", other)),
    };
    let top = f.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    Ok((included || top.is_some_and(|n| n > 0)).then(|| u32::try_from(top.unwrap_or(0)).unwrap_or(0)))
}

/// `metadata` as the answer repeats it.
fn repeated_metadata(f: &Fields) -> Result<Value, ApiError> {
    Ok(metadata::check(f)?.map_or_else(|| Map::new().into(), |map| map.clone().into()))
}
