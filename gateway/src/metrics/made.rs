//! Makes and registers metrics under one prefix.

use prometheus::core::Collector;
use prometheus::{
    Error, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry,
};

/// A maker of metrics with one prefix and the same fixed labels.
pub(super) struct Made<'a> {
    registry: &'a Registry,
    prefix: &'static str,
    labels: Vec<(&'static str, String)>,
}

impl<'a> Made<'a> {
    pub(super) fn new(registry: &'a Registry, prefix: &'static str) -> Self {
        Self { registry, prefix, labels: Vec::new() }
    }

    /// Every metric gets these labels.
    pub(super) fn labelled(self, labels: Vec<(&'static str, String)>) -> Self {
        Self { labels, ..self }
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> Result<IntCounter, Error> {
        self.register(IntCounter::with_opts(self.opts(name, help))?)
    }

    pub(super) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec, Error> {
        self.register(IntCounterVec::new(self.opts(name, help), labels)?)
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, Error> {
        self.register(IntGauge::with_opts(self.opts(name, help))?)
    }

    /// A gauge of something that is no whole number.
    pub(super) fn share(&self, name: &str, help: &str) -> Result<Gauge, Error> {
        self.register(Gauge::with_opts(self.opts(name, help))?)
    }

    pub(super) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, Error> {
        self.register(IntGaugeVec::new(self.opts(name, help), labels)?)
    }

    pub(super) fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram, Error> {
        self.register(Histogram::with_opts(self.histogram_opts(name, help, buckets))?)
    }

    pub(super) fn histograms(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
        buckets: &[f64],
    ) -> Result<HistogramVec, Error> {
        self.register(HistogramVec::new(self.histogram_opts(name, help, buckets), labels)?)
    }

    fn opts(&self, name: &str, help: &str) -> Opts {
        let opts = Opts::new(format!("{}{name}", self.prefix), help);
        self.labels.iter().fold(opts, |opts, (label, value)| opts.const_label(*label, value))
    }

    fn histogram_opts(&self, name: &str, help: &str, buckets: &[f64]) -> HistogramOpts {
        HistogramOpts::from(self.opts(name, help)).buckets(buckets.to_vec())
    }

    fn register<C: Collector + Clone + 'static>(&self, made: C) -> Result<C, Error> {
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }
}
