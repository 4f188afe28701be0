//! Figures as a table, as JSON, as the bars of a picture.

use serde_json::{Value, json};
use slipway_bench::human;
use slipway_telemetry::{Histogram, Timeline};

use super::figures::{Figures, Key, LAYERS, Latencies};
use crate::args::{By, SnoopArgs};
use crate::table::table;

const HEADER: [&str; 9] =
    ["QUEUE", "OPCODE", "LAYER", "MEAN", "P50", "P99", "P99.9", "MOST", "SHARE"];

/// The table of `figures` with a line about what it covers.
pub fn text(figures: &Figures, args: &SnoopArgs) -> String {
    let rows = figures.by(args.by);
    let commands: u64 = rows.values().map(|layers| whole(layers).count()).sum();
    let seconds = figures.seconds();
    let mut text = format!("{}: {commands} commands in {seconds:.1} s", args.target);
    if args.every > 1 {
        text += &format!(", of one doorbell in {}", args.every);
    }
    if figures.missed > 0 {
        text += &format!("; {} of new queues not counted", figures.missed);
    }
    text.push('\n');
    if commands > 0 {
        let lines: Vec<_> = rows.iter().flat_map(|(key, layers)| lines(key, layers)).collect();
        text += &table(HEADER, &lines);
    }
    text
}

fn whole(layers: &Latencies) -> &Histogram {
    &layers[LAYERS.len() - 1]
}

fn lines(key: &Key, layers: &Latencies) -> Vec<[String; 9]> {
    let total = whole(layers).mean();
    let mut lines = Vec::new();
    for ((_, name), layer) in LAYERS.iter().zip(layers) {
        // A group's name stands at its first line only.
        let first = lines.is_empty();
        let group = |text: String| if first { text } else { String::new() };
        let share = if total > 0.0 { layer.mean() / total * 100.0 } else { 0.0 };
        lines.push([
            group(key.queue()),
            group(key.opcode().to_owned()),
            (*name).to_owned(),
            human(layer.mean().round() as u64),
            human(layer.percentile(50.0)),
            human(layer.percentile(99.0)),
            human(layer.percentile(99.9)),
            human(layer.greatest()),
            format!("{share:.1} %"),
        ]);
    }
    lines
}

/// `figures` as JSON; `total` when they are of all intervals.
pub fn json(figures: &Figures, by: Option<By>, total: bool) -> Value {
    let (from, to) = figures.span.unwrap_or_default();
    let rows = figures.by(by);
    let rows: Vec<Value> = rows.iter().map(|(key, layers)| json_row(key, layers)).collect();
    json!({
        "total": total,
        "from_ns": from,
        "to_ns": to,
        "missed": figures.missed,
        "rows": rows,
    })
}

fn json_row(key: &Key, layers: &Latencies) -> Value {
    let all = LAYERS.iter().zip(layers);
    let layers: Vec<Value> = all.map(|((_, name), layer)| json_layer(name, layer)).collect();
    json!({ "queue": key.queue, "opcode": key.opcode(), "layers": layers })
}

fn json_layer(name: &str, layer: &Histogram) -> Value {
    json!({
        "layer": name,
        "count": layer.count(),
        "mean_ns": layer.mean(),
        "least_ns": layer.least(),
        "p50_ns": layer.percentile(50.0),
        "p90_ns": layer.percentile(90.0),
        "p99_ns": layer.percentile(99.0),
        "p999_ns": layer.percentile(99.9),
        "greatest_ns": layer.greatest(),
        "histogram": layer.counts().collect::<Vec<_>>(),
    })
}

/// A bar for each row: its layers' means, one after the other.
pub fn stacks(figures: &Figures, by: Option<By>) -> Vec<Timeline> {
    let rows = figures.by(by);
    rows.iter().map(|(key, layers)| stack(key, layers)).collect()
}

fn stack(key: &Key, layers: &Latencies) -> Timeline {
    let mut bar = Timeline::new(key.name());
    let mut at = 0.0;
    for ((_, name), layer) in LAYERS.iter().zip(layers).take(LAYERS.len() - 1) {
        let end = at + layer.mean();
        bar.record(*name, at.round() as u64, end.round() as u64);
        at = end;
    }
    bar
}
