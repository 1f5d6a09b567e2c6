//! From a checked request to a response: runs it, waits for the verdict, streams or collects.

use super::App;
use super::bridge_headers::{self, Asked};
use super::error::ApiError;
use super::sampling::Common;
use super::shape::{Kind, Shape, usage};
use super::sse::SseBody;
use super::write_clock::WriteClock;
use crate::metrics::Stage;
use crate::pipeline::{self, Event, Failure, Job};
use axum::Json;
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use shared::control::Require;
use shared::tokens::TokenIds;
use shared::verdict::{Parties, Verdict, VerdictKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;

/// Text from this size on is tokenized outside the async threads.
const LONG_TEXT_BYTES: usize = 4096;

/// A prompt, as text or as ids.
pub(super) enum Prompt {
    /// Text to encode, with or without the tokens that the tokenizer puts around every text.
    Text(String, bool),
    /// Ids as they are.
    Ids(Vec<u32>),
}

/// What an endpoint has read from its request.
pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) prompt: Prompt,
    pub(super) common: Common,
    pub(super) max_new_tokens: Option<u32>,
}

/// Names and times of one exchange, known before the body is read.
pub(super) struct Exchange {
    pub(super) request_id: String,
    pub(super) worker_id: String,
    pub(super) clock: WriteClock,
    pub(super) arrived: Instant,
}

impl Exchange {
    pub(super) fn new(headers: &axum::http::HeaderMap, clock: WriteClock) -> Self {
        let request_id = bridge_headers::request_id(headers);
        let chosen = headers.contains_key(&bridge_headers::REQUEST_ID);
        // Two requests with one client-chosen name must not meet on the workers.
        let worker_id = if chosen { bridge_headers::fresh_id() } else { request_id.clone() };
        Self { request_id, worker_id, clock, arrived: Instant::now() }
    }

    /// An error before any worker was asked, with a verdict that has no receipt.
    pub(super) fn refuse(&self, app: &App, error: ApiError) -> Response {
        let parties = Parties { request_id: self.request_id.clone(), ..Parties::default() };
        let reason = Some(error.reason().to_owned());
        let verdict = Verdict::without_receipt(VerdictKind::Native, reason, parties, 0);
        app.ctx.metrics.ended(&verdict, self.arrived.elapsed());
        app.ctx.verdicts.put(&verdict);
        let mut response = error.into_response();
        bridge_headers::set(&mut response, &verdict);
        response
    }
}

/// Answers a request.
///
/// # Errors
/// [`ApiError`] before any worker was asked; later failures are responses with their own verdict.
pub(super) async fn answer(
    app: &Arc<App>,
    exchange: &Exchange,
    asked: Asked,
    request: Request,
) -> Result<Response, ApiError> {
    if app.draining.load(Ordering::Relaxed) {
        return Err(ApiError::shutting_down());
    }
    let permit = app.permits.clone().try_acquire_owned().map_err(|_| ApiError::too_many_requests())?;
    let tokens = tokenize(app, request.prompt).await?;
    let prompt_tokens =
        u32::try_from(tokens.len()).map_err(|_| ApiError::invalid("prompt", "far too long"))?;
    let job = Job {
        request_id: exchange.request_id.clone(),
        worker_id: exchange.worker_id.clone(),
        tokens,
        max_new_tokens: request.max_new_tokens,
        sampling: request.common.sampling,
        stops: request.common.stops,
        require: asked.require,
        route: asked.route,
        arrived: exchange.arrived,
    };
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let shape = Shape::new(request.kind, &exchange.request_id, created, app.ctx.model.name.clone());
    let mut events = pipeline::start(app.ctx.clone(), job, permit);
    if !request.common.stream {
        return Ok(collect(events, &shape).await);
    }
    let clock = exchange.clock.clone();
    let usage_wanted = request.common.include_usage;
    let (verdict, body) =
        match verdict_within(&mut events, early_after(asked, app.settings.early_headers_after)).await {
            Some(Ok(verdict)) => {
                let body = SseBody::after_verdict(verdict.clone(), events, shape, usage_wanted, clock);
                (verdict, body)
            }
            Some(Err(failure)) => return Ok(failed(&failure)),
            None => {
                let parties = Parties { request_id: exchange.request_id.clone(), ..Parties::default() };
                let pending = Verdict::without_receipt(VerdictKind::Pending, None, parties, prompt_tokens);
                (Box::new(pending), SseBody::early(events, shape, usage_wanted, clock))
            }
        };
    let mut response = Body::from_stream(body.into_stream()).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    bridge_headers::set(&mut response, &verdict);
    Ok(response)
}

