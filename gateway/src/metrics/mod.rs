//! Every metric this process exports: name, unit, labels.
//!
//! | name | unit | labels |
//! |---|---|---|
//! | `pd_bridge_requests_total` | requests | `verdict`, `reason` (known codes, else `other`; empty where there is none) |
//! | `pd_bridge_requests_in_flight` | requests | |
//! | `pd_bridge_requests_queued` | requests that wait to be let in | |
//! | `pd_bridge_queue_wait_seconds` | seconds that a request waited to be let in, or in vain | |
//! | `pd_bridge_queue_refused_total` | requests for which the queue was full or too slow | |
//! | `pd_bridge_connections` | open connections | |
//! | `pd_bridge_connections_refused_total` | connections beyond the cap | |
//! | `pd_bridge_access_log_dropped_total` | lines that the disk was too slow for | |
//! | `pd_bridge_ttft_seconds` | seconds from arrival to first token | `verdict` |
//! | `pd_bridge_inter_token_latency_seconds` | seconds between token messages | |
//! | `pd_bridge_e2e_seconds` | seconds from arrival to the end of the answer | `verdict` |
//! | `pd_bridge_stage_seconds` | seconds | `stage`: see [`Stage`] |
//! | `pd_bridge_token_write_seconds` | seconds from a decoder's token message to the write of its SSE bytes | |
//! | `pd_bridge_prompt_tokens_total` | tokens | |
//! | `pd_bridge_cached_tokens_total` | tokens served from cache | |
//! | `pd_bridge_bridged_tokens_total` | tokens that came through transfers | |
//! | `pd_bridge_completion_tokens_total` | tokens | |
//! | `pd_bridge_payload_bytes_total` | bytes of cache received in transfers | |
//! | `pd_bridge_retries_total` | requests tried again after a lost worker | |
//! | `pd_bridge_workers_connected` | workers | `role`: `prefill`, `decode` |
//! | `pd_bridge_worker_pairs` | prefill/decode pairs that can bridge | |
//! | `pd_bridge_workers` | workers | `role`, `state`: `alive`, `suspect`, `lost`, `draining`, `unconnected` |
//! | `pd_bridge_worker_requests` | requests of a worker, everybody's, as far as known | `role`, `worker` |
//!
//! With a bus also what is heard on it:
//!
//! | name | unit | labels |
//! |---|---|---|
//! | `pd_bridge_bus_connected` | 1 or 0 | |
//! | `pd_bridge_heartbeats_total` | heartbeats | `result`: `taken`, `stale`, `rival`, `too_many`, `malformed` |
//! | `pd_bridge_nodes` | machines | `state`: `alive`, `draining`, `suspect`, `leaving`, `gone` |
//! | `pd_bridge_node_up` | 1, or 0 when gone | `node` |
//! | `pd_bridge_node_heartbeat_age_seconds` | seconds since it was heard | `node` |
//! | `pd_bridge_node_load` | load average over one minute | `node` |
//! | `pd_bridge_node_cpu_busy_ratio` | share of all cores | `node` |
//! | `pd_bridge_node_memory_used_bytes`, `…_total_bytes` | bytes | `node` |
//! | `pd_bridge_node_gpu_utilization_ratio` | share of time | `node`, `gpu` |
//! | `pd_bridge_node_gpu_memory_used_bytes`, `…_total_bytes` | bytes | `node`, `gpu` |
//! | `pd_bridge_node_worker_queue` | requests running or waiting | `node`, `role`, `worker` |
//! | `pd_bridge_node_worker_tokens_per_second` | tokens per second | `node`, `role`, `worker`, `phase` |
//! | `pd_bridge_node_worker_memory_bytes` | bytes resident | `node`, `role`, `worker` |

