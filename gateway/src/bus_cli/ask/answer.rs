//! An answer of a node's model, read from the pieces that the node's agent passes on.

use serde::Serialize;
use serde_json::Value;
use shared::bus::{Exit, OperatorError};
use shared::verdict::Verdict;
use std::time::Duration;

/// Longest answer that is kept, event stream and all: a node must not fill this machine's memory.
const MAX_BYTES: usize = 16 << 20;
/// The verdict of a response whose headers went out early.
const LATE_VERDICT: &str = ": x-pd-bridge ";

/// What a model said. Times in milliseconds from the signing of the question, the bus included.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Answer {
    /// Its words.
    pub(crate) text: String,
    /// Who read the prompt; none from an endpoint that is no pd-bridge.
    pub(crate) verdict: Option<Verdict>,
    /// Until its first word came; none when it said nothing.
    pub(crate) ttft_ms: Option<f64>,
    /// Until its end.
    pub(crate) total_ms: f64,
    /// Tokens of the answer.
    pub(crate) completion_tokens: Option<u64>,
    /// Why it ended, e.g. `stop` or `length`.
    pub(crate) finish_reason: Option<String>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    /// The node refuses, is not there, or its output was lost.
    #[error(transparent)]
    Operator(#[from] OperatorError),
    /// The agent gave up.
    #[error("{0}")]
    Ended(Exit),
    /// The endpoint answered with an error.
    #[error("HTTP {status}: {message}")]
    Http {
        /// Status code.
        status: u16,
        /// Its own words.
        message: String,
    },
    /// The answer broke off.
    #[error("the answer broke off: {0}")]
    BrokeOff(String),
    /// More than is kept.
    #[error("the answer is longer than {MAX_BYTES} bytes")]
    TooLong,
}

/// Puts an answer together.
#[derive(Debug, Default)]
pub(crate) struct AnswerReader {
    head: Vec<u8>,
    status: Option<u16>,
    verdict: Option<Verdict>,
    seen_bytes: usize,
    line: Vec<u8>,
    error_body: Vec<u8>,
    text: String,
    ttft: Option<Duration>,
    completion_tokens: Option<u64>,
    finish_reason: Option<String>,
    failure: Option<String>,
    is_done: bool,
}

impl AnswerReader {
    /// Takes a piece of the line with status and headers.
    ///
    /// # Errors
    /// [`AskError::TooLong`].
    pub(crate) fn head(&mut self, bytes: &[u8]) -> Result<(), AskError> {
        self.count(bytes)?;
        self.head.extend_from_slice(bytes);
        let Some(end) = self.head.iter().position(|b| *b == b'\n') else { return Ok(()) };
        if let Ok(head) = serde_json::from_slice::<Value>(&self.head[..end]) {
            self.status = head["status"].as_u64().and_then(|s| u16::try_from(s).ok());
            let verdict = head["headers"]["x-pd-bridge"].as_str();
            self.verdict = verdict.and_then(|v| serde_json::from_str(v).ok());
        }
        self.head.clear();
        Ok(())
    }

    /// Takes a piece of the body that came this long after the question.
    ///
    /// # Errors
    /// [`AskError::TooLong`].
    pub(crate) fn body(&mut self, bytes: &[u8], after: Duration) -> Result<(), AskError> {
        self.count(bytes)?;
        if self.status.is_some_and(|s| s != 200) {
            self.error_body.extend_from_slice(bytes);
            return Ok(());
        }
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            self.line.extend_from_slice(piece);
            if piece.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.event(String::from_utf8_lossy(&line).trim_end(), after);
            }
        }
        Ok(())
    }

    /// What became of it.
    ///
    /// # Errors
    /// [`AskError`].
    pub(crate) fn finish(self, exit: Exit, after: Duration) -> Result<Answer, AskError> {
        match (exit, self.status) {
            (Exit::Code { .. }, Some(200)) => {}
            (Exit::Code { .. }, Some(status)) => {
                return Err(AskError::Http { status, message: message(&self.error_body) });
            }
            (exit, _) => return Err(AskError::Ended(exit)),
        }
        if let Some(failure) = self.failure {
            return Err(AskError::BrokeOff(failure));
        }
        if !self.is_done {
            return Err(AskError::BrokeOff("it is no event stream with an end".to_owned()));
        }
        Ok(Answer {
            text: self.text,
            verdict: self.verdict,
            ttft_ms: self.ttft.map(|t| t.as_secs_f64() * 1e3),
            total_ms: after.as_secs_f64() * 1e3,
            completion_tokens: self.completion_tokens,
            finish_reason: self.finish_reason,
        })
    }

    fn count(&mut self, bytes: &[u8]) -> Result<(), AskError> {
        self.seen_bytes += bytes.len();
        if self.seen_bytes > MAX_BYTES { Err(AskError::TooLong) } else { Ok(()) }
    }

    fn event(&mut self, line: &str, after: Duration) {
        if let Some(late) = line.strip_prefix(LATE_VERDICT) {
            self.verdict = serde_json::from_str(late).ok().or(self.verdict.take());
            return;
        }
        let Some(data) = line.strip_prefix("data:").map(str::trim_start) else { return };
        if data == "[DONE]" {
            self.is_done = true;
            return;
        }
        let Ok(chunk) = serde_json::from_str::<Value>(data) else {
            self.failure.get_or_insert_with(|| "an event is no JSON".to_owned());
            return;
        };
        if let Some(error) = chunk.get("error").filter(|e| !e.is_null()) {
            let text = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
            self.failure.get_or_insert(text);
        }
        if let Some(n) = chunk["usage"]["completion_tokens"].as_u64() {
            self.completion_tokens = Some(n);
        }
        let choice = &chunk["choices"][0];
        for said in ["content", "reasoning_content", "reasoning"] {
            let Some(words) = choice["delta"][said].as_str().filter(|w| !w.is_empty()) else { continue };
            self.ttft.get_or_insert(after);
            if said == "content" {
                self.text.push_str(words);
            }
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
    }
}

