//! The outermost layer: every request has a name and a record, every response says the name.

use super::App;
use super::bridge_headers::{REQUEST_ID, request_id};
use super::held::Held;
use crate::record::{self, Record};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Names the request, keeps its record until the answer is over, and asks clients to leave while draining.
pub(super) async fn keep(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let log = app.access_log.clone();
    let record = Arc::new(Record::new(id, request.method().as_str(), request.uri().path(), log));
    let mut response = record::scope(record.clone(), next.run(request)).await;
    record.responded(response.status().as_u16());
    let headers = response.headers_mut();
    if !headers.contains_key(&REQUEST_ID)
        && let Ok(value) = HeaderValue::from_str(&record.request_id)
    {
        headers.insert(REQUEST_ID, value);
    }
    if app.draining.load(Ordering::Relaxed) {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response.map(|body| Body::new(Held::new(body, Answered(record))))
}

/// Marks the end of the answer.
struct Answered(Arc<Record>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.answered();
    }
}