//!
//! Beside them the families that dashboards made for vLLM read, each with the labels `model_name` and `engine`:
//!
//! | name | unit | further labels |
//! |---|---|---|
//! | `vllm:num_requests_running` | requests being answered | |
//! | `vllm:num_requests_waiting` | requests that wait to be let in | |
//! | `vllm:kv_cache_usage_perc`, `vllm:gpu_cache_usage_perc` (its older name) | filled share of the decoders' prefix stores, 0 to 1 | |
//! | `vllm:prompt_tokens_total` | tokens | |
//! | `vllm:generation_tokens_total` | tokens | |
//! | `vllm:prefix_cache_queries_total` | prompt tokens looked up | |
//! | `vllm:prefix_cache_hits_total` | prompt tokens that the decoder held already | |
//! | `vllm:external_prefix_cache_queries_total` | prompt tokens that the decoder did not hold | |
//! | `vllm:external_prefix_cache_hits_total` | prompt tokens that came through transfers | |
//! | `vllm:num_preemptions_total` | preemptions; nothing is ever preempted here | |
//! | `vllm:request_success_total` | answers (choices) | `finished_reason`: `stop`, `length`, `abort`, `error` |
//! | `vllm:time_to_first_token_seconds` | seconds | |
//! | `vllm:inter_token_latency_seconds`, `vllm:time_per_output_token_seconds` (its older name) | seconds | |
//! | `vllm:request_time_per_output_token_seconds` | seconds, mean of a request | |
//! | `vllm:e2e_request_latency_seconds` | seconds | |
//! | `vllm:request_queue_time_seconds` | seconds, in this process and on the decoder | |
//! | `vllm:request_prefill_time_seconds` | seconds from the end of the wait to the first token | |
//! | `vllm:request_decode_time_seconds` | seconds from the first token to the last | |
//! | `vllm:request_inference_time_seconds` | seconds, both together | |
//! | `vllm:request_prompt_tokens` | tokens | |
//! | `vllm:request_generation_tokens` | tokens of a choice | |
//! | `vllm:request_params_n` | choices asked for | |
//! | `vllm:request_params_max_tokens` | tokens asked for at most | |

mod made;
mod per_label;
mod vllm;

pub(crate) use vllm::Times;

use crate::discovery::{Directory, FleetMetrics};
use crate::fleet::Fleet;
use made::Made;
use per_label::{Label, PerLabel};
use prometheus::{
    Encoder as _, Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry, TextEncoder,
};
use shared::verdict::{Verdict, VerdictKind};
use std::time::Duration;
use vllm::Vllm;

/// All metrics of the gateway.
pub(crate) struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    pub(crate) in_flight: IntGauge,
    pub(crate) queued: IntGauge,
    pub(crate) queue_wait: Histogram,
    pub(crate) queue_refused: IntCounter,
    pub(crate) connections: IntGauge,
    pub(crate) connections_refused: IntCounter,
    pub(crate) access_log_dropped: IntCounter,
    ttft: PerLabel<VerdictKind>,
    inter_token: Histogram,
    e2e: PerLabel<VerdictKind>,
    stage: PerLabel<Stage>,
    pub(crate) token_write: Histogram,
    prompt_tokens: IntCounter,
    cached_tokens: IntCounter,
    bridged_tokens: IntCounter,
    completion_tokens: IntCounter,
    payload_bytes: IntCounter,
    pub(crate) retries: IntCounter,
    workers: IntGaugeVec,
    pairs: IntGauge,
    fleet: FleetMetrics,
    pub(crate) vllm: Vllm,
}

/// A part of a request's life.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stage {
    /// Rendering the template and encoding the prompt.
    Tokenize,
    /// Waiting for the decoder's engine.
    Queue,
    /// Computing on the prefill worker.
    Prefill,
    /// Transfer time that prefill did not hide.
    Transfer,
    /// The decoder's wait for the transfer.
    Wait,
    /// Turning blocks into the engine's arrays.
    Ingest,
    /// Computing prompt positions on the decoder.
    DecoderPrefill,
    /// First to last token.
    Decode,
}

impl Label for Stage {
    fn index(self) -> usize {
        self as usize
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Tokenize => "tokenize",
            Self::Queue => "queue",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::Wait => "wait",
            Self::Ingest => "ingest",
            Self::DecoderPrefill => "decoder_prefill",
            Self::Decode => "decode",
        }
    }
}

impl Label for VerdictKind {
    fn index(self) -> usize {
        self as usize
    }

    fn as_str(self) -> &'static str {
        self.as_str()
    }
}

/// Reasons of a plan.
const PLAN_REASONS: &[&str] =
    &["short_prompt", "no_prefill_worker", "prefill_worker_failing", "predicted_slower", "forced", "evicted"];
