//! The live page and its socket, and who may see them.
//!
//! Without API keys everybody who reaches the port may look. With keys it takes one with `admin = true`: as a bearer
//! token, or as the password of HTTP Basic authentication, which is what browsers can ask a person for. The page then
//! leaves a cookie, because a browser's WebSocket cannot carry the key itself.

use super::App;
use super::auth;
use super::error::ApiError;
use crate::live::session::same_origin;
use crate::live::socket::MAX_INBOUND_BYTES;
use crate::live::{page, socket};
use crate::record;
use axum::Router;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use std::sync::Arc;

/// The routes.
pub(super) fn routes(app: &Arc<App>) -> Router<Arc<App>> {
    Router::new()
        .route("/", get(page::html))
        .route("/live/live.js", get(page::script))
        .route("/live/live.css", get(page::style))
        .layer(middleware::from_fn_with_state(app.clone(), check_page))
        .route("/v1/bridge/events", get(events))
}

async fn check_page(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if let Err(error) = authorize(&app, request.headers()) {
        let mut response = error.into_response();
        // Makes a browser ask for the key.
        let ask = HeaderValue::from_static("Basic realm=\"pd-bridge: any name, an admin key as password\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, ask);
        return response;
    }
    let mut response = next.run(request).await;
    if app.keys.is_on()
        && let Ok(cookie) = HeaderValue::from_str(&app.sessions.cookie(app.settings.tls.is_some()))
    {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}

async fn events(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    let text = |name| headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok());
    if headers.contains_key(header::ORIGIN) && !same_origin(text(header::ORIGIN), text(header::HOST)) {
        return ApiError::forbidden_because("this socket is for pages of this server").into_response();
    }
    let session = text(header::COOKIE).is_some_and(|cookies| app.sessions.accepts(cookies));
    if !session && let Err(error) = authorize(&app, &headers) {
        return error.into_response();
    }
    let Ok(viewer) = app.viewers.clone().try_acquire_owned() else {
        return ApiError::busy("too many viewers of the live page").into_response();
    };
    match upgrade {
        Ok(upgrade) => {
            let shutdown = app.viewers_shutdown.clone();
            let upgrade = upgrade.max_message_size(MAX_INBOUND_BYTES).max_frame_size(MAX_INBOUND_BYTES);
            upgrade.on_upgrade(move |ws| async move {
                let _viewer = viewer;
                socket::serve(ws, app.ctx.live.clone(), app, shutdown).await;
            })
        }
        Err(rejection) => ApiError::invalid("upgrade", rejection.to_string()).into_response(),
    }
}

/// Passes everybody without keys, else those with an administrator's key.
fn authorize(app: &App, headers: &HeaderMap) -> Result<(), ApiError> {
    if !app.keys.is_on() {
        return Ok(());
    }
    let key = auth::administrator(app, headers)?;
    record::current().authorized(key.name, None);
    Ok(())
}

impl socket::Surroundings for App {
    fn model(&self) -> &str {
        &self.ctx.model.name
    }

    fn nodes(&self) -> serde_json::Value {
        serde_json::to_value(self.ctx.fleet.view()).unwrap_or_default()
    }
}
