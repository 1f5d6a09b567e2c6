//! The bridge's own headers: what a client may ask, and the verdict on every response.

use super::error::{ApiError, Reason};
use crate::planner::Route;
use crate::record;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use shared::control::Require;
use shared::verdict::{Parties, Verdict, VerdictKind};

pub(super) const VERDICT: HeaderName = HeaderName::from_static("x-pd-bridge");
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest request id that is taken over from a client.
const MAX_REQUEST_ID_CHARS: usize = 64;

/// What the headers of a request ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) require: Require,
    pub(super) route: Route,
    /// Response headers at once, verdict later.
    pub(super) early: bool,
}

impl Asked {
    /// Reads `X-PD-Bridge-Require`, `-Only`, `-Route` and `-Early`.
    ///
    /// # Errors
    /// 400 naming the header, for a value that is not defined: guessing would break a promise.
    pub(super) fn read(headers: &HeaderMap) -> Result<Self, ApiError> {
        let require = match text(headers, "x-pd-bridge-require")?.as_deref() {
            None if flag(headers, "x-pd-bridge-only")? => Require::Any,
            None => Require::Nothing,
            Some("any") => Require::Any,
            Some("complete") => Require::Complete,
            Some(other) => return Err(bad("X-PD-Bridge-Require", other, "`complete` or `any`")),
        };
        let route = match text(headers, "x-pd-bridge-route")?.as_deref() {
            None | Some("auto") => Route::Auto,
            Some("native") => Route::Native,
            Some("bridge") => Route::Bridge,
            Some(other) => return Err(bad("X-PD-Bridge-Route", other, "`native`, `bridge` or `auto`")),
        };
        Ok(Self { require, route, early: flag(headers, "x-pd-bridge-early")? })
    }
}

/// The client's `x-request-id` where it is usable as a name, else a fresh one.
pub(super) fn request_id(headers: &HeaderMap) -> String {
    let usable = |id: &&str| {
        !id.is_empty()
            && id.len() <= MAX_REQUEST_ID_CHARS
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
    };
    let given = headers.get(&REQUEST_ID).and_then(|v| v.to_str().ok()).filter(usable);
    given.map_or_else(fresh_id, str::to_owned)
}

/// An id that nobody else has.
pub(super) fn fresh_id() -> String {
    format!("req-{}", uuid::Uuid::now_v7().simple())
}

/// Puts the verdict on a response.
pub(super) fn set(response: &mut Response, verdict: &Verdict) {
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&verdict.to_header_value()) {
        headers.insert(VERDICT, value);
    }
    if let Ok(value) = HeaderValue::from_str(&verdict.request_id) {
        headers.insert(REQUEST_ID, value);
    }
}

/// Middleware: every response of an inference endpoint has a verdict, whatever made it.
pub(super) async fn always(request: Request, next: Next) -> Response {
    let inference =
        matches!(request.uri().path(), "/v1/chat/completions" | "/v1/completions" | "/v1/responses");
    let response = next.run(request).await;
    if inference { with_verdict(response) } else { response }
}

/// A response of an inference endpoint, with a verdict if it has none yet.
pub(super) fn with_verdict(mut response: Response) -> Response {
    if !response.headers().contains_key(&VERDICT) {
        let reason = response.extensions().get::<Reason>().map_or("invalid_request", |r| r.0);
        let parties = Parties { request_id: record::current().request_id.clone(), ..Parties::default() };
        set(
            &mut response,
            &Verdict::without_receipt(VerdictKind::Native, Some(reason.to_owned()), parties, 0),
        );
    }
    response
}

fn text(headers: &HeaderMap, name: &'static str) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let value = value.to_str().map_err(|_| ApiError::invalid(name, format!("{name} is not plain text")))?;
    Ok(Some(value.trim().to_ascii_lowercase()))
}

fn flag(headers: &HeaderMap, name: &'static str) -> Result<bool, ApiError> {
    match text(headers, name)?.as_deref() {
        None | Some("0" | "false") => Ok(false),
        Some("1" | "true") => Ok(true),
        Some(other) => Err(bad(name, other, "`1` or `0`")),
    }
}

fn bad(name: &str, value: &str, allowed: &str) -> ApiError {
    ApiError::invalid(name, format!("{name} is `{value}`, allowed is {allowed}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&'static str, &str)]) -> Result<Asked, ApiError> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.insert(*name, HeaderValue::from_str(value).unwrap());
        }
        Asked::read(&headers)
    }

    #[test]
    fn headers_mean_what_the_protocol_says() {
        let nothing = Asked { require: Require::Nothing, route: Route::Auto, early: false };
        assert_eq!(read(&[]), Ok(nothing));
        assert_eq!(read(&[("x-pd-bridge-only", "1")]), Ok(Asked { require: Require::Any, ..nothing }));
        assert_eq!(
            read(&[("x-pd-bridge-require", "Complete")]),
            Ok(Asked { require: Require::Complete, ..nothing })
        );
        assert_eq!(read(&[("x-pd-bridge-route", "native")]), Ok(Asked { route: Route::Native, ..nothing }));
        assert_eq!(read(&[("x-pd-bridge-early", "1")]), Ok(Asked { early: true, ..nothing }));
        assert!(read(&[("x-pd-bridge-require", "maybe")]).is_err());
        assert!(read(&[("x-pd-bridge-route", "fast")]).is_err());
    }

    #[test]
    fn ids_of_clients_are_kept_when_harmless() {
        let mut headers = HeaderMap::new();
        assert!(request_id(&headers).starts_with("req-"));
        headers.insert(REQUEST_ID, HeaderValue::from_static("abc-1"));
        assert_eq!(request_id(&headers), "abc-1");
        headers.insert(REQUEST_ID, HeaderValue::from_static("a\"b"));
        assert!(request_id(&headers).starts_with("req-"));
    }
}
