//! From a checked request to a response: runs it, waits for the verdict, streams or collects.

use super::App;
use super::bridge_headers::{self, Asked};
use super::error::ApiError;
use super::sse::SseBody;
use super::telling::{Step, Telling};
use super::voice::{Head, Voice};
use super::write_clock::WriteClock;
use crate::metrics::Stage;
use crate::pipeline::{self, AnswerSpec, Failure, Job};
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use shared::control::Require;
use shared::tokens::TokenIds;
use shared::trace::{self, Span};
use shared::verdict::{Parties, Verdict, VerdictKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Text from this size on is tokenized outside the async threads.
const LONG_TEXT_BYTES: usize = 4096;

/// A prompt, as text or as ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Prompt {
    /// Text to encode, with or without the tokens that the tokenizer puts around every text.
    Text(String, bool),
    /// Ids as they are.
    Ids(Vec<u32>),
}

/// What an endpoint has read from its request.
pub(super) struct Request {
    /// At least one.
    pub(super) prompts: Vec<Prompt>,
    pub(super) spec: AnswerSpec,
    pub(super) stream: bool,
    /// Makes the voice, once the prompts' tokens and the answer's head are known.
    pub(super) voice: MakeVoice,
}

/// Makes the voice of an answer.
pub(super) type MakeVoice = Box<dyn FnOnce(Head, &[TokenIds]) -> Box<dyn Voice> + Send>;

/// Names and times of one exchange, known before the body is read.
pub(super) struct Exchange {
    pub(super) request_id: String,
    pub(super) worker_id: String,
    pub(super) clock: WriteClock,
    pub(super) arrived: Instant,
}

impl Exchange {
    pub(super) fn new(headers: &axum::http::HeaderMap, clock: WriteClock) -> Self {
        let request_id = crate::record::current().request_id.clone();
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
        crate::record::current().ended(&verdict);
        let mut response = error.into_response();
        bridge_headers::set(&mut response, &verdict);
        app.ctx.verdicts.put(Arc::new(verdict));
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
    let permit = app.admission.enter().await?;
    let several = request.prompts.len() > 1;
    if several && request.stream && asked.require != Require::Nothing {
        let why = "a bridge can't be required for several prompts in one stream";
        return Err(ApiError::unsupported("prompt", why));
    }
    let tokens = tokenize_all(app, request.prompts).await?;
    let prompt_tokens: usize = tokens.iter().map(|t| t.len()).sum();
    let prompt_tokens =
        u32::try_from(prompt_tokens).map_err(|_| ApiError::invalid("prompt", "far too long"))?;
    let created_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let id = exchange.request_id.clone();
    let voice =
        (request.voice)(Head { id: id.clone(), created_unix_s, model: app.ctx.model.name.clone() }, &tokens);
    let choices = request.spec.choices;
    let permit = Arc::new(permit);
    let start = |(i, tokens)| {
        let part = |id: &str| if several { format!("{id}-{i}") } else { id.to_owned() };
        let job = Job {
            request_id: part(&exchange.request_id),
            worker_id: part(&exchange.worker_id),
            tokens,
            spec: request.spec.clone(),
            require: asked.require,
            route: asked.route,
            whole: !request.stream,
            arrived: exchange.arrived,
        };
        pipeline::start(app.ctx.clone(), job, permit.clone())
    };
    let events = tokens.into_iter().enumerate().map(start).collect();
    let mut telling = Telling::new(events, choices, app.ctx.clone(), id, voice);
    if !request.stream {
        return Ok(collect(telling).await);
    }
    // With several prompts one may be far into its answer before another has begun.
    let limit =
        if several { Some(Duration::ZERO) } else { early_after(asked, app.settings.early_headers_after) };
    let (verdict, early) = match verdict_within(&mut telling, limit).await {
        Some(Ok(verdict)) => (verdict, false),
        Some(Err(failure)) => return Ok(failed(&failure)),
        None => {
            let parties = Parties { request_id: exchange.request_id.clone(), ..Parties::default() };
            (Arc::new(Verdict::without_receipt(VerdictKind::Pending, None, parties, prompt_tokens)), true)
        }
    };
    let body = SseBody::new(telling, early, exchange.clock.clone(), app.settings.sse_keep_alive);
    let mut response = Body::from_stream(body.into_stream()).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    bridge_headers::set(&mut response, &verdict);
    Ok(response)
}

async fn tokenize_all(app: &Arc<App>, prompts: Vec<Prompt>) -> Result<Vec<TokenIds>, ApiError> {
    let mut all = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        all.push(tokenize(app, prompt).await?);
    }
    Ok(all)
}

async fn tokenize(app: &Arc<App>, prompt: Prompt) -> Result<TokenIds, ApiError> {
    let since = Instant::now();
    let _span = Span::below("tokenize", trace::current().as_ref());
    let ids = encode(app, prompt).await?;
    if ids.is_empty() {
        return Err(ApiError::invalid("prompt", "the prompt has no tokens"));
    }
    app.ctx.metrics.stage_ms(Stage::Tokenize, since.elapsed().as_secs_f64() * 1000.0);
    Ok(ids.into())
}

/// The tokens of a prompt, maybe none.
///
/// # Errors
/// 400 where the tokenizer can't write the text.
pub(super) async fn encode(app: &App, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let (text, add_special) = match prompt {
        Prompt::Ids(ids) => return Ok(ids),
        Prompt::Text(text, add_special) => (text, add_special),
    };
    let tokenizer = app.ctx.model.tokenizer.clone();
    let long = text.len() >= LONG_TEXT_BYTES;
    let encode = move || tokenizer.encode(&text, add_special);
    let encoded = if long {
        tokio::task::spawn_blocking(encode).await.map_err(|e| ApiError::internal(e.to_string()))?
    } else {
        encode()
    };
    encoded.map_err(|e| ApiError::invalid("prompt", e.to_string()))
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
    telling: &mut Telling,
    limit: Option<Duration>,
) -> Option<Result<Arc<Verdict>, Box<Failure>>> {
    let decided = decided(telling);
    match limit {
        None => Some(decided.await),
        Some(Duration::ZERO) => None,
        Some(limit) => tokio::time::timeout(limit, decided).await.ok(),
    }
}

async fn decided(telling: &mut Telling) -> Result<Arc<Verdict>, Box<Failure>> {
    loop {
        if let Some(verdict) = telling.verdict() {
            return Ok(verdict);
        }
        if let Step::Failed(failure) = telling.step().await {
            return Err(failure);
        }
    }
}

/// A whole answer in one response.
async fn collect(mut telling: Telling) -> Response {
    loop {
        match telling.step().await {
            Step::Failed(failure) => return failed(&failure),
            Step::Over => break,
            Step::Progress { .. } | Step::Started | Step::Said(_) => {}
        }
    }
    let body = telling.frames.pop().unwrap_or_default();
    let json = HeaderValue::from_static("application/json");
    let mut response = ([(header::CONTENT_TYPE, json)], body).into_response();
    if let Some(verdict) = telling.verdict() {
        bridge_headers::set(&mut response, &verdict);
    }
    response
}

fn failed(failure: &Failure) -> Response {
    let mut response = ApiError::from(&failure.kind).into_response();
    bridge_headers::set(&mut response, &failure.verdict);
    response
}
