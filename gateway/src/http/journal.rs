//! The outermost layer: every request has a name and a record, every response says the name.

use super::App;
use super::bridge_headers::{REQUEST_ID, request_id};
use super::held::Held;
use crate::record::{self, Record};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use shared::trace::{self, Span};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// W3C trace context.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// [`kept`] as a layer.
pub(super) async fn keep(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    kept(&app, request, async |request| next.run(request).await).await
}

/// Names the request, keeps its record until the answer is over, and asks clients to leave while draining.
pub(super) async fn kept<B>(
    app: &App,
    request: axum::http::Request<B>,
    run: impl AsyncFnOnce(axum::http::Request<B>) -> Response,
) -> Response {
    let id = request_id(request.headers());
    let log = app.access_log.clone();
    let (method, path) = (request.method().as_str(), request.uri().path());
    let record = Record::new(id, method, path, log);
    let record = Arc::new(if trace::is_on() { record.traced(root(&request)) } else { record });
    let mut response = record::scope(record.clone(), run(request)).await;
    record.responded(response.status().as_u16());
    let headers = response.headers_mut();
    if !headers.contains_key(&REQUEST_ID)
        && let Ok(value) = HeaderValue::from_str(&record.request_id)
    {
        headers.insert(REQUEST_ID, value);
    }
    if let Some(Ok(value)) = record.trace.as_ref().map(|t| HeaderValue::from_str(&t.to_string())) {
        headers.insert(TRACEPARENT, value);
    }
    if app.draining.load(Ordering::Relaxed) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response.map(|body| Body::new(Held::new(body, Answered(record))))
}

/// The span of a request that is worth one: work, not looking around.
fn root<B>(request: &axum::http::Request<B>) -> Span {
    if request.method() != Method::POST {
        return Span::default();
    }
    let parent = request.headers().get(&TRACEPARENT).and_then(|v| v.to_str().ok()?.parse().ok());
    let mut span = Span::root(format!("POST {}", request.uri().path()), parent.as_ref());
    span.set("http.request.method", "POST");
    span.set("url.path", request.uri().path().to_owned());
    span
}

/// Marks the end of the answer.
struct Answered(Arc<Record>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.answered();
    }
}
