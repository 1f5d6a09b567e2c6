//! Pages of other origins, when the setting lets them in.

use super::bridge_headers::{REQUEST_ID, VERDICT};
use axum::http::{HeaderValue, Method, header};
use shared::settings::SettingsError;
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// How long a browser may remember the answer.
const MAX_AGE: Duration = Duration::from_secs(600);

/// The layer for these origins; none for none.
///
/// # Errors
/// [`SettingsError`] for what is no origin.
pub(crate) fn cors(origins: &[String]) -> Result<Option<CorsLayer>, SettingsError> {
    if origins.is_empty() {
        return Ok(None);
    }
    let bad = |o: &str| {
        SettingsError::value("gateway.cors_allow_origins", format!("`{o}` is not like https://host or `*`"))
    };
    let allowed = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        let origin = |o: &String| match o.split_once("://") {
            Some(("http" | "https", host)) if !host.is_empty() && !host.contains('/') => {
                HeaderValue::from_str(o).map_err(|_| bad(o))
            }
            _ => Err(bad(o)),
        };
        AllowOrigin::list(origins.iter().map(origin).collect::<Result<Vec<_>, _>>()?)
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([VERDICT, REQUEST_ID, header::RETRY_AFTER])
        .max_age(MAX_AGE);
    Ok(Some(layer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_origin_is_refused() {
        let read = |o: &str| cors(&[o.to_owned()]);
        assert!(cors(&[]).unwrap().is_none());
        for good in ["*", "https://a.example", "http://localhost:3000"] {
            assert!(read(good).unwrap().is_some(), "{good}");
        }
        for bad in ["a.example", "https://a.example/", "ftp://a", "https://", "https://a\u{0}"] {
            assert!(read(bad).unwrap_err().to_string().contains("cors_allow_origins"), "{bad:?}");
        }
    }
}
