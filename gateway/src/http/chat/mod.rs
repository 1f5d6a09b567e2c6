//! `POST /v1/chat/completions`

pub(super) mod messages;
pub(super) mod prompt;
mod voice;
pub(super) mod wire;

use super::App;
use super::answer::{Prompt, Request};
use super::endpoint;
use super::error::ApiError;
use super::form;
use super::params::{Fields, wrong_type};
use super::sampling::{Common, MAX_TOP_LOGPROBS, max_tokens};
use super::tools::Tools;
use super::tools::grammar::{self, Thinking};
use super::tools::reader::Reading;
use super::write_clock::WriteClock;
use crate::model::TextModel;
use crate::pipeline::{AnswerSpec, Shaped};
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Map, Value};
use std::sync::Arc;
use voice::ChatVoice;

/// Answers a conversation.
pub(super) async fn create(
    State(app): State<Arc<App>>,
    Extension(clock): Extension<WriteClock>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    endpoint::respond(app, clock, headers, body, read).await
}

fn read(app: &App, f: &Fields) -> Result<Request, ApiError> {
    let model = app.ctx.model.clone();
    let Common { mut spec, stream, include_usage } = Common::read(f, model.spec.vocab_size)?;
    f.refuse("echo", |v| v == false, "a conversation can't be repeated; use /v1/completions")?;
    spec.logprobs = logprobs(f)?;
    spec.max_new_tokens = match max_tokens(f, "max_completion_tokens", 1)? {
        Some(tokens) => Some(tokens),
        None => max_tokens(f, "max_tokens", 1)?,
    };
    let messages = messages::read(f)?;
    let tools = Tools::read(f)?;
    let extra = template_arguments(f)?;
    let generation_prompt =
        f.value("add_generation_prompt").is_none() || f.boolean("add_generation_prompt")?;
    let offered = if tools.offered() { tools.list.as_slice() } else { &[] };
    let text = prompt::render(&model, &messages, offered, generation_prompt, &extra)?;
    let reading = shaped(&model, &mut spec, tools, form::read(f)?.as_ref(), &text);
    let choices = spec.choices as usize;
    let scored = spec.logprobs.is_some();
    Ok(Request {
        // A template writes its own start token.
        prompts: vec![Prompt::Text(text, false)],
        spec,
        stream,
        voice: Box::new(move |head, _| {
            Box::new(ChatVoice::new(model, head, choices, &reading, scored, stream, include_usage))
        }),
    })
}

/// Puts the constraint into the answer's description; returns how to read what comes.
pub(super) fn shaped(
    model: &TextModel,
    spec: &mut AnswerSpec,
    tools: Tools,
    form: Option<&Shaped>,
    prompt: &str,
) -> Reading {
    let dialect = model.dialect.clone();
    let thought_is_open = dialect.reasoning.is_some() && prompt.trim_end().ends_with("<think>");
    let thought_is_over = prompt.trim_end().ends_with("</think>");
    let thinking = match &dialect.reasoning {
        Some(_) if thought_is_open => Some(Thinking::Open),
        Some(_) if !thought_is_over => Some(Thinking::Possible),
        _ => None,
    };
    let rule = grammar::rule(&dialect, &tools, form, thinking);
    spec.constraint = rule.constraint;
    spec.keep_special |= dialect.needs_special(tools.offered());
    Reading { dialect, tools, plain_json: rule.plain_json, thought_is_open }
}

/// Variables of the template that the client sets.
pub(super) fn template_arguments(f: &Fields) -> Result<Map<String, Value>, ApiError> {
    let mut extra = match f.value("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(extra)) => extra.clone(),
        Some(other) => return Err(wrong_type("chat_template_kwargs", "an object", other)),
    };
    if let Some(effort) = f.string("reasoning_effort")? {
        extra.entry("reasoning_effort").or_insert_with(|| effort.into());
        if effort == "none" {
            extra.entry("enable_thinking").or_insert(false.into());
        }
    }
    Ok(extra)
}

fn logprobs(f: &Fields) -> Result<Option<u32>, ApiError> {
    let wanted = f.boolean("logprobs")?;
    let top = f.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    match (wanted, top) {
        (false, Some(1..)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true")),
        (false, _) => Ok(None),
        (true, top) => Ok(Some(u32::try_from(top.unwrap_or(0)).unwrap_or(0))),
    }
}