async fn tokenize(app: &Arc<App>, prompt: Prompt) -> Result<TokenIds, ApiError> {
    let since = Instant::now();
    let ids = match prompt {
        Prompt::Ids(ids) => ids,
        Prompt::Text(text, add_special) => {
            let tokenizer = app.ctx.model.tokenizer.clone();
            let long = text.len() >= LONG_TEXT_BYTES;
            let encode = move || tokenizer.encode(&text, add_special);
            let encoded = if long {
                tokio::task::spawn_blocking(encode).await.map_err(|e| ApiError::internal(e.to_string()))?
            } else {
                encode()
            };
            encoded.map_err(|e| ApiError::invalid("prompt", e.to_string()))?
        }
    };
    if ids.is_empty() {
        return Err(ApiError::invalid("prompt", "the prompt has no tokens"));
    }
    app.ctx.metrics.stage_ms(Stage::Tokenize, since.elapsed().as_secs_f64() * 1000.0);
    Ok(ids.into())
}

/// When headers go out without a verdict. A client with a requirement is owed a refusal's real status, which
/// the server's setting alone must not take away; its own wish does.
fn early_after(asked: Asked, setting: Option<Duration>) -> Option<Duration> {
    match asked {
        Asked { early: true, .. } => Some(Duration::ZERO),
        Asked { require: Require::Nothing, .. } => setting,
        Asked { require: Require::Any | Require::Complete, .. } => None,
    }
}

/// Waits for the verdict or a failure; `None` when `limit` passed first.
async fn verdict_within(
    events: &mut mpsc::Receiver<Event>,
    limit: Option<Duration>,
) -> Option<Result<Box<Verdict>, Failure>> {
    let decided = decided(events);
    match limit {
        None => Some(decided.await),
        Some(Duration::ZERO) => None,
        Some(limit) => tokio::time::timeout(limit, decided).await.ok(),
    }
}

async fn decided(events: &mut mpsc::Receiver<Event>) -> Result<Box<Verdict>, Failure> {
    loop {
        match events.recv().await {
            Some(Event::Started(verdict)) => return Ok(verdict),
            Some(Event::Failed(failure)) => return Err(failure),
            Some(_) => {}
            None => return Err(vanished()),
        }
    }
}

/// A whole answer in one response.
async fn collect(mut events: mpsc::Receiver<Event>, shape: &Shape) -> Response {
    let verdict = match decided(&mut events).await {
        Ok(verdict) => verdict,
        Err(failure) => return failed(&failure),
    };
    let mut text = String::new();
    loop {
        match events.recv().await {
            Some(Event::Text { text: piece, .. }) => text.push_str(&piece),
            Some(Event::Finished { finish_reason, completion_tokens }) => {
                let usage = usage(&verdict, completion_tokens);
                let mut response = Json(shape.whole(&text, finish_reason, &usage)).into_response();
                bridge_headers::set(&mut response, &verdict);
                return response;
            }
            Some(Event::Failed(failure)) => return failed(&failure),
            Some(Event::Started(_) | Event::Progress { .. }) => {}
            None => return failed(&vanished()),
        }
    }
}

fn failed(failure: &Failure) -> Response {
    let mut response = ApiError::from(&failure.kind).into_response();
    bridge_headers::set(&mut response, &failure.verdict);
    response
}

/// The request's task ended without a last event, which only a panic in it could cause.
fn vanished() -> Failure {
    let verdict =
        Verdict::without_receipt(VerdictKind::Native, Some("internal".to_owned()), Parties::default(), 0);
    let kind = pipeline::FailureKind::Protocol("the request ended without an answer".to_owned());
    Failure { kind, verdict: Box::new(verdict) }
}
