//! Everything that is not inference: models, health, metrics, verdicts.

use super::error::ApiError;
use super::params::Fields;
use super::{App, cache_usage};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `GET /v1/models`
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [describe(&app)]}))
}

/// `GET /v1/models/{id}`
pub(super) async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    if id == app.ctx.model.name {
        Json(describe(&app)).into_response()
    } else {
        ApiError::model_not_found(&id).into_response()
    }
}

fn describe(app: &App) -> Value {
    let max_tokens = app.ctx.fleet.decoder().map(|d| d.hello.max_tokens);
    json!({"id": app.ctx.model.name, "object": "model", "created": app.started_unix_s, "owned_by": "pd-bridge",
        "max_model_len": max_tokens})
}

/// Accepts the served model's name, or none at all.
///
/// # Errors
/// 400 for a wrong type, 404 for another model.
pub(super) fn check_model(app: &App, f: &Fields) -> Result<(), ApiError> {
    match f.string("model")? {
        None => Ok(()),
        Some(name) if name == app.ctx.model.name => Ok(()),
        Some(name) => Err(ApiError::model_not_found(name)),
    }
}

/// `GET /healthz`: the process runs.
pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

/// `GET /readyz`: a request would find a decoder.
pub(super) async fn readyz(State(app): State<Arc<App>>) -> Response {
    if app.draining.load(Ordering::Relaxed) {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response()
    } else if app.ctx.fleet.is_ready() {
        "ready\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no decode worker\n").into_response()
    }
}

/// `GET /metrics`
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    app.ctx.metrics.observe(&app.ctx.fleet, app.directory.as_deref());
    if let Some(share) = cache_usage::share(&app.ctx.fleet).await {
        app.ctx.metrics.vllm.cache_usage(share);
    }
    let content_type = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (content_type, app.ctx.metrics.render()).into_response()
}

/// `GET /v1/bridge/verdicts/{id}`
pub(super) async fn verdict(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    match app.ctx.verdicts.find(&id) {
        Some(verdict) => Json(&*verdict).into_response(),
        None => ApiError::not_found("no verdict of that request is known (any more)").into_response(),
    }
}

/// Unknown paths.
pub(super) async fn not_found(uri: Uri) -> ApiError {
    ApiError::not_found(format!("there is nothing at {}", uri.path()))
}

/// Known paths, other methods.
pub(super) async fn method_not_allowed() -> ApiError {
    ApiError::method_not_allowed()
}
