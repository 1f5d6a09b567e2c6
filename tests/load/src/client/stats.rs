//! Times in microseconds, and what is said of them.

use crate::process::Usage;
use hdrhistogram::Histogram;
use serde::Serialize;

/// Quantiles of times in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Quantiles {
    /// How many times there are.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Half of them are at most this.
    pub p50_us: u64,
    /// Nine tenths.
    pub p90_us: u64,
    /// 99 of 100.
    pub p99_us: u64,
    /// 999 of 1,000.
    pub p999_us: u64,
    /// All of them.
    pub max_us: u64,
}

impl Quantiles {
    /// Quantiles of raw times, kept to three digits.
    #[must_use]
    pub fn of(times_us: impl IntoIterator<Item = u64>) -> Self {
        let Ok(mut histogram) = Histogram::<u64>::new(3) else { return Self::default() };
        histogram.auto(true);
        // With automatic size, every time fits.
        for time in times_us {
            let _ = histogram.record(time);
        }
        Self {
            count: histogram.len(),
            mean_us: histogram.mean(),
            p50_us: histogram.value_at_quantile(0.5),
            p90_us: histogram.value_at_quantile(0.9),
            p99_us: histogram.value_at_quantile(0.99),
            p999_us: histogram.value_at_quantile(0.999),
            max_us: histogram.max(),
        }
    }
}

/// One measurement.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Length of the measurement.
    pub wall_s: f64,
    /// Answers that came whole and right.
    pub answers: u64,
    /// Requests that failed.
    pub failures: u64,
    /// What the first failure said.
    pub first_failure: Option<String>,
    /// Tokens that arrived.
    pub tokens: u64,
    /// Request to whole answer.
    pub answer: Quantiles,
    /// Fixed rate: how late this client itself sent its requests.
    pub late: Quantiles,
    /// Streams: request to first token.
    pub first_token: Quantiles,
    /// Streams: between two tokens of one stream.
    pub inter_token: Quantiles,
    /// Streams: from the source's send to the client's receipt of a token.
    pub on_the_way: Quantiles,
    /// CPU time of the measured processes in this time.
    pub cpu_s: f64,
    /// Their memory before.
    pub memory_before_bytes: u64,
    /// Their memory, the most that was seen.
    pub memory_peak_bytes: u64,
    /// CPU time of this client.
    pub client_cpu_s: f64,
}

impl Report {
    /// Notes a failure.
    pub fn fail(&mut self, what: &impl ToString) {
        self.failures += 1;
        self.first_failure.get_or_insert_with(|| what.to_string());
    }

    /// Adds what processes used between two readings.
    pub fn used(&mut self, before: Usage, after: Usage) {
        self.cpu_s = after.cpu_s - before.cpu_s;
        self.memory_before_bytes = before.memory_bytes;
        self.memory_peak_bytes = self.memory_peak_bytes.max(after.memory_bytes);
    }
}
