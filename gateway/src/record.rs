//! What one HTTP request was, from its arrival to the end of its answer: the facts for the access log.
//!
//! The record of the request that is being handled is found with [`current`], in the handler as well as in the task
//! that runs the request, without being handed from function to function.

use crate::access_log::AccessLog;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use shared::trace::{self, Span, TraceContext};
use shared::verdict::Verdict;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::OwnedSemaphorePermit;

tokio::task_local! {
    static CURRENT: Arc<Record>;
}

/// The record of the request that is being handled here; a blank one outside of any.
pub(crate) fn current() -> Arc<Record> {
    CURRENT.try_with(Arc::clone).unwrap_or_else(|_| Arc::new(Record::new(String::new(), "", "", None)))
}

/// Runs a future as part of a request.
pub(crate) fn scope<F: Future>(record: Arc<Record>, future: F) -> impl Future<Output = F::Output> {
    let context = record.trace.clone();
    CURRENT.scope(record, trace::scope(context, future))
}

/// One request. Its log line is written when the last part of it is over.
#[derive(Debug)]
pub(crate) struct Record {
    /// Name of the request, in every log, header and message.
    pub(crate) request_id: String,
    method: String,
    path: String,
    arrived: Instant,
    facts: Mutex<Facts>,
    log: Option<AccessLog>,
    /// The span that all others of the request are below, if traces are made.
    pub(crate) trace: Option<TraceContext>,
    span: Mutex<Span>,
}

#[derive(Debug, Default)]
struct Facts {
    key: Option<Arc<str>>,
    permit: Option<OwnedSemaphorePermit>,
    status: u16,
    verdict: Option<&'static str>,
    reason: Option<String>,
    prompt_tokens: u32,
    cached_tokens: u32,
    completion_tokens: u64,
    queue: Duration,
    ttft: Option<Duration>,
    whole: Option<Duration>,
    client_left: bool,
}

impl Record {
    /// A request that has just arrived. Only the path is kept of its target: a query may hold secrets.
    pub(crate) fn new(request_id: String, method: &str, path: &str, log: Option<AccessLog>) -> Self {
        let (method, path) = match log {
            Some(_) => (method.to_owned(), path.chars().take(256).collect()),
            None => <(String, String)>::default(),
        };
        let (arrived, facts, span) = (Instant::now(), Mutex::default(), Mutex::default());
        Self { request_id, method, path, arrived, facts, log, trace: None, span }
    }

    /// The request's span, which ends with it.
    pub(crate) fn traced(mut self, span: Span) -> Self {
        self.trace = span.context();
        self.span = Mutex::new(span);
        self
    }

    /// Whose request it is; the permit is given back when the request is over.
    pub(crate) fn authorized(&self, key: Arc<str>, permit: Option<OwnedSemaphorePermit>) {
        let mut facts = self.facts.lock();
        (facts.key, facts.permit) = (Some(key), permit);
    }

    /// The response's status is decided.
    pub(crate) fn responded(&self, status: u16) {
        self.facts.lock().status = status;
    }

    /// The response's last byte was handed over, or the client left.
    pub(crate) fn answered(&self) {
        self.facts.lock().whole = Some(self.arrived.elapsed());
    }

    /// How long the request waited to be let in.
    pub(crate) fn queued(&self, wait: Duration) {
        self.facts.lock().queue += wait;
    }

    /// How long it waited to be let in.
    pub(crate) fn queue_wait(&self) -> Duration {
        self.facts.lock().queue
    }

    /// The first token exists.
    pub(crate) fn started(&self, ttft: Duration) {
        self.facts.lock().ttft.get_or_insert(ttft);
    }

    /// More tokens of the answer.
    pub(crate) fn generated(&self, tokens: u64) {
        self.facts.lock().completion_tokens += tokens;
    }

    /// The client did not wait for the end.
    pub(crate) fn left(&self) {
        self.facts.lock().client_left = true;
    }

    /// How the request ended.
    pub(crate) fn ended(&self, verdict: &Verdict) {
        let mut facts = self.facts.lock();
        facts.verdict = Some(verdict.verdict.as_str());
        facts.reason.clone_from(&verdict.reason);
        facts.prompt_tokens = verdict.prompt_tokens;
        facts.cached_tokens = verdict.cached_tokens;
    }

    fn end_span(&mut self) {
        let (facts, span) = (self.facts.get_mut(), self.span.get_mut());
        span.set("http.response.status_code", i64::from(facts.status));
        span.set("pd_bridge.request_id", self.request_id.clone());
        if let Some(verdict) = facts.verdict {
            span.set("pd_bridge.verdict", verdict);
            span.set("gen_ai.usage.input_tokens", i64::from(facts.prompt_tokens));
            span.set("pd_bridge.cached_tokens", i64::from(facts.cached_tokens));
            let completion_tokens = i64::try_from(facts.completion_tokens).unwrap_or(i64::MAX);
            span.set("gen_ai.usage.output_tokens", completion_tokens);
        }
        if facts.status >= 500 {
            span.fail(facts.reason.clone().unwrap_or_default());
        }
    }

    /// The log line, without its time.
    fn line(&self) -> Map<String, Value> {
        let ms = |d: Duration| (d.as_secs_f64() * 1e6).round() / 1e3;
        let facts = self.facts.lock();
        let line = json!({
            "request_id": self.request_id,
            "key": facts.key.as_deref(),
            "method": self.method,
            "path": self.path,
            "status": facts.status,
            "duration_ms": ms(facts.whole.unwrap_or_else(|| self.arrived.elapsed())),
        });
        let Value::Object(mut line) = line else { return Map::new() };
        if let Some(verdict) = facts.verdict {
            let inference = json!({
                "verdict": verdict,
                "reason": facts.reason,
                "prompt_tokens": facts.prompt_tokens,
                "cached_tokens": facts.cached_tokens,
                "completion_tokens": facts.completion_tokens,
                "client_left": facts.client_left,
                "queue_ms": ms(facts.queue),
                "ttft_ms": facts.ttft.map(ms),
            });
            if let Value::Object(inference) = inference {
                line.extend(inference);
            }
        }
        line
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.trace.is_some() {
            self.end_span();
        }
        if let Some(log) = &self.log {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let mut line = Map::from_iter([("time_unix_s".to_owned(), json!(now.as_secs_f64()))]);
            line.extend(self.line());
            log.write(Value::Object(line).to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_is_known_wherever_it_is_handled() {
        assert_eq!(current().request_id, "");
        let record = Arc::new(Record::new("a".to_owned(), "GET", "/", None));
        assert_eq!(scope(record, async { current().request_id.clone() }).await, "a");
    }
}
