//! The guest's layers: durations by the guest's clock, from which the host's are subtracted.

use std::collections::BTreeMap;

use slipway_plane_api::v1::OpcodeClass;
use slipway_runtime::v1;
use slipway_telemetry::Histogram;

/// Resolution of the time stamps in the guest's traces, ns.
const RESOLUTION: f64 = 1.0;
/// Commands and block-layer requests count as one to one if their numbers differ by at most this
/// share. They always differ a little, since the first and last interval cut some in two.
const SAME: f64 = 0.05;
/// A program's time around its system calls is shown if its error is at most this share of the
/// rest.
const ERROR: f64 = 0.25;

/// The guest's latencies of one class of commands.
#[derive(Default)]
pub struct Latency {
    /// Time in the NVMe driver and below.
    pub driver: Histogram,
    /// Time in the block layer and below.
    pub block: Histogram,
    /// Time in system calls and below, for commands that programs waited for in system calls.
    pub application: Histogram,
    /// Time in the program, between those calls.
    pub between: Histogram,
}

/// The sum of some reports.
#[derive(Default)]
pub struct GuestFigures {
    /// The covered time by the guest's clock, ns.
    span_ns: u64,
    /// The same time by the host's clock, ns.
    host_ns: u64,
    /// How often the guest's kernel dropped events.
    pub losses: u64,
    classes: BTreeMap<OpcodeClass, Latency>,
}

/// Mean nanoseconds of the layers above the controller, for commands that spend a given mean time
/// in the controller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layers {
    /// Time in the program, around its system calls. The program reads its own clock somewhere
    /// between two calls, so half of the time between them is the estimate, with an error of the
    /// same size. `None` if that would be no estimate.
    pub program: Option<f64>,
    /// Time from the program's system call to the block layer, and back. `None` if not every
    /// command was submitted and waited for in system calls.
    pub calls: Option<f64>,
    /// Time from the submission to the block layer until the driver has the command, and back.
    /// `None` if the block layer split or merged requests, so that a request is not a command.
    pub block: Option<f64>,
    /// Time in the driver, and to the controller and back: the driver's total less the
    /// controller's.
    pub driver: f64,
    /// The sum of all layers.
    pub total: f64,
    /// The error of `driver` from the drift between the two clocks, ns.
    pub clock_error: f64,
}

impl GuestFigures {
    /// Adds a report. `host_ns` is the host's time since the report before it, if there was one.
    /// Invalid histograms are left out, since a guest may send anything.
    pub fn add(&mut self, report: &v1::GuestReport, host_ns: Option<u64>) {
        if let Some(host_ns) = host_ns {
            let span_ns = report.to_ns.saturating_sub(report.from_ns);
            self.span_ns = self.span_ns.saturating_add(span_ns);
            self.host_ns = self.host_ns.saturating_add(host_ns);
        }
        self.losses = self.losses.saturating_add(report.losses);
        for one in &report.latencies {
            let (Some(class), Ok(driver), Ok(block), Ok(application)) = (
                class(&one.opcode),
                parse(&one.driver),
                parse(&one.block),
                parse(&one.application),
            ) else {
                continue;
            };
            let into = self.classes.entry(class).or_default();
            into.driver.merge(&driver);
            into.block.merge(&block);
            into.application.merge(&application);
            into.between.merge(&parse(&one.between).unwrap_or_default());
        }
    }

    /// Returns the guest's latencies of one class, or of all classes for `None`.
    pub fn latency(&self, wanted: Option<OpcodeClass>) -> Latency {
        let mut all = Latency::default();
        for (class, latency) in &self.classes {
            if wanted.is_none_or(|wanted| wanted == *class) {
                all.driver.merge(&latency.driver);
                all.block.merge(&latency.block);
                all.application.merge(&latency.application);
                all.between.merge(&latency.between);
            }
        }
        all
    }

    /// Returns the layers above a controller whose mean time is `controller` ns. Returns `None` if
    /// the guest saw no such command.
    pub fn layers(&self, class: Option<OpcodeClass>, controller: f64) -> Option<Layers> {
        let Latency { driver, block, application, between } = self.latency(class);
        if driver.count() == 0 {
            return None;
        }
        let layer = layer_over(&driver, &block);
        let calls = layer.and_then(|_| layer_over(&block, &application));
        let program = calls.and_then(|_| program(&application, &between));
        Some(Layers {
            program,
            calls,
            block: layer,
            driver: driver.mean() - controller,
            total: driver.mean()
                + [layer, calls, program].into_iter().map(Option::unwrap_or_default).sum::<f64>(),
            clock_error: RESOLUTION + driver.mean() * self.drift(),
        })
    }

