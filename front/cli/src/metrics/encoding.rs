//! Families of metrics of one shape.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// A metric's name, its help, and where its value is.
pub(super) type Sum<T> = (&'static str, &'static str, fn(&T) -> u64);

/// A metric's labels: names and values.
pub(super) type Labels<'a, const N: usize> = [(&'a str, &'a str); N];

/// Encodes a family of sums with its (name, help); the format adds `_total` to the name.
pub(super) fn counters<'a, const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    values: impl IntoIterator<Item = (Labels<'a, N>, u64)>,
) -> fmt::Result {
    let mut all = to.encode_descriptor(name, help, None, MetricType::Counter)?;
    family(&mut all, values, |one, value| one.encode_counter::<NoLabelSet, _, u64>(&value, None))
}

/// Encodes a family of present values with its (name, help, unit).
pub(super) fn gauges<'a, const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<&Unit>),
    values: impl IntoIterator<Item = (Labels<'a, N>, u64)>,
) -> fmt::Result {
    let mut all = to.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    let value = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    family(&mut all, values, |one, number| one.encode_gauge(&value(number)))
}

/// Encodes a family of sums of durations with its (name, help), from nanoseconds. The format adds
/// `_seconds_total` to the name.
pub(super) fn seconds_total<'a, const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    values: impl IntoIterator<Item = (Labels<'a, N>, u64)>,
) -> fmt::Result {
    let unit = Some(&Unit::Seconds);
    let mut all = to.encode_descriptor(name, help, unit, MetricType::Counter)?;
    family(&mut all, values, |one, ns| one.encode_counter::<NoLabelSet, _, u64>(&seconds(ns), None))
}

/// Returns the values of a family without labels, which has one.
pub(super) fn single(value: u64) -> [(Labels<'static, 0>, u64); 1] {
    [([], value)]
}

fn family<'a, const N: usize>(
    all: &mut MetricEncoder<'_>,
    values: impl IntoIterator<Item = (Labels<'a, N>, u64)>,
    encode: impl Fn(&mut MetricEncoder<'_>, u64) -> fmt::Result,
) -> fmt::Result {
    values.into_iter().try_for_each(|(labels, value)| {
        if N == 0 {
            return encode(all, value);
        }
        let labels = labels.map(|(name, value)| (name, escaped(value)));
        encode(&mut all.encode_family(&labels)?, value)
    })
}

/// Escapes a label's value (OpenMetrics 1.0, section *Escaping*), which the library does not do.
/// Names of ports are others' words.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Encodes a family of histograms of durations with its (name, help): for each its label, the
/// durations in each bucket, and their sum in nanoseconds. `bounds_ns` are the upper bounds of all
/// buckets but the last.
pub(super) fn histograms<'a>(
    to: &mut DescriptorEncoder<'_>,
    (name, help): (&str, &str),
    bounds_ns: &[u64],
    values: impl IntoIterator<Item = ((&'a str, &'a str), &'a [u64], u64)>,
) -> fmt::Result {
    let unit = Some(&Unit::Seconds);
    let mut all = to.encode_descriptor(name, help, unit, MetricType::Histogram)?;
    for (label, counts, sum_ns) in values {
        let bounds = bounds_ns.iter().map(|ns| seconds(*ns)).chain([f64::MAX]);
        let buckets: Vec<_> = bounds.zip(counts.iter().copied()).collect();
        let (labels, count) = ([label], counts.iter().sum());
        all.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
            seconds(sum_ns),
            count,
            &buckets,
            None,
        )?;
    }
    Ok(())
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
