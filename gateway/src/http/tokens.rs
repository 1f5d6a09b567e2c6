//! `POST /tokenize` and `POST /detokenize`, in the form that vLLM gave them.

use super::App;
use super::answer::{Prompt, encode};
use super::chat::{messages, prompt, template_arguments};
use super::endpoint;
use super::error::ApiError;
use super::params::{Fields, token_id, wrong_type};
use super::refused;
use super::tools::Tools;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// The tokens of a text or of a conversation.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Tokenized {
    /// How many they are.
    count: usize,
    /// Longest prompt plus answer; null while no decode worker is connected.
    max_model_len: Option<u32>,
    tokens: Vec<u32>,
    /// Their spelling in the vocabulary, when asked for.
    token_strs: Option<Vec<String>>,
}

/// The text of tokens.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Detokenized {
    prompt: String,
}

/// Tokenizes `prompt`, or `messages` after the chat template.
pub(super) async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let f = endpoint::fields(&app, body).await?;
    refused::check(&f)?;
    let wants_strs = f.boolean("return_token_strs")?;
    let tokens = encode(&app, text(&app, &f)?).await?;
    let tokenizer = &app.ctx.model.tokenizer;
    let token_strs =
        wants_strs.then(|| tokens.iter().map(|id| tokenizer.id_to_token(*id).unwrap_or_default()).collect());
    let max_model_len = app.ctx.fleet.decoder().map(|d| d.hello.max_tokens);
    Ok(Json(Tokenized { count: tokens.len(), max_model_len, tokens, token_strs }).into_response())
}

fn text(app: &App, f: &Fields) -> Result<Prompt, ApiError> {
    let special = |default| match f.value("add_special_tokens") {
        None => Ok(default),
        Some(_) => f.boolean("add_special_tokens"),
    };
    match (f.value("prompt"), f.value("messages")) {
        (Some(_), Some(_)) => Err(ApiError::invalid("prompt", "either `prompt` or `messages`, not both")),
        (None, None) => Err(ApiError::invalid("prompt", "`prompt` or `messages` is required")),
        (Some(Value::String(text)), None) => Ok(Prompt::Text(text.clone(), special(true)?)),
        (Some(other), None) => Err(wrong_type("prompt", "a string", other)),
        (None, Some(_)) => {
            let messages = messages::read(f)?;
            let tools = Tools::read(f)?;
            let extra = template_arguments(f)?;
            let generation =
                f.value("add_generation_prompt").is_none() || f.boolean("add_generation_prompt")?;
            let text = prompt::render(&app.ctx.model, &messages, &tools.list, generation, &extra)?;
            // A template writes its own start token.
            Ok(Prompt::Text(text, special(false)?))
        }
    }
}

/// Joins tokens to a text, special tokens spelled out.
pub(super) async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let f = endpoint::fields(&app, body).await?;
    let list = match f.value("tokens") {
        None => return Err(ApiError::invalid("tokens", "`tokens` is required")),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong_type("tokens", "a list of token ids", other)),
    };
    let model = &app.ctx.model;
    let id = |(i, v): (usize, &Value)| {
        let param = format!("tokens[{i}]");
        if !v.is_number() {
            return Err(wrong_type(&param, "a token id", v));
        }
        let known = token_id(v).filter(|id| (*id as usize) < model.spec.vocab_size);
        known.ok_or_else(|| ApiError::invalid(param, format!("{v} is outside the vocabulary")))
    };
    let ids = list.iter().enumerate().map(id).collect::<Result<Vec<_>, _>>()?;
    let prompt =
        model.tokenizer.decode_with_special(&ids).map_err(|e| ApiError::invalid("tokens", e.to_string()))?;
    Ok(Json(Detokenized { prompt }).into_response())
}
