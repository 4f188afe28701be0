//! Sums of the reports of an endpoint's commands.

use std::collections::BTreeMap;

use slipway_plane_api::v1::layer_latency::Layer;
use slipway_plane_api::{histogram, v1};
use slipway_telemetry::Histogram;

use crate::args::Grouping;

/// The layers in the order in which a command passes them, and the whole last.
pub const LAYERS: [(Layer, &str); 5] = [
    (Layer::DoorbellToFetch, "doorbell to fetch"),
    (Layer::FetchToBackend, "fetch to backend"),
    (Layer::Backend, "backend"),
    (Layer::CompletionToInterrupt, "completion to interrupt"),
    (Layer::Whole, "controller"),
];

/// A histogram for each of [`LAYERS`].
pub type Latencies = [Histogram; LAYERS.len()];

/// The commands that a row is about; `None` stands for all queues or all opcodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub queue: Option<u32>,
    pub class: Option<v1::OpcodeClass>,
}

/// The sum of some reports.
#[derive(Default)]
pub struct Figures {
    /// Start and end, CLOCK_MONOTONIC in ns.
    pub span: Option<(u64, u64)>,
    /// The number of commands that were traced and not counted.
    pub missed: u64,
    rows: BTreeMap<(u32, v1::OpcodeClass), Box<Latencies>>,
}

impl Figures {
    /// Adds a report.
    pub fn add(&mut self, report: &v1::SnoopReport) {
        let from = self.span.map_or(report.from_ns, |(from, _)| from);
        self.span = Some((from, report.to_ns));
        self.missed = self.missed.saturating_add(report.missed);
        for row in &report.rows {
            let layers = self.rows.entry((row.queue, row.class())).or_default();
            for one in &row.layers {
                let place = LAYERS.iter().position(|(layer, _)| *layer == one.layer());
                if let (Some(place), Some(latency)) = (place, &one.latency) {
                    layers[place].merge(&histogram::from_wire(latency));
                }
            }
        }
    }

    /// Returns the rows grouped as `by` says: queues or opcodes that `by` leaves out are merged.
    pub fn by(&self, by: Option<Grouping>) -> BTreeMap<Key, Box<Latencies>> {
        let mut merged: BTreeMap<Key, Box<Latencies>> = BTreeMap::new();
        for (&(queue, class), layers) in &self.rows {
            let key = Key {
                queue: (by != Some(Grouping::Opcode)).then_some(queue),
                class: (by != Some(Grouping::Queue)).then_some(class),
            };
            let into = merged.entry(key).or_default();
            into.iter_mut().zip(layers.iter()).for_each(|(into, layer)| into.merge(layer));
        }
        merged
    }

    /// Returns the number of commands that were counted.
    pub fn commands(&self) -> u64 {
        self.rows.values().map(|layers| layers[LAYERS.len() - 1].count()).sum()
    }

    /// Returns the covered time in seconds.
    pub fn seconds(&self) -> f64 {
        self.span.map_or(0.0, |(from, to)| to.saturating_sub(from) as f64 / 1e9)
    }
}

impl Key {
    /// Returns the queue's number, or "all".
    pub fn queue(&self) -> String {
        self.queue.map_or_else(|| "all".to_owned(), |queue| queue.to_string())
    }

    /// Returns the opcode's name, or "all".
    pub fn opcode(&self) -> &'static str {
        match self.class {
            None => "all",
            Some(v1::OpcodeClass::Read) => "read",
            Some(v1::OpcodeClass::Write) => "write",
            Some(v1::OpcodeClass::Flush) => "flush",
            Some(v1::OpcodeClass::Other) => "other",
        }
    }

    /// Returns the label of the group's bar in a picture.
    pub fn name(&self) -> String {
        match (self.queue, self.class) {
            (None, _) => self.opcode().to_owned(),
            (Some(queue), None) => format!("queue {queue}"),
            (Some(queue), Some(_)) => format!("{}, queue {queue}", self.opcode()),
        }
    }
}
