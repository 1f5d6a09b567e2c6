//! The one place where errors become HTTP statuses and OpenAI error bodies.

use crate::pipeline::FailureKind;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use shared::control::WorkerErrorCode;
use std::time::Duration;

/// An error as clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    message: String,
    param: Option<String>,
    retry_after: Option<Duration>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code, message: message.into(), param: None, retry_after: None }
    }

    /// 400, naming the parameter.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_value", message);
        Self { param: Some(param.into()), ..error }
    }

    /// 400 for something that is valid elsewhere but not offered here.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: "unsupported_value", ..Self::invalid(param, message) }
    }

    /// 400 for a body that is no JSON object.
    pub(crate) fn bad_body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_json", message)
    }

    /// 408.
    pub(crate) fn body_too_slow() -> Self {
        let message = "the request body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "request_timeout", message)
    }

    /// 413.
    pub(crate) fn body_too_large(limit_bytes: usize) -> Self {
        let message = format!("the request body is larger than {limit_bytes} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "request_too_large", message)
    }

    /// 431.
    pub(crate) fn head_too_large(limit_bytes: usize) -> Self {
        let message = format!("the request's headers are larger than {limit_bytes} bytes");
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        Self::new(status, "invalid_request_error", "headers_too_large", message)
    }

    /// 401.
    pub(crate) fn unauthorized() -> Self {
        let message = "a valid API key is required: Authorization: Bearer KEY";
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
    }

    /// 403.
    pub(crate) fn forbidden() -> Self {
        let message = "this needs a key with `admin = true` (or, for /metrics, the setting `public_metrics`)";
        Self::new(StatusCode::FORBIDDEN, "permission_error", "admin_required", message)
    }

    /// 403 for another reason than the key.
    pub(crate) fn forbidden_because(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, "permission_error", "forbidden", message)
    }

    /// 503 for what is no inference.
    pub(crate) fn busy(message: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "busy", message)
    }

    /// 404.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "not_found", message)
    }

    /// 404 for a model that is not served here.
    pub(crate) fn model_not_found(model: &str) -> Self {
        let message = format!("the model `{model}` does not exist here");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "model_not_found", message);
        Self { param: Some("model".to_owned()), ..error }
    }

    /// 405.
    pub(crate) fn method_not_allowed() -> Self {
        let message = "this path does not answer this method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "method_not_allowed", message)
    }

    /// 429, saying when to try again.
    pub(crate) fn too_many_requests(message: impl Into<String>, retry_after: Duration) -> Self {
        let status = StatusCode::TOO_MANY_REQUESTS;
        let error = Self::new(status, "rate_limit_error", "too_many_requests", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// 503 while shutting down.
    pub(crate) fn shutting_down() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "server_error",
            "shutting_down",
            "the server is shutting down",
        )
    }

    /// 500.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal", message)
    }

    /// Code for the verdict's reason.
    pub(crate) fn reason(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "unauthorized",
            StatusCode::TOO_MANY_REQUESTS => "too_many_requests",
            status if status.is_client_error() => "invalid_request",
            _ => self.code,
        }
    }

    /// The OpenAI error object: `{"error": {message, type, param, code}}`.
    pub(crate) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl From<&FailureKind> for ApiError {
    fn from(kind: &FailureKind) -> Self {
        let message = kind.to_string();
        let unavailable =
            |code| Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", code, message.clone());
        match kind {
            FailureKind::NoDecodeWorker => unavailable("no_decode_worker"),
            FailureKind::DecodeWorkerLost => unavailable("decode_worker_lost"),
            FailureKind::Refused(_) => unavailable("bridge_required"),
            FailureKind::TooLong { .. } => too_long(message),
            FailureKind::BadToken(_) => Self::invalid("prompt", message),
            FailureKind::BadConstraint { param, .. } => Self::invalid(*param, message),
            FailureKind::Timeout(_) => {
                Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", "timeout", message)
            }
            FailureKind::Worker(error) => match error.code {
                WorkerErrorCode::TooLong => too_long(message),
                WorkerErrorCode::Busy => {
                    Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "busy", message)
                }
                WorkerErrorCode::Timeout => {
                    Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", "timeout", message)
                }
                code => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", code.as_str(), message),
            },
            FailureKind::Protocol(_) => {
                Self::new(StatusCode::BAD_GATEWAY, "server_error", "protocol_error", message)
            }
            FailureKind::Text(_) => Self::internal(message),
        }
    }
}

fn too_long(message: String) -> ApiError {
    let code = "context_length_exceeded";
    ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message)
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            // Whole seconds, rounded up: coming back too early would be in vain.
            let wait = self.retry_after.unwrap_or_default().as_millis().div_ceil(1000).max(1);
            let wait = u64::try_from(wait).unwrap_or(u64::MAX);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(wait));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(Reason(self.reason()));
        response
    }
}

/// Left on an error response for the verdict header to pick up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reason(pub(super) &'static str);

#[cfg(test)]
mod tests {
    use super::*;
    use shared::control::WorkerError;

    #[test]
    fn statuses_follow_from_causes() {
        let worker = |code| FailureKind::Worker(WorkerError::new(code, "x"));
        for (kind, status, code) in [
            (FailureKind::NoDecodeWorker, 503, "no_decode_worker"),
            (FailureKind::Refused("checksum".into()), 503, "bridge_required"),
            (FailureKind::TooLong { prompt_tokens: 9, max_tokens: 8 }, 400, "context_length_exceeded"),
            (FailureKind::BadToken(7), 400, "invalid_value"),
            (FailureKind::Timeout("it"), 504, "timeout"),
            (worker(WorkerErrorCode::TooLong), 400, "context_length_exceeded"),
            (worker(WorkerErrorCode::Busy), 429, "busy"),
            (worker(WorkerErrorCode::Engine), 500, "engine"),
        ] {
            let error = ApiError::from(&kind);
            assert_eq!((error.status.as_u16(), error.code), (status, code));
            assert!(error.body()["error"]["message"].is_string());
        }
    }
}