    /// Returns the drift of the guest's clock from the host's, as a share of the time. It is an
    /// upper bound, since it includes variations in the reports' delivery.
    fn drift(&self) -> f64 {
        match self.host_ns {
            0 => 0.0,
            host => (self.span_ns as f64 / host as f64 - 1.0).abs(),
        }
    }
}

/// Returns whether two histograms are about the same commands, judged by their counts.
fn same(one: &Histogram, other: &Histogram) -> bool {
    let (one, other) = (one.count() as f64, other.count() as f64);
    (one - other).abs() <= SAME * one
}

/// Returns the mean time of `outer` beyond that of `inner`, or `None` if they are not about the
/// same commands.
fn layer_over(inner: &Histogram, outer: &Histogram) -> Option<f64> {
    same(inner, outer).then(|| outer.mean() - inner.mean())
}

/// Computes [`Layers::program`].
fn program(application: &Histogram, between: &Histogram) -> Option<f64> {
    let half = between.mean() / 2.0;
    (same(application, between) && half <= ERROR * application.mean()).then_some(half)
}

fn parse(text: &str) -> serde_json::Result<Histogram> {
    serde_json::from_str(text)
}

fn class(opcode: &str) -> Option<OpcodeClass> {
    match opcode {
        "read" => Some(OpcodeClass::Read),
        "write" => Some(OpcodeClass::Write),
        "flush" => Some(OpcodeClass::Flush),
        "other" => Some(OpcodeClass::Other),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(value: u64, times: u64) -> String {
        let mut histogram = Histogram::new();
        histogram.record_many(value, times);
        serde_json::to_string(&histogram).unwrap()
    }

    fn report(requests: u64, waited_for: u64, between: u64) -> v1::GuestReport {
        let latency = v1::GuestLatency {
            opcode: "read".into(),
            driver: histogram(50_000, 100),
            block: histogram(60_000, requests),
            application: histogram(75_000, waited_for),
            between: histogram(between, waited_for),
        };
        let nonsense = v1::GuestLatency { opcode: "read".into(), ..Default::default() };
        let latencies = vec![latency, nonsense];
        v1::GuestReport { from_ns: 5, to_ns: 1_000_000_005, latencies, losses: 0 }
    }

    #[test]
    fn layers_add_up_to_the_guests_whole() {
        let mut guest = GuestFigures::default();
        guest.add(&report(100, 100, 8_000), Some(1_000_100_000));
        let layers = guest.layers(Some(OpcodeClass::Read), 20_000.0).unwrap();
        assert_eq!((layers.calls, layers.block), (Some(15_000.0), Some(10_000.0)));
        assert_eq!((layers.driver, layers.total), (30_000.0, 79_000.0));
        assert_eq!(layers.program, Some(4_000.0));
        assert!((layers.clock_error - 6.0).abs() < 0.1, "100 us in a second, of 50 us: {layers:?}");
        assert_eq!(guest.layers(Some(OpcodeClass::Write), 1.0), None);
        assert_eq!(guest.layers(None, 20_000.0), Some(layers));
    }

    #[test]
    fn what_is_not_one_to_one_gives_no_layer() {
        for (requests, waited_for, block, total) in
            [(50, 50, None, 50_000.0), (100, 40, Some(10_000.0), 60_000.0)]
        {
            let mut guest = GuestFigures::default();
            guest.add(&report(requests, waited_for, 8_000), None);
            let layers = guest.layers(Some(OpcodeClass::Read), 20_000.0).unwrap();
            assert_eq!((layers.calls, layers.block, layers.total), (None, block, total));
            assert_eq!(layers.program, None);
        }
    }

    #[test]
    fn a_program_that_thinks_for_long_has_no_layer() {
        let mut guest = GuestFigures::default();
        guest.add(&report(100, 100, 80_000), None);
        let layers = guest.layers(Some(OpcodeClass::Read), 20_000.0).unwrap();
        assert_eq!((layers.program, layers.total), (None, 75_000.0));
    }
}
