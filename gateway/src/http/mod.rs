//! The front door: an OpenAI-compatible API over HTTP/1.1.

mod answer;
mod auth;
mod bridge_headers;
mod chat;
mod completions;
mod error;
mod head_limit;
mod logprobs;
mod metadata;
mod ops;
mod params;
mod refused;
mod sampling;
mod server;
mod sse;
mod telling;
mod usage;
mod voice;
mod write_clock;

pub(crate) use server::serve;

use crate::pipeline::Context;
use crate::settings::Settings;
use axum::Router;
use axum::middleware;
use axum::routing::{get, post};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::sync::Semaphore;

/// What handlers share.
pub(crate) struct App {
    pub(crate) ctx: Arc<Context>,
    pub(crate) settings: Settings,
    /// One permit per request that may run.
    pub(crate) permits: Arc<Semaphore>,
    /// Set on shutdown: running answers finish, new requests are refused.
    pub(crate) draining: AtomicBool,
    /// Start of the process, seconds since 1970.
    pub(crate) started_unix_s: u64,
}

/// All routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    let inference = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create));
    let rest = Router::new()
        .route("/v1/models", get(ops::models))
        .route("/v1/models/{id}", get(ops::model))
        .route("/v1/bridge/verdicts/{id}", get(ops::verdict));
    inference
        .merge(rest)
        .layer(middleware::from_fn_with_state(app.clone(), auth::check))
        .route("/healthz", get(ops::healthz))
        .route("/readyz", get(ops::readyz))
        .route("/metrics", get(ops::metrics))
        .fallback(ops::not_found)
        .method_not_allowed_fallback(ops::method_not_allowed)
        .layer(middleware::from_fn_with_state(app.clone(), head_limit::check))
        .layer(middleware::from_fn(bridge_headers::always))
        .with_state(app)
}