/// Reasons of a transfer that came to little or nothing.
const TRANSFER_REASONS: &[&str] = &[
    "nothing_arrived",
    "short_transfer",
    "bad_ticket",
    "fingerprint_mismatch",
    "layout_mismatch",
    "tokens_mismatch",
    "checksum",
    "incomplete",
    "protocol_error",
    "over_budget",
    "connection_lost",
    "timeout",
    "cancelled",
    "prefill_failed",
    "prefill_busy",
    "internal",
];
/// Reasons of an error.
const ERROR_REASONS: &[&str] = &[
    "invalid_request",
    "context_length_exceeded",
    "unauthorized",
    "too_many_requests",
    "shutting_down",
    "no_decode_worker",
    "decode_worker_lost",
    "too_long",
    "busy",
    "bridge_required",
    "incompatible",
    "transfer_failed",
    "engine",
    "client_gone",
];

/// Whether a reason may be a label; anything else is counted as `other`, which bounds the label.
fn is_known(reason: &str) -> bool {
    reason.is_empty() || [PLAN_REASONS, TRANSFER_REASONS, ERROR_REASONS].iter().any(|r| r.contains(&reason))
}

/// Counters that exist from the start, at 0. `increase()` over a counter that appears at 1 says 0, and a home lab's
/// first failure of a kind would raise no alert.
fn expected() -> impl Iterator<Item = (VerdictKind, &'static str)> {
    let each = |verdict: VerdictKind, reasons: &'static [&'static str]| {
        reasons.iter().map(move |reason| (verdict, *reason))
    };
    each(VerdictKind::Complete, &[""])
        .chain(each(VerdictKind::Warm, &[""]))
        .chain(each(VerdictKind::Partial, TRANSFER_REASONS))
        .chain(each(VerdictKind::Failed, TRANSFER_REASONS))
        .chain(each(VerdictKind::Native, PLAN_REASONS))
        .chain(each(VerdictKind::Native, ERROR_REASONS))
        .chain(each(VerdictKind::Refused, PLAN_REASONS))
        .chain(each(VerdictKind::Refused, TRANSFER_REASONS))
}

