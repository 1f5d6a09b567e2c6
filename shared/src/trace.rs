//! OpenTelemetry traces: spans of one request in all three processes, sent by OTLP over HTTP. Off unless an endpoint
//! is set, and then nothing is made, measured or sent.
//!
//! The span that work belongs to travels as a W3C `traceparent`: in HTTP headers between client and gateway, in the
//! envelope of control messages between gateway and workers, and in a task's [`scope`] inside a process.

use crate::settings::SettingsError;
use opentelemetry::trace::{
    Span as _, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId,
    TraceState, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span as SdkSpan};
use std::fmt;
use std::future::Future;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

/// Longest wait for the collector at the end of the process.
const FLUSH_LIMIT: Duration = Duration::from_secs(2);

static TRACER: OnceLock<SdkTracer> = OnceLock::new();

tokio::task_local! {
    static CURRENT: Option<TraceContext>;
}

/// Starts tracing to the collector at `endpoint` (`http://host:4318`), or to the one that the environment variables
/// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` and `OTEL_EXPORTER_OTLP_ENDPOINT` name; without any of them it stays off.
/// `OTEL_TRACES_SAMPLER` and its kin are obeyed. A second call changes nothing.
///
/// # Errors
/// [`SettingsError::Value`] naming `key` for an endpoint that can't be used.
pub fn start(key: &str, service: &'static str, endpoint: Option<&str>) -> Result<Exporter, SettingsError> {
    let Some(url) = traces_url(endpoint, |name| std::env::var(name).ok()) else { return Ok(Exporter(None)) };
    if !url.starts_with("http://") {
        let why =
            format!("`{url}`: only http:// is spoken; a collector on this machine or network can encrypt");
        return Err(SettingsError::value(key, why));
    }
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(&url)
        .build()
        .map_err(|e| SettingsError::value(key, format!("{url}: {e}")))?;
    let resource = Resource::builder().with_service_name(service).build();
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
    let _ = TRACER.set(provider.tracer("pd-bridge"));
    tracing::info!(%url, "traces are sent");
    Ok(Exporter(Some(provider)))
}

/// The URL for spans: a setting or the general variable is a base, the variable for traces is used as it is.
fn traces_url(setting: Option<&str>, var: impl Fn(&str) -> Option<String>) -> Option<String> {
    let var = |name: &str| var(name).filter(|value| !value.is_empty());
    if setting.is_none()
        && let Some(url) = var("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    {
        return Some(url);
    }
    let base = setting.map(str::to_owned).or_else(|| var("OTEL_EXPORTER_OTLP_ENDPOINT"))?;
    let base = base.trim_end_matches('/');
    Some(if base.ends_with("/v1/traces") { base.to_owned() } else { format!("{base}/v1/traces") })
}

/// What sends the spans; to be finished before the process ends.
#[derive(Debug)]
pub struct Exporter(Option<SdkTracerProvider>);

impl Exporter {
    /// Like [`Self::finish`], from async code.
    pub async fn finish_outside(self) {
        if self.0.is_some() {
            // Only a panic in it could end it early, and there is nothing left to be done about that.
            let _ = tokio::task::spawn_blocking(|| self.finish()).await;
        }
    }

    /// Sends what is left. Blocks, for two seconds at most.
    pub fn finish(self) {
        if let Some(provider) = self.0
            && let Err(error) = provider.shutdown_with_timeout(FLUSH_LIMIT)
        {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }
}

/// Whether spans are made at all.
#[must_use]
pub fn is_on() -> bool {
    TRACER.get().is_some()
}

/// A span as others see it: what a `traceparent` says.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceContext(SpanContext);

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(c) = self;
        write!(f, "00-{}-{}-{:02x}", c.trace_id(), c.span_id(), c.trace_flags().to_u8() & 1)
    }
}

impl FromStr for TraceContext {
    type Err = ();

    /// Reads a `traceparent`; anything malformed is no context, as W3C asks.
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.trim().split('-');
        let mut part = |len: usize| {
            let is_hex =
                |p: &&str| p.len() == len && p.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            parts.next().filter(is_hex).ok_or(())
        };
        let (version, trace, span, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        // Later versions may say more; this one must not.
        if version == "ff" || (version == "00" && parts.next().is_some()) {
            return Err(());
        }
        let trace_id = TraceId::from_hex(trace).map_err(|_| ())?;
        let span_id = SpanId::from_hex(span).map_err(|_| ())?;
        let flags = TraceFlags::new(u8::from_str_radix(flags, 16).map_err(|_| ())?);
        let context = SpanContext::new(trace_id, span_id, flags, true, TraceState::default());
        if context.is_valid() { Ok(Self(context)) } else { Err(()) }
    }
}

