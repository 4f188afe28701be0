//! Figures as a table, as JSON, and as the bars of a picture.

use serde_json::{Value, json};
use slipway_bench::human;
use slipway_telemetry::{Histogram, Timeline};

use super::figures::{Figures, Key, LAYERS, Latencies};
use super::guest::GuestFigures;
use crate::args::{Grouping, SnoopArgs};
use crate::table::table;

const HEADER: [&str; 9] =
    ["QUEUE", "OPCODE", "LAYER", "MEAN", "P50", "P99", "P99.9", "MOST", "SHARE"];

/// The figures to show: the host's, and the guest's if it was traced.
pub struct ShownFigures<'a> {
    pub figures: &'a Figures,
    pub guest: Option<&'a GuestFigures>,
    pub args: &'a SnoopArgs,
}

/// A layer of a group of commands.
struct Row {
    layer: &'static str,
    mean: f64,
    /// The distribution, or `None` if the mean is a difference of two means.
    latency: Option<Histogram>,
    /// The row is one of the parts that add up to the last row.
    is_part: bool,
    /// The error of the mean from the drift between two clocks.
    clock_error: Option<f64>,
    /// The error of the mean if it is an estimate.
    estimate_error: Option<f64>,
}

impl Row {
    fn measured(layer: &'static str, latency: &Histogram, is_part: bool) -> Self {
        Self { latency: Some(latency.clone()), is_part, ..Self::difference(layer, latency.mean()) }
    }

    fn difference(layer: &'static str, mean: f64) -> Self {
        Self { layer, mean, latency: None, is_part: true, clock_error: None, estimate_error: None }
    }
}

impl ShownFigures<'_> {
    /// Returns how the rows are grouped. By default a guest's figures are grouped by opcode, since
    /// a guest does not know the controller's queues.
    fn by(&self) -> Option<Grouping> {
        self.args.by.or(self.guest.map(|_| Grouping::Opcode))
    }

    /// Returns the rows of a group: the layers in the order in which a command passes them, then
    /// the sums.
    fn rows(&self, key: &Key, latencies: &Latencies) -> Vec<Row> {
        let [layers @ .., whole] = latencies;
        let layers =
            LAYERS.iter().zip(layers).map(|((_, name), one)| Row::measured(name, one, true));
        let mut rows: Vec<Row> = layers.collect();
        rows.push(Row::measured(LAYERS[LAYERS.len() - 1].1, whole, false));
        let guest = self.guest.filter(|_| key.queue.is_none());
        let Some((guest, above)) =
            guest.and_then(|guest| Some((guest, guest.layers(key.class, whole.mean())?)))
        else {
            return rows;
        };
        let driver = Row::difference("guest driver", above.driver);
        rows.insert(0, Row { clock_error: Some(above.clock_error), ..driver });
        let seen = guest.latency(key.class);
        let whole = match (above.block, above.calls) {
            (None, _) => Row::measured("driver, whole", &seen.driver, false),
            (Some(_), None) => Row::measured("block layer, whole", &seen.block, false),
            (Some(_), Some(_)) => Row::measured("system call, whole", &seen.application, false),
        };
        rows.push(whole);
        for (name, layer) in [("guest block layer", above.block), ("system call", above.calls)] {
            if let Some(layer) = layer {
                rows.insert(0, Row::difference(name, layer));
            }
        }
        if let Some(program) = above.program {
            let row = Row::difference("program", program);
            rows.insert(0, Row { estimate_error: Some(program), ..row });
            rows.push(Row { is_part: false, ..Row::difference("application", above.total) });
        }
        rows
    }

    /// Returns the table, with a line about what it covers.
    pub fn text(&self) -> String {
        let groups = self.figures.by(self.by());
        let mut text = self.headline();
        let lines =
            groups.iter().flat_map(|(key, latencies)| lines(key, &self.rows(key, latencies)));
        let lines: Vec<_> = lines.collect();
        if !lines.is_empty() {
            text += &table(HEADER, &lines);
        }
        let most = |of: fn(&Row) -> Option<f64>| {
            let rows = groups.iter().flat_map(|(key, latencies)| self.rows(key, latencies));
            let most = rows.filter_map(|row| of(&row)).reduce(f64::max);
            most.map(|most| human(most.round() as u64))
        };
        if let Some(error) = most(|row| row.clock_error) {
            text += &format!("guest driver spans two clocks: it may be wrong by {error}\n");
        }
        if let Some(error) = most(|row| row.estimate_error) {
            text += &format!(
                "program is half of the time between system calls: it may be wrong by {error}\n"
            );
        }
        text
    }

    fn headline(&self) -> String {
        let Figures { missed, .. } = self.figures;
        let commands = self.figures.commands();
        let seconds = self.figures.seconds();
        let mut text =
            format!("{}: {commands} commands followed in {seconds:.1} s", self.args.target());
        if let Some(every) = self.args.every.filter(|every| *every > 1) {
            text += &format!(", of one doorbell in {every}");
        }
        if *missed > 0 {
            text += &format!("; {missed} of new queues not counted");
        }
        if let Some(guest) = self.guest.filter(|guest| guest.losses > 0) {
            text += &format!("; the guest's kernel lost events {} times", guest.losses);
        }
        text + "\n"
    }

    /// Returns the figures as JSON. `total` is set if they cover all intervals.
    pub fn json(&self, total: bool) -> Value {
        let (from, to) = self.figures.span.unwrap_or_default();
        let groups = self.figures.by(self.by());
        let rows = groups.iter().map(|(key, latencies)| {
            let layers: Vec<Value> = self.rows(key, latencies).iter().map(json_layer).collect();
            json!({ "queue": key.queue, "opcode": key.opcode(), "layers": layers })
        });
        json!({
            "total": total,
            "from_ns": from,
            "to_ns": to,
            "missed": self.figures.missed,
            "guest_losses": self.guest.map(|guest| guest.losses),
            "rows": rows.collect::<Vec<_>>(),
        })
    }

    /// Returns a bar for each group: its layers' means, end to end.
    pub fn stacks(&self) -> Vec<Timeline> {
        let groups = self.figures.by(self.by());
        let bars = groups.iter().map(|(key, latencies)| stack(key, &self.rows(key, latencies)));
        bars.collect()
    }
}