impl Metrics {
    /// Creates and registers everything.
    ///
    /// # Errors
    /// Only when two metrics share a name.
    pub(crate) fn new(model_name: &str) -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let made = Made::new(&registry, "pd_bridge_");
        let requests = made.counters("requests_total", "Answered requests.", &["verdict", "reason"])?;
        for (verdict, reason) in expected() {
            requests.with_label_values(&[verdict.as_str(), reason]);
        }
        Ok(Self {
            requests,
            in_flight: made.gauge("requests_in_flight", "Requests being answered.")?,
            queued: made.gauge("requests_queued", "Requests that wait to be let in.")?,
            queue_wait: made.histogram("queue_wait_seconds", "Wait to be let in.", SLOW)?,
            queue_refused: made
                .counter("queue_refused_total", "Requests for which the queue was full or too slow.")?,
            connections: made.gauge("connections", "Open connections.")?,
            connections_refused: made.counter("connections_refused_total", "Connections beyond the cap.")?,
            access_log_dropped: made
                .counter("access_log_dropped_total", "Access log lines that the disk was too slow for.")?,
            ttft: PerLabel::new(made.histograms(
                "ttft_seconds",
                "Arrival to first token.",
                &["verdict"],
                SLOW,
            )?),
            inter_token: made.histogram(
                "inter_token_latency_seconds",
                "Time between token messages.",
                FAST,
            )?,
            e2e: PerLabel::new(made.histograms(
                "e2e_seconds",
                "Arrival to end of answer.",
                &["verdict"],
                SLOW,
            )?),
            stage: PerLabel::new(made.histograms(
                "stage_seconds",
                "Parts of a request's life.",
                &["stage"],
                SLOW,
            )?),
            token_write: made.histogram(
                "token_write_seconds",
                "Arrival of a decoder's token message to the write of its SSE bytes.",
                FAST,
            )?,
            prompt_tokens: made.counter("prompt_tokens_total", "Prompt tokens.")?,
            cached_tokens: made.counter("cached_tokens_total", "Prompt tokens served from cache.")?,
            bridged_tokens: made
                .counter("bridged_tokens_total", "Prompt tokens that came through transfers.")?,
            completion_tokens: made.counter("completion_tokens_total", "Generated tokens.")?,
            payload_bytes: made.counter("payload_bytes_total", "Cache bytes received in transfers.")?,
            retries: made.counter("retries_total", "Requests tried again after a lost worker.")?,
            workers: made.gauges("workers_connected", "Connected workers.", &["role"])?,
            pairs: made.gauge("worker_pairs", "Prefill/decode pairs that can bridge.")?,
            fleet: FleetMetrics::register(&registry)?,
            vllm: Vllm::new(&registry, model_name)?,
            registry,
        })
    }

    /// Counts the end of a request, with the verdict it ended with.
    pub(crate) fn ended(&self, verdict: &Verdict, elapsed: Duration) {
        let reason = verdict.reason.as_deref().unwrap_or("");
        let reason = if is_known(reason) { reason } else { "other" };
        self.requests.with_label_values(&[verdict.verdict.as_str(), reason]).inc();
        self.e2e.of(verdict.verdict).observe(elapsed.as_secs_f64());
        self.vllm.e2e.observe(elapsed.as_secs_f64());
    }

    /// Counts what a started answer's verdict says.
    pub(crate) fn started(&self, verdict: &Verdict, ttft: Duration) {
        self.ttft.of(verdict.verdict).observe(ttft.as_secs_f64());
        self.prompt_tokens.inc_by(u64::from(verdict.prompt_tokens));
        self.cached_tokens.inc_by(u64::from(verdict.cached_tokens));
        self.bridged_tokens.inc_by(u64::from(verdict.bridged_tokens));
        self.payload_bytes.inc_by(verdict.payload_bytes);
        self.vllm.started(verdict, ttft);
    }

    /// Counts tokens of an answer.
    pub(crate) fn generated(&self, tokens: u64) {
        self.completion_tokens.inc_by(tokens);
        self.vllm.generation_tokens.inc_by(tokens);
    }

    /// Records the time between two token messages.
    pub(crate) fn between_tokens(&self, time: Duration) {
        self.inter_token.observe(time.as_secs_f64());
        self.vllm.between_tokens(time.as_secs_f64());
    }

    /// Records a stage's time in milliseconds.
    pub(crate) fn stage_ms(&self, stage: Stage, ms: f64) {
        self.stage.of(stage).observe(ms / 1000.0);
    }

    /// Sets the fleet's gauges.
    pub(crate) fn fleet(&self, prefill: usize, decode: usize, pairs: usize) {
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.workers.with_label_values(&["prefill"]).set(count(prefill));
        self.workers.with_label_values(&["decode"]).set(count(decode));
        self.pairs.set(count(pairs));
    }

    /// Brings everything about machines and workers up to date.
    pub(crate) fn observe(&self, fleet: &Fleet, directory: Option<&Directory>) {
        fleet.observe(self);
        self.fleet.observe(&self.registry, fleet, directory);
    }

    /// The Prometheus text format.
    pub(crate) fn render(&self) -> Vec<u8> {
        self.vllm.running.set(self.in_flight.get());
        self.vllm.waiting.set(self.queued.get());
        let mut out = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            tracing::error!(%error, "metrics");
        }
        out
    }
}

/// 0.1 ms to 10 s.
const FAST: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
/// 1 ms to 10 min.
const SLOW: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0, 600.0];

#[cfg(test)]
mod tests {
    use super::*;
    use shared::verdict::Parties;

    #[test]
    fn free_text_never_becomes_a_label() {
        let metrics = Metrics::new("m").unwrap();
        let verdict = |reason: &str| {
            Verdict::without_receipt(VerdictKind::Failed, Some(reason.into()), Parties::default(), 1)
        };
        metrics.ended(&verdict("checksum"), Duration::from_millis(1));
        metrics.ended(&verdict("disk on fire at 0x1234"), Duration::from_millis(1));
        let text = String::from_utf8(metrics.render()).unwrap();
        assert!(text.contains(r#"pd_bridge_requests_total{reason="checksum",verdict="failed"} 1"#), "{text}");
        assert!(text.contains(r#"reason="other""#) && !text.contains("0x1234"));
    }

    #[test]
    fn a_first_failure_is_an_increase() {
        let text = String::from_utf8(Metrics::new("m").unwrap().render()).unwrap();
        assert!(text.contains(r#"pd_bridge_requests_total{reason="timeout",verdict="failed"} 0"#), "{text}");
    }
}