/// The span that the running task works for.
#[must_use]
pub fn current() -> Option<TraceContext> {
    CURRENT.try_with(Clone::clone).ok().flatten()
}

/// Runs a future as work for a span.
pub fn scope<F: Future>(context: Option<TraceContext>, future: F) -> impl Future<Output = F::Output> {
    CURRENT.scope(context, future)
}

/// A span that ends when dropped; nothing where tracing is off.
#[derive(Debug, Default)]
pub struct Span(Option<SdkSpan>);

impl Span {
    /// The first span of a request: below the client's `parent`, or a new trace.
    #[must_use]
    pub fn root(name: impl Into<String>, parent: Option<&TraceContext>) -> Self {
        Self::build(name, SpanKind::Server, parent, None)
    }

    /// A part of `parent`; nothing without one.
    #[must_use]
    pub fn below(name: &'static str, parent: Option<&TraceContext>) -> Self {
        if parent.is_none() {
            return Self(None);
        }
        Self::build(name, SpanKind::Internal, parent, None)
    }

    /// A part of `parent` that is over: it began at `start` and took `ms` milliseconds. Returns its end.
    pub fn past(name: &'static str, parent: Option<&TraceContext>, start: SystemTime, ms: f64) -> SystemTime {
        let end = start + Duration::try_from_secs_f64(ms / 1000.0).unwrap_or_default();
        if parent.is_some()
            && let Self(Some(mut span)) = Self::build(name, SpanKind::Internal, parent, Some(start))
        {
            span.end_with_timestamp(end);
        }
        end
    }

    fn build(
        name: impl Into<String>,
        kind: SpanKind,
        parent: Option<&TraceContext>,
        start: Option<SystemTime>,
    ) -> Self {
        let Some(tracer) = TRACER.get() else { return Self(None) };
        let mut builder = SpanBuilder::from_name(name.into()).with_kind(kind);
        builder.start_time = start;
        let parent = match parent {
            Some(TraceContext(parent)) => Context::new().with_remote_span_context(parent.clone()),
            None => Context::new(),
        };
        Self(Some(tracer.build_with_context(builder, &parent)))
    }

    /// What is to be handed on, so that other spans come below this one.
    #[must_use]
    pub fn context(&self) -> Option<TraceContext> {
        self.0.as_ref().map(|span| TraceContext(span.span_context().clone()))
    }

    /// Says something about it.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new(key, value));
        }
    }

    /// It did not go well.
    pub fn fail(&mut self, why: impl Into<String>) {
        if let Some(span) = &mut self.0 {
            span.set_status(Status::error(why.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_read_strictly_and_written_as_it_was() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(good.parse::<TraceContext>().unwrap().to_string(), good);
        let newer = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00-more";
        assert_eq!(newer.parse::<TraceContext>().unwrap().to_string(), format!("00{}", &newer[2..55]));
        for bad in [
            "",
            "00",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
        ] {
            assert!(bad.parse::<TraceContext>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_endpoint_comes_from_the_setting_before_the_environment() {
        let none = |_: &str| None;
        let env = |name: &str| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://b:1/".to_owned()),
            _ => None,
        };
        assert_eq!(traces_url(None, none), None);
        assert_eq!(traces_url(Some("http://a:4318"), env).as_deref(), Some("http://a:4318/v1/traces"));
        assert_eq!(traces_url(None, env).as_deref(), Some("http://b:1/v1/traces"));
        let own = |_: &str| Some("http://c/x".to_owned());
        assert_eq!(traces_url(None, own).as_deref(), Some("http://c/x"));
        assert_eq!(traces_url(Some("http://a/v1/traces"), none).as_deref(), Some("http://a/v1/traces"));
    }

    #[tokio::test]
    async fn nothing_is_made_while_it_is_off() {
        let parent: TraceContext = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().unwrap();
        assert!(!is_on() && Span::root("x", Some(&parent)).context().is_none());
        assert_eq!(current(), None);
        assert_eq!(scope(Some(parent.clone()), async { current() }).await, Some(parent));
    }
}
