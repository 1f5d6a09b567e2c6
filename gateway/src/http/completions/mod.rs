//! `POST /v1/completions`

mod prompt;
pub(super) mod voice;

use super::App;
use super::answer::{Prompt, Request};
use super::endpoint;
use super::error::ApiError;
use super::form;
use super::params::{Fields, wrong_type};
use super::sampling::{Common, MAX_TOP_LOGPROBS, max_tokens};
use super::write_clock::WriteClock;
use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::Value;
use std::sync::Arc;
use voice::{CompletionVoice, Echo};

/// What OpenAI's endpoint produces when nothing is said.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Completes texts or lists of token ids.
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
    let prompts = prompt::read(f)?;
    let echo = f.boolean("echo")?;
    spec.logprobs = logprobs(f)?;
    spec.prompt_logprobs = spec.logprobs.filter(|_| echo);
    // With nothing to add, only the echo is of interest.
    let least = i64::from(!echo);
    spec.max_new_tokens = Some(max_tokens(f, "max_tokens", least)?.unwrap_or(DEFAULT_MAX_TOKENS));
    spec.constraint = form::read(f)?;
    let choices = spec.choices;
    let scored = spec.logprobs.is_some();
    let texts: Vec<Option<String>> = prompts
        .iter()
        .map(|prompt| match prompt {
            Prompt::Text(text, _) => Some(text.clone()),
            Prompt::Ids(_) => None,
        })
        .collect();
    Ok(Request {
        prompts,
        spec,
        stream,
        voice: Box::new(move |head, tokens| {
            let echoes = texts.into_iter().zip(tokens).map(|(text, ids)| Echo { text, ids: ids.clone() });
            let echoes = if echo { echoes.collect() } else { Vec::new() };
            let choices = tokens.len() * choices as usize;
            Box::new(CompletionVoice::new(model, head, choices, echoes, scored, stream, include_usage))
        }),
    })
}

fn logprobs(f: &Fields) -> Result<Option<u32>, ApiError> {
    match f.value("logprobs") {
        // The chat endpoint's way to say that none are wanted.
        None | Some(Value::Bool(false)) => Ok(None),
        Some(other @ Value::Bool(true)) => Err(wrong_type("logprobs", "an integer", other)),
        Some(_) => Ok(f.integer("logprobs", 0, MAX_TOP_LOGPROBS)?.and_then(|n| u32::try_from(n).ok())),
    }
}
