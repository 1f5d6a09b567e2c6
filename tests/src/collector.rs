//! An OpenTelemetry collector that keeps what it gets.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use prost::Message as _;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;

/// A span as it was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The program: `service.name`.
    pub service: String,
    /// What it is about.
    pub name: String,
    /// Hex.
    pub trace_id: String,
    /// Hex.
    pub span_id: String,
    /// Hex; empty for the first of a trace.
    pub parent_id: String,
    /// Nanoseconds since 1970.
    pub start_ns: u64,
    /// Nanoseconds since 1970.
    pub end_ns: u64,
    /// Text and whole numbers, as text.
    pub attributes: Vec<(String, String)>,
}

/// The receiving end of OTLP over HTTP.
pub struct Collector {
    /// What to give as an endpoint.
    pub url: String,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    /// Starts it on a free port.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let spans = Arc::new(Mutex::new(vec![]));
        let kept = spans.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let kept = kept.clone();
                let answer = service_fn(move |request| take(request, kept.clone()));
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
            }
        });
        Self { url, spans }
    }

    /// What has come so far.
    #[must_use]
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }
}

async fn take(
    request: Request<Incoming>,
    kept: Arc<Mutex<Vec<Span>>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    assert_eq!(request.uri().path(), "/v1/traces");
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let sent = ExportTraceServiceRequest::decode(body).unwrap();
    let mut kept = kept.lock().unwrap();
    for group in sent.resource_spans {
        let of_resource = group.resource.map(|r| attributes(r.attributes)).unwrap_or_default();
        let service = of_resource.into_iter().find(|(key, _)| key == "service.name").unwrap().1;
        for span in group.scope_spans.into_iter().flat_map(|s| s.spans) {
            kept.push(Span {
                service: service.clone(),
                name: span.name,
                trace_id: hex::encode(span.trace_id),
                span_id: hex::encode(span.span_id),
                parent_id: hex::encode(span.parent_span_id),
                start_ns: span.start_time_unix_nano,
                end_ns: span.end_time_unix_nano,
                attributes: attributes(span.attributes),
            });
        }
    }
    Ok(Response::new(Full::default()))
}

fn attributes(all: Vec<opentelemetry_proto::tonic::common::v1::KeyValue>) -> Vec<(String, String)> {
    let text = |value: Option<Value>| match value {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    all.into_iter().map(|kv| (kv.key, text(kv.value.and_then(|v| v.value)))).collect()
}
