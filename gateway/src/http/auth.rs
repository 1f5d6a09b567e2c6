//! API keys: constant-time compare over digests, so neither content nor length of a key leaks.

use super::App;
use super::error::ApiError;
use crate::settings::ApiKey;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use std::sync::Arc;
use subtle::ConstantTimeEq as _;

/// Refuses requests without a known key, if any key is configured.
pub(super) async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let keys = &app.settings.api_keys;
    if keys.is_empty() {
        return next.run(request).await;
    }
    match bearer(request.headers()).and_then(|secret| find(keys, secret)) {
        Some(key) => {
            tracing::debug!(api_key = %key.name, path = %request.uri().path(), "authorized");
            next.run(request).await
        }
        None => ApiError::unauthorized().into_response(),
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(axum::http::header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, secret) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
}

/// Compares with every key, so that the time does not tell which one came close.
fn find<'a>(keys: &'a [ApiKey], secret: &str) -> Option<&'a ApiKey> {
    let digest = blake3::hash(secret.as_bytes());
    let mut found = None;
    for key in keys {
        if bool::from(key.digest.ct_eq(digest.as_bytes())) {
            found = Some(key);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_key_is_found() {
        let key = |name: &str, secret: &str| ApiKey {
            name: name.into(),
            digest: *blake3::hash(secret.as_bytes()).as_bytes(),
        };
        let keys = [key("a", "sk-aaaaaaaaaaaaaaaa"), key("b", "sk-bbbbbbbbbbbbbbbb")];
        assert_eq!(find(&keys, "sk-bbbbbbbbbbbbbbbb").unwrap().name, "b");
        assert!(find(&keys, "sk-bbbbbbbbbbbbbbb").is_none());
        assert!(find(&keys, "").is_none());
    }
}
