//! Histograms with one label of few values, found without hashing.

use prometheus::{Histogram, HistogramVec};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Most values of a label.
const VALUES: usize = 8;

/// A label whose values are known.
pub(super) trait Label: Copy {
    /// Its place among all values, below 8.
    fn index(self) -> usize;
    /// Its text.
    fn as_str(self) -> &'static str;
}

/// A family of histograms; one appears with its first observation.
pub(super) struct PerLabel<L> {
    family: HistogramVec,
    known: [OnceLock<Histogram>; VALUES],
    _label: PhantomData<L>,
}

impl<L: Label> PerLabel<L> {
    pub(super) fn new(family: HistogramVec) -> Self {
        Self { family, known: Default::default(), _label: PhantomData }
    }

    /// The histogram of a value.
    pub(super) fn of(&self, label: L) -> Histogram {
        let make = || self.family.with_label_values(&[label.as_str()]);
        self.known.get(label.index()).map_or_else(make, |known| known.get_or_init(make).clone())
    }
}