fn lines(key: &Key, rows: &[Row]) -> Vec<[String; 9]> {
    let total = rows.last().map_or(0.0, |row| row.mean);
    let mut lines = Vec::new();
    for row in rows {
        // Only the first line of a group shows the group's name.
        let first = lines.is_empty();
        let group = |text: String| if first { text } else { String::new() };
        let share = if total > 0.0 { row.mean / total * 100.0 } else { 0.0 };
        let of = |figure: fn(&Histogram) -> u64| {
            row.latency.as_ref().map_or_else(|| "-".to_owned(), |latency| human(figure(latency)))
        };
        lines.push([
            group(key.queue()),
            group(key.opcode().to_owned()),
            row.layer.to_owned(),
            signed(row.mean),
            of(|latency| latency.percentile(50.0)),
            of(|latency| latency.percentile(99.0)),
            of(|latency| latency.percentile(99.9)),
            of(Histogram::greatest),
            format!("{share:.1} %"),
        ]);
    }
    lines
}

/// Formats a difference of means. It may be below zero, since the two means cover slightly
/// different commands.
fn signed(nanos: f64) -> String {
    let sign = if nanos <= -0.5 { "-" } else { "" };
    format!("{sign}{}", human(nanos.abs().round() as u64))
}

fn json_layer(row: &Row) -> Value {
    let mut value = json!({ "layer": row.layer, "mean_ns": row.mean, "part": row.is_part });
    if let Some(error) = row.clock_error {
        value["clock_error_ns"] = json!(error);
    }
    if let Some(error) = row.estimate_error {
        value["estimate_error_ns"] = json!(error);
    }
    if let Some(latency) = &row.latency {
        value["count"] = json!(latency.count());
        value["least_ns"] = json!(latency.least());
        for (name, percent) in
            [("p50_ns", 50.0), ("p90_ns", 90.0), ("p99_ns", 99.0), ("p999_ns", 99.9)]
        {
            value[name] = json!(latency.percentile(percent));
        }
        value["greatest_ns"] = json!(latency.greatest());
        value["histogram"] = json!(latency.counts().collect::<Vec<_>>());
    }
    value
}

