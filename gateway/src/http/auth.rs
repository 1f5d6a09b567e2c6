//! Who asks: API keys, what each of them may use, and what only an administrator may see.

use super::App;
use super::error::ApiError;
use crate::keys::{ApiKey, Refusal};
use crate::record;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use std::sync::Arc;
use std::time::Duration;

/// What a client whose requests run too long may as well wait before it looks again.
const CONCURRENCY_RETRY: Duration = Duration::from_secs(1);

/// Refuses requests without a known key, if any key is configured, and those beyond the key's limits.
pub(super) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match admit(&app, request.method(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Lets a request in and notes whose it is.
///
/// # Errors
/// 401 without a known key, if any key is configured; 429 beyond the key's limits.
pub(super) fn admit(app: &App, method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    if !app.keys.is_on() {
        return Ok(());
    }
    let key = authorized(app, headers)?;
    // Looking at models costs nothing; what is limited is work.
    let permit = if method == Method::POST { key.admit().map_err(too_many)? } else { None };
    record::current().authorized(key.name, permit);
    Ok(())
}

/// Refuses requests without an administrator's key, if any key is configured and the setting does not open the door.
pub(super) async fn check_admin(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if !app.keys.is_on() || app.settings.public_metrics {
        return next.run(request).await;
    }
    match authorized(&app, request.headers()) {
        Ok(key) if key.admin => {
            record::current().authorized(key.name, None);
            next.run(request).await
        }
        Ok(_) => ApiError::forbidden().into_response(),
        Err(error) => error.into_response(),
    }
}

/// The administrator whose key a request carries: as a bearer token, or as a password beside any name.
pub(super) fn administrator(app: &App, headers: &HeaderMap) -> Result<ApiKey, ApiError> {
    let basic = basic_password(headers);
    let key = match &basic {
        Some(password) => app.keys.find(password).ok_or_else(ApiError::unauthorized)?,
        None => authorized(app, headers)?,
    };
    if key.admin { Ok(key) } else { Err(ApiError::forbidden()) }
}

fn basic_password(headers: &HeaderMap) -> Option<String> {
    let mut values = headers.get_all(header::AUTHORIZATION).into_iter();
    let (value, None) = (values.next()?, values.next()) else { return None };
    let (scheme, encoded) = value.to_str().ok()?.split_once(' ')?;
    let decoded = BASE64.decode(encoded.trim()).ok().filter(|_| scheme.eq_ignore_ascii_case("basic"))?;
    String::from_utf8(decoded).ok()?.split_once(':').map(|(_, password)| password.to_owned())
}

fn authorized(app: &App, headers: &HeaderMap) -> Result<ApiKey, ApiError> {
    let secret = bearer(headers)?.ok_or_else(ApiError::unauthorized)?;
    app.keys.find(secret).ok_or_else(ApiError::unauthorized)
}

fn bearer(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let mut values = headers.get_all(header::AUTHORIZATION).into_iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        // Which of them a proxy before this one has checked can't be known.
        return Err(ApiError::invalid("authorization", "more than one Authorization header"));
    }
    let scheme_and_secret = value.to_str().ok().and_then(|v| v.split_once(' '));
    Ok(scheme_and_secret.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, s)| s.trim()))
}

fn too_many(refusal: Refusal) -> ApiError {
    match refusal {
        Refusal::Rate(wait) => {
            ApiError::too_many_requests("this key's requests per minute are used up", wait)
        }
        Refusal::Concurrent(most) => ApiError::too_many_requests(
            format!("this key may have {most} requests under way at once"),
            CONCURRENCY_RETRY,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn browsers_send_the_key_as_a_password() {
        let headers = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            headers
        };
        let basic = format!("Basic {}", BASE64.encode("me:sk:1"));
        assert_eq!(basic_password(&headers(&basic)).as_deref(), Some("sk:1"));
        for other in ["Bearer sk", "Basic !", "Basic", &format!("Basic {}", BASE64.encode("no colon"))] {
            assert_eq!(basic_password(&headers(other)), None, "{other}");
        }
    }

    #[test]
    fn only_one_bearer_counts() {
        let headers = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::AUTHORIZATION, HeaderValue::from_static(value));
            }
            headers
        };
        assert_eq!(bearer(&headers(&["bearer  abc "])), Ok(Some("abc")));
        assert_eq!(bearer(&headers(&[])), Ok(None));
        assert_eq!(bearer(&headers(&["Basic abc"])), Ok(None));
        assert!(bearer(&headers(&["Bearer a", "Bearer b"])).is_err());
    }
}
