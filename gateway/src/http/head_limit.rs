//! The cap on a request's head. The connection's own buffer limit is soft (it may be overrun by one read),
//! so what it let through is counted again here.

use super::App;
use super::error::ApiError;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use std::sync::Arc;

/// Bytes around a header: `: ` and the line's end.
const LINE_OVERHEAD_BYTES: usize = 4;

/// Answers 431 to a head that is larger than the setting allows.
pub(super) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match within(&app, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Whether a head is as small as the setting wants it.
///
/// # Errors
/// 431 when it is not.
pub(super) fn within<B>(app: &App, request: &axum::http::Request<B>) -> Result<(), ApiError> {
    let line = |(name, value): (&axum::http::HeaderName, &axum::http::HeaderValue)| {
        name.as_str().len() + value.len() + LINE_OVERHEAD_BYTES
    };
    let target = request.uri().path_and_query().map_or(0, |p| p.as_str().len());
    let head_bytes = target + request.headers().iter().map(line).sum::<usize>();
    if head_bytes > app.settings.max_header_bytes {
        return Err(ApiError::head_too_large(app.settings.max_header_bytes));
    }
    Ok(())
}
