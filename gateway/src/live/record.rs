//! One request as viewers see it.

use serde::Serialize;
use shared::verdict::Verdict;
use std::time::Instant;

/// A part of a request's life that a viewer can see begin and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stage {
    /// Asking the decoder, planning, waiting for a worker.
    Plan,
    /// The prefill worker reads the prompt and its cache is on the way.
    Prefill,
    /// The prompt is read, the rest of its cache is on the way.
    Transfer,
    /// The decoder reads the prompt, or what the cache lacks of it.
    Native,
    /// The answer is being written.
    Decode,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ending {
    /// With a whole answer.
    Answered,
    /// With an error.
    Failed,
    /// The client left.
    Left,
}

/// A stage with its times, in milliseconds since the request came in.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Span {
    stage: Stage,
    start_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    end_ms: Option<f64>,
}

/// A request's visible state.
#[derive(Debug, Serialize)]
pub(super) struct Record {
    pub(super) id: String,
    /// Unix time in milliseconds.
    pub(super) began_ms: f64,
    pub(super) prompt_tokens: u32,
    /// Prompt positions read, by whoever reads them.
    pub(super) done_tokens: u32,
    pub(super) stages: Vec<Span>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prefill: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) decode: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) verdict: Option<Verdict>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ending: Option<Ending>,
    #[serde(skip)]
    arrived: Instant,
}

impl Record {
    pub(super) fn new(id: String, prompt_tokens: u32, arrived: Instant, began_ms: f64) -> Self {
        let plan = Span { stage: Stage::Plan, start_ms: 0.0, end_ms: None };
        Self {
            id,
            began_ms,
            prompt_tokens,
            done_tokens: 0,
            stages: vec![plan],
            prefill: None,
            decode: None,
            verdict: None,
            ending: None,
            arrived,
        }
    }

    pub(super) fn age_ms(&self) -> f64 {
        self.arrived.elapsed().as_secs_f64() * 1000.0
    }

    /// Ends the current stage and begins another; the current one again changes nothing.
    pub(super) fn enter(&mut self, stage: Stage) {
        if self.stages.last().is_some_and(|last| last.stage == stage && last.end_ms.is_none()) {
            return;
        }
        let now = self.age_ms();
        self.close(now);
        self.stages.push(Span { stage, start_ms: now, end_ms: None });
    }

    /// Puts the border between prefill and transfer where the prefill worker measured it: its report comes when
    /// the transfer has ended, `transfer_ms` after the last layer.
    pub(super) fn measured_transfer(&mut self, transfer_ms: f64) {
        let now = self.age_ms();
        self.stages.retain(|span| span.stage != Stage::Transfer);
        let Some(last) = self.stages.last_mut().filter(|span| span.stage == Stage::Prefill) else { return };
        let border = (now - transfer_ms).clamp(last.start_ms, now);
        last.end_ms = Some(border);
        self.stages.push(Span { stage: Stage::Transfer, start_ms: border, end_ms: Some(now) });
    }

    /// The request is over.
    pub(super) fn end(&mut self, ending: Ending) {
        self.close(self.age_ms());
        self.ending.get_or_insert(ending);
    }

    fn close(&mut self, now: f64) {
        if let Some(last) = self.stages.last_mut() {
            last.end_ms.get_or_insert(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record::new("r".into(), 10, Instant::now(), 0.0)
    }

    fn names(record: &Record) -> Vec<Stage> {
        record.stages.iter().map(|span| span.stage).collect()
    }

    #[test]
    fn stages_follow_each_other_without_gaps() {
        let mut r = record();
        for stage in [Stage::Prefill, Stage::Prefill, Stage::Transfer, Stage::Decode] {
            r.enter(stage);
        }
        r.end(Ending::Answered);
        assert_eq!(names(&r), [Stage::Plan, Stage::Prefill, Stage::Transfer, Stage::Decode]);
        for pair in r.stages.windows(2) {
            assert_eq!(pair[0].end_ms, Some(pair[1].start_ms));
        }
        assert!(r.stages.iter().all(|span| span.end_ms.is_some()));
    }

    #[test]
    fn the_measured_border_replaces_the_seen_one() {
        let mut r = Record::new("r".into(), 10, Instant::now() - std::time::Duration::from_millis(500), 0.0);
        r.stages[0].end_ms = Some(100.0);
        r.stages.push(Span { stage: Stage::Prefill, start_ms: 100.0, end_ms: None });
        r.enter(Stage::Transfer);
        r.measured_transfer(150.0);
        assert_eq!(names(&r), [Stage::Plan, Stage::Prefill, Stage::Transfer]);
        let border = r.stages[2].start_ms;
        assert!((345.0..480.0).contains(&border), "{border}");
        assert_eq!(r.stages[1].end_ms, Some(border));
    }

    #[test]
    fn a_report_longer_than_the_stage_leaves_no_negative_time() {
        let mut r = record();
        r.enter(Stage::Prefill);
        r.measured_transfer(1e9);
        assert!(r.stages.iter().all(|span| span.end_ms.is_some_and(|end| end >= span.start_ms)));
    }

    #[test]
    fn the_first_ending_stays() {
        let mut r = record();
        r.end(Ending::Failed);
        r.end(Ending::Left);
        assert_eq!(r.ending, Some(Ending::Failed));
    }
}
