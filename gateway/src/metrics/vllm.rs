//! The metrics that dashboards made for vLLM read, with vLLM's names, labels and buckets.

use super::made::Made;
use prometheus::{Error, Gauge, Histogram, IntCounter, IntGauge, Registry};
use shared::verdict::Verdict;
use std::time::Duration;

/// vLLM's names, as of its V1 engine.
pub(crate) struct Vllm {
    pub(super) running: IntGauge,
    pub(super) waiting: IntGauge,
    cache_usage: Gauge,
    cache_usage_old: Gauge,
    prompt_tokens: IntCounter,
    pub(super) generation_tokens: IntCounter,
    cache_queries: IntCounter,
    cache_hits: IntCounter,
    external_queries: IntCounter,
    external_hits: IntCounter,
    _preemptions: IntCounter,
    success: [IntCounter; 4],
    ttft: Histogram,
    inter_token: Histogram,
    inter_token_old: Histogram,
    mean_inter_token: Histogram,
    pub(super) e2e: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    params_n: Histogram,
    params_max_tokens: Histogram,
}

/// Where the time of an answered request went.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Times {
    /// Waiting, anywhere.
    pub(crate) queue: Duration,
    /// From the end of the wait to the first token.
    pub(crate) prefill: Duration,
    /// From the first token to the last.
    pub(crate) decode: Duration,
    /// Tokens of all its choices.
    pub(crate) completion_tokens: u64,
}

impl Vllm {
    pub(super) fn new(registry: &Registry, model_name: &str) -> Result<Self, Error> {
        let labels = vec![("model_name", model_name.to_owned()), ("engine", "0".to_owned())];
        let made = Made::new(registry, "vllm:").labelled(labels);
        let time = |name: &str, help: &str| made.histogram(name, help, REQUEST_TIMES_S);
        let count = |name: &str, help: &str| made.histogram(name, help, TOKEN_COUNTS);
        let success = made.counters("request_success_total", "Answers.", &["finished_reason"])?;
        Ok(Self {
            running: made.gauge("num_requests_running", "Requests being answered.")?,
            waiting: made.gauge("num_requests_waiting", "Requests that wait to be let in.")?,
            cache_usage: made
                .share("kv_cache_usage_perc", "Filled share of the decoders' prefix stores, 0 to 1.")?,
            cache_usage_old: made
                .share("gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.")?,
            prompt_tokens: made.counter("prompt_tokens_total", "Prompt tokens.")?,
            generation_tokens: made.counter("generation_tokens_total", "Generated tokens.")?,
            cache_queries: made.counter("prefix_cache_queries_total", "Prompt tokens looked up.")?,
            cache_hits: made
                .counter("prefix_cache_hits_total", "Prompt tokens that the decoder held already.")?,
            external_queries: made.counter(
                "external_prefix_cache_queries_total",
                "Prompt tokens that the decoder did not hold.",
            )?,
            external_hits: made
                .counter("external_prefix_cache_hits_total", "Prompt tokens that came through transfers.")?,
            _preemptions: made.counter("num_preemptions_total", "Preempted requests; there are none.")?,
            // A dashboard's rate of something that has not happened yet is 0, not nothing.
            success: REASONS.map(|reason| success.with_label_values(&[reason])),
            ttft: made.histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_S)?,
            inter_token: made.histogram(
                "inter_token_latency_seconds",
                "Between tokens.",
                BETWEEN_TOKENS_S,
            )?,
            inter_token_old: made.histogram(
                "time_per_output_token_seconds",
                "The older name of vllm:inter_token_latency_seconds.",
                BETWEEN_TOKENS_S,
            )?,
            mean_inter_token: made.histogram(
                "request_time_per_output_token_seconds",
                "Mean time between tokens of a request.",
                BETWEEN_TOKENS_S,
            )?,
            e2e: time("e2e_request_latency_seconds", "Arrival to end of answer.")?,
            queue: time("request_queue_time_seconds", "Waiting.")?,
            prefill: time("request_prefill_time_seconds", "End of the wait to first token.")?,
            decode: time("request_decode_time_seconds", "First token to last.")?,
            inference: time("request_inference_time_seconds", "End of the wait to last token.")?,
            request_prompt_tokens: count("request_prompt_tokens", "Prompt tokens of a request.")?,
            request_generation_tokens: count("request_generation_tokens", "Tokens of a choice.")?,
            params_n: made.histogram(
                "request_params_n",
                "Choices asked for.",
                &[1.0, 2.0, 5.0, 10.0, 20.0],
            )?,
            params_max_tokens: count("request_params_max_tokens", "Tokens asked for at most.")?,
        })
    }

    /// A request was let in.
    pub(crate) fn asked(&self, choices: u32, max_tokens: Option<u32>) {
        self.params_n.observe(f64::from(choices));
        if let Some(max_tokens) = max_tokens {
            self.params_max_tokens.observe(f64::from(max_tokens));
        }
    }

    pub(super) fn started(&self, verdict: &Verdict, ttft: Duration) {
        let local = verdict.cached_tokens.saturating_sub(verdict.bridged_tokens);
        self.ttft.observe(ttft.as_secs_f64());
        self.prompt_tokens.inc_by(u64::from(verdict.prompt_tokens));
        self.request_prompt_tokens.observe(f64::from(verdict.prompt_tokens));
        self.cache_queries.inc_by(u64::from(verdict.prompt_tokens));
        self.cache_hits.inc_by(u64::from(local));
        self.external_queries.inc_by(u64::from(verdict.prompt_tokens.saturating_sub(local)));
        self.external_hits.inc_by(u64::from(verdict.bridged_tokens));
    }

    pub(super) fn between_tokens(&self, seconds: f64) {
        self.inter_token.observe(seconds);
        self.inter_token_old.observe(seconds);
    }

    /// A choice is complete.
    pub(crate) fn finished(&self, cut_by_length: bool, completion_tokens: u32) {
        self.success[usize::from(cut_by_length)].inc();
        self.request_generation_tokens.observe(f64::from(completion_tokens));
    }

    /// The client left before the end.
    pub(crate) fn aborted(&self) {
        self.success[2].inc();
    }

    /// There was no answer, or only a part of it.
    pub(crate) fn failed(&self) {
        self.success[3].inc();
    }

    /// Where the time of an answered request went.
    pub(crate) fn spent(&self, times: Times) {
        let Times { queue, prefill, decode, completion_tokens } = times;
        self.queue.observe(queue.as_secs_f64());
        self.prefill.observe(prefill.as_secs_f64());
        self.decode.observe(decode.as_secs_f64());
        self.inference.observe((prefill + decode).as_secs_f64());
        if completion_tokens > 1 {
            self.mean_inter_token.observe(decode.as_secs_f64() / (completion_tokens - 1) as f64);
        }
    }

    /// The filled share of the decoders' prefix stores.
    pub(crate) fn cache_usage(&self, share: f64) {
        self.cache_usage.set(share);
        self.cache_usage_old.set(share);
    }
}

/// How a choice ends: `stop`, `length`, `abort` and `error`, in the order of the counters.
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];
const TTFT_S: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const BETWEEN_TOKENS_S: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const REQUEST_TIMES_S: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
/// vLLM ends them at the model's length; one list for all keeps sums over several models possible.
const TOKEN_COUNTS: &[f64] = &[
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    50.0,
    100.0,
    200.0,
    500.0,
    1000.0,
    2000.0,
    5000.0,
    10_000.0,
    20_000.0,
    50_000.0,
    100_000.0,
    200_000.0,
    500_000.0,
    1_000_000.0,
];
