//! The front door: an OpenAI-compatible API over HTTP/1.1.

mod admission;
mod answer;
mod auth;
mod bodies;
mod bridge_headers;
mod cache_usage;
mod chat;
mod completions;
mod connections;
mod cors;
mod endpoint;
mod error;
mod form;
mod front;
mod head_limit;
mod held;
mod journal;
mod live;
mod logprobs;
mod metadata;
mod nodes;
mod openapi;
mod ops;
mod overload;
mod params;
mod refused;
mod responses;
mod sampling;
mod schema;
mod server;
mod sse;
mod telling;
mod tls;
mod tokens;
mod tools;
mod unread;
mod usage;
mod voice;
mod write_clock;

pub(crate) use admission::{Admission, Limits};
pub(crate) use bodies::Bodies;
pub(crate) use connections::Patience;
pub(crate) use cors::cors;
pub(crate) use server::serve;
pub(crate) use tls::Acceptor;

use crate::access_log::AccessLog;
use crate::discovery::Directory;
use crate::keys::KeyRing;
use crate::live::session::Sessions;
use crate::pipeline::Context;
use crate::settings::Settings;
use axum::Router;
use axum::middleware;
use axum::routing::{get, post};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower::util::option_layer;

/// What handlers share.
pub(crate) struct App {
    pub(crate) ctx: Arc<Context>,
    pub(crate) settings: Settings,
    /// The keys in force.
    pub(crate) keys: Arc<KeyRing>,
    /// What clients send.
    pub(crate) bodies: Bodies,
    /// The way in.
    pub(crate) admission: Admission,
    /// Connections at once, as far as the system allows.
    pub(crate) max_connections: usize,
    /// Where requests are logged, if they are.
    pub(crate) access_log: Option<AccessLog>,
    /// The machines on the bus, if there is one.
    pub(crate) directory: Option<Arc<Directory>>,
    /// Browsers that look at the live page.
    pub(crate) sessions: Sessions,
    /// One permit per socket that may look on.
    pub(crate) viewers: Arc<Semaphore>,
    /// Ends those sockets.
    pub(crate) viewers_shutdown: CancellationToken,
    /// Set on shutdown: running answers finish, new requests are refused.
    pub(crate) draining: AtomicBool,
    /// Start of the process, seconds since 1970.
    pub(crate) started_unix_s: u64,
}

/// All routes. Inference comes here only where browsers of other origins are let in, see [`front`].
fn router(app: Arc<App>) -> Router {
    let inference = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/responses", post(responses::create));
    let rest = Router::new()
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/models", get(ops::models))
        .route("/v1/models/{id}", get(ops::model))
        .route("/v1/bridge/nodes", get(nodes::list))
        .route("/v1/bridge/verdicts/{id}", get(ops::verdict));
    let admin = Router::new()
        .route("/metrics", get(ops::metrics))
        .layer(middleware::from_fn_with_state(app.clone(), auth::check_admin));
    let live = if app.ctx.live.is_enabled() { live::routes(&app) } else { Router::new() };
    // Without the setting a layer that does nothing.
    let cors = option_layer(app.settings.cors.clone());
    inference
        .merge(rest)
        .layer(middleware::from_fn_with_state(app.clone(), auth::check))
        .merge(admin)
        .route("/openapi.json", get(openapi::document))
        .merge(live)
        .route("/healthz", get(ops::healthz))
        .route("/readyz", get(ops::readyz))
        .fallback(ops::not_found)
        .method_not_allowed_fallback(ops::method_not_allowed)
        .layer(middleware::from_fn_with_state(app.clone(), head_limit::check))
        .layer(middleware::from_fn(bridge_headers::always))
        .layer(cors)
        .layer(middleware::from_fn_with_state(app.clone(), journal::keep))
        .with_state(app)
}