fn stack(key: &Key, rows: &[Row]) -> Timeline {
    let mut bar = Timeline::new(key.name());
    let mut at = 0.0;
    for row in rows.iter().filter(|row| row.is_part && row.mean > 0.0) {
        let end = at + row.mean;
        bar.record(row.layer, at.round() as u64, end.round() as u64);
        at = end;
    }
    bar
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use slipway_plane_api::{histogram, v1};
    use slipway_runtime::v1 as sandbox_v1;

    use super::*;
    use crate::args::{Cli, Command};

    fn args(words: &[&str]) -> SnoopArgs {
        let words = ["slipway", "snoop", "x"].iter().chain(words);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Snoop(args) => args,
            other => panic!("{other:?}"),
        }
    }

    /// Reads on two queues whose layers take 100, 200, 300 and 400 ns.
    fn figures() -> Figures {
        let latency = |value| {
            let mut latency = Histogram::new();
            latency.record_many(value, 10);
            Some(histogram::to_wire(&latency))
        };
        let layers = LAYERS.iter().zip([100, 200, 300, 400, 1000]).map(|((layer, _), value)| {
            v1::LayerLatency { layer: (*layer).into(), latency: latency(value) }
        });
        let layers: Vec<_> = layers.collect();
        let row = |queue| v1::LatencyRow {
            queue,
            class: v1::OpcodeClass::Read.into(),
            layers: layers.clone(),
        };
        let mut figures = Figures::default();
        let rows = vec![row(1), row(2)];
        figures.add(&v1::SnoopReport { from_ns: 0, to_ns: 2_000_000_000, rows, missed: 0 });
        figures
    }

    fn guest() -> GuestFigures {
        let latency = |value| {
            let mut latency = Histogram::new();
            latency.record_many(value, 20);
            serde_json::to_string(&latency).unwrap()
        };
        let mut guest = GuestFigures::default();
        let read = sandbox_v1::GuestLatency {
            opcode: "read".into(),
            driver: latency(3_000),
            block: latency(5_000),
            application: latency(6_000),
            between: latency(400),
        };
        let latencies = vec![read];
        let report = sandbox_v1::GuestReport { latencies, to_ns: 1_000, ..Default::default() };
        guest.add(&report, Some(1_000));
        guest
    }

    #[test]
    fn a_table_has_a_group_for_each_queue_and_opcode() {
        let (figures, args) = (figures(), args(&[]));
        let text = ShownFigures { figures: &figures, guest: None, args: &args }.text();
        assert!(text.starts_with("x: 20 commands followed in 2.0 s\n"), "{text}");
        assert_eq!(text.lines().count(), 2 + 2 * LAYERS.len(), "{text}");
        assert!(text.contains("backend") && text.contains("30.0 %"), "{text}");
    }

    #[test]
    fn parts_add_up_to_the_whole_with_and_without_a_guest() {
        let (figures, guest) = (figures(), guest());
        for (guest, words, groups, whole) in [
            (None, &["--by", "queue"][..], 2, 1_000.0),
            (None, &["--by", "opcode"], 1, 1_000.0),
            (Some(&guest), &[], 1, 6_200.0),
        ] {
            let args = args(words);
            let shown = ShownFigures { figures: &figures, guest, args: &args };
            let json = shown.json(true);
            let rows = json["rows"].as_array().unwrap();
            assert_eq!(rows.len(), groups);
            for row in rows {
                let layers = row["layers"].as_array().unwrap();
                let mean = |layer: &Value| layer["mean_ns"].as_f64().unwrap();
                let parts = layers.iter().filter(|layer| layer["part"] == true).map(mean);
                assert_eq!(parts.sum::<f64>(), whole);
                assert_eq!(layers.last().map(mean), Some(whole));
            }
            assert!(shown.stacks().iter().all(|bar| bar.total_ns() == whole as u64));
        }
    }

    #[test]
    fn the_clock_error_is_said() {
        let (figures, guest, args) = (figures(), guest(), args(&[]));
        let text = ShownFigures { figures: &figures, guest: Some(&guest), args: &args }.text();
        assert!(text.contains("guest driver spans two clocks: it may be wrong by 1 ns"), "{text}");
        assert!(text.contains("half of the time between system calls: it may be wrong by 200 ns"));
        for layer in ["program", "system call", "guest block layer", "application"] {
            assert!(text.contains(layer), "{text}");
        }
    }
}
