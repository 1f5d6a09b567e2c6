//! `GET /` and what it loads: three files in the binary, nothing from elsewhere.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};

/// Only what this server itself sends may run, look like something, or be connected to.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub(crate) async fn html() -> Response {
    file("text/html; charset=utf-8", include_str!("page/index.html"))
}

/// Its script.
pub(crate) async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/live.js"))
}

/// Its style.
pub(crate) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("page/live.css"))
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let mut response = text.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}