/// An error body's own words.
fn message(body: &[u8]) -> String {
    let text = serde_json::from_slice::<Value>(body).ok();
    let text = text.and_then(|v| v["error"]["message"].as_str().map(str::to_owned));
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    text.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &[u8] = b"{\"status\":200,\"headers\":{\"content-type\":\"text/event-stream\"}}\n";
    const OK: Exit = Exit::Code { code: 0 };

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn read(head: &[u8], body: &str, exit: Exit) -> Result<Answer, AskError> {
        let mut reader = AnswerReader::default();
        reader.head(head).unwrap();
        // Cut wherever it hurts, inside of characters too.
        for (i, piece) in body.as_bytes().chunks(3).enumerate() {
            reader.body(piece, ms(i as u64)).unwrap();
        }
        reader.finish(exit, ms(9000))
    }

    #[test]
    fn a_stream_becomes_an_answer() {
        let body = ": prefill 1/2\n\ndata: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
                    data: {\"choices\":[{\"delta\":{\"content\":\"Grüß\"}}]}\n\n\
                    data: {\"choices\":[{\"delta\":{\"content\":\" dich\"},\"finish_reason\":\"stop\"}]}\n\n\
                    data: {\"choices\":[],\"usage\":{\"completion_tokens\":4}}\n\ndata: [DONE]\n\n";
        let answer = read(HEAD, body, OK).unwrap();
        assert_eq!(answer.text, "Grüß dich");
        assert_eq!((answer.completion_tokens, answer.finish_reason.as_deref()), (Some(4), Some("stop")));
        let first = body.find("Grüß").unwrap() as f64 / 3.0;
        assert!(answer.ttft_ms.unwrap() > first, "the empty piece before is no first word");
        assert!(answer.ttft_ms.unwrap() < first + 20.0);
        assert_eq!(answer.total_ms, 9000.0);
    }

    #[test]
    fn a_late_verdict_replaces_the_early_one() {
        let verdict = |kind: &str| {
            format!(
                "{{\"verdict\":\"{kind}\",\"prompt_tokens\":9,\"cached_tokens\":8,\"bridged_tokens\":8,\"native_tokens\":1,\
                 \"blocks\":1,\"payload_bytes\":5,\"prefill_ms\":1.0,\"transfer_ms\":0.0,\"ingest_ms\":0.0,\"request_id\":\"r\"}}"
            )
        };
        let head = serde_json::json!({"status": 200, "headers": {"x-pd-bridge": verdict("pending")}});
        let kind = |body: &str| {
            let answer = read(format!("{head}\n").as_bytes(), body, OK).unwrap();
            answer.verdict.unwrap().verdict.as_str()
        };
        assert_eq!(kind("data: [DONE]\n"), "pending");
        assert_eq!(kind(&format!(": x-pd-bridge {}\ndata: [DONE]\n", verdict("complete"))), "complete");
    }

    #[test]
    fn everything_else_is_an_error() {
        let text = |r: Result<Answer, AskError>| r.unwrap_err().to_string();
        let refused = b"{\"status\":503,\"headers\":{}}\n";
        let body = "{\"error\":{\"message\":\"no decoder\"}}";
        assert_eq!(text(read(refused, body, Exit::Code { code: 1 })), "HTTP 503: no decoder");
        assert_eq!(text(read(refused, "plain", Exit::Code { code: 1 })), "HTTP 503: plain");
        assert!(text(read(HEAD, "data: {\"choices\":[]}\n", OK)).contains("no event stream with an end"));
        let failed = "data: {\"error\":{\"message\":\"worker died\"}}\n\ndata: [DONE]\n";
        assert_eq!(text(read(HEAD, failed, OK)), "the answer broke off: worker died");
        assert_eq!(text(read(HEAD, "", Exit::TimedOut {})), Exit::TimedOut {}.to_string());
        assert!(text(read(b"", "", Exit::Failed { message: "refused".into() })).contains("refused"));
        let mut reader = AnswerReader::default();
        assert!(matches!(reader.body(&vec![b'x'; MAX_BYTES + 1], ms(0)), Err(AskError::TooLong)));
    }
}
