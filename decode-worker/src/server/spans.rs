//! The trace of one answer: what it waited for and what was computed, below the gateway's span.

use parking_lot::Mutex;
use shared::control::{DecodeEvent, DecodeReceipt, Responder};
use shared::trace::{Span, TraceContext};
use std::time::SystemTime;

/// Spans of a request that is answered now.
struct Spans {
    whole: Span,
    context: Option<TraceContext>,
    began: SystemTime,
    decode: Span,
    /// Choices that are not complete.
    open: u32,
}

/// Makes spans of what a responder says, if the request is traced.
pub(super) fn traced(responder: Responder<DecodeEvent>, choices: u32) -> Responder<DecodeEvent> {
    let whole = Span::below("decode worker", responder.trace());
    let Some(context) = whole.context() else { return responder };
    let began = SystemTime::now();
    let spans = Spans { whole, context: Some(context), began, decode: Span::default(), open: choices.max(1) };
    let spans = Mutex::new(spans);
    responder.observed(move |event| spans.lock().see(event))
}

impl Spans {
    fn see(&mut self, event: &DecodeEvent) {
        match event {
            DecodeEvent::Started(receipt) => self.started(receipt),
            DecodeEvent::Finished { completion_tokens, .. } => {
                self.open = self.open.saturating_sub(1);
                if self.open == 0 {
                    self.decode.set("tokens", i64::from(*completion_tokens));
                    self.end();
                }
            }
            DecodeEvent::Error(error) => {
                self.whole.fail(error.code.as_str());
                self.end();
            }
            _ => {}
        }
    }

    /// The stages before the first token are told by the receipt.
    fn started(&mut self, receipt: &DecodeReceipt) {
        let parent = self.context.as_ref();
        let mut at = self.began;
        for (stage, ms) in [
            ("wait for transfer", receipt.wait_ms),
            ("engine queue", receipt.queue_ms),
            ("ingest", receipt.ingest_ms),
            ("prefill rest", receipt.prefill_ms),
        ] {
            at = Span::past(stage, parent, at, ms);
        }
        self.whole.set("prompt_tokens", i64::from(receipt.prompt_tokens));
        self.whole.set("cached_tokens", i64::from(receipt.cached_tokens));
        self.whole.set("bridged_tokens", i64::from(receipt.bridged_tokens));
        self.decode = Span::below("decode steps", parent);
    }

    fn end(&mut self) {
        // The part ends before the whole.
        drop(std::mem::take(&mut self.decode));
        drop(std::mem::take(&mut self.whole));
    }
}
