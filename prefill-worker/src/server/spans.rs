//! The trace of one prefill, below the gateway's span.

use std::time::SystemTime;

use parking_lot::Mutex;
use shared::control::{PrefillEvent, PrefillReport, Responder};
use shared::trace::Span;

/// Makes spans of what a responder says, if the request is traced.
pub(super) fn traced(responder: Responder<PrefillEvent>) -> Responder<PrefillEvent> {
    let whole = Span::below("prefill worker", responder.trace());
    if whole.context().is_none() {
        return responder;
    }
    let began = SystemTime::now();
    let whole = Mutex::new(whole);
    responder.observed(move |event| match event {
        PrefillEvent::Done(report) => done(std::mem::take(&mut *whole.lock()), began, report),
        PrefillEvent::Error(error) => {
            let mut whole = std::mem::take(&mut *whole.lock());
            whole.fail(error.code.as_str());
        }
        _ => {}
    })
}

/// The report tells the stages.
fn done(mut whole: Span, began: SystemTime, report: &PrefillReport) {
    let parent = whole.context();
    let stages = [
        ("engine queue", report.queue_ms),
        ("compute", report.prefill_ms),
        ("send rest", report.transfer_ms),
    ];
    let mut at = began;
    for (stage, ms) in stages {
        at = Span::past(stage, parent.as_ref(), at, ms);
    }
    whole.set("computed_tokens", i64::from(report.computed_tokens));
    whole.set("reused_tokens", i64::from(report.reused_tokens));
    whole.set("payload_bytes", i64::try_from(report.payload_bytes).unwrap_or(i64::MAX));
}
