//! The guest's layers: durations of the guest's clock, from which the host's are subtracted.

use std::collections::BTreeMap;

use slipway_plane_api::v1::OpcodeClass;
use slipway_runtime::v1;
use slipway_telemetry::Histogram;

/// The guest's traces have stamps of this resolution, ns.
const RESOLUTION: f64 = 1.0;
/// Commands and requests of the block layer count as one to one when their numbers differ by less:
/// the first and last interval cut some in two.
const SAME: f64 = 0.05;
/// What a program does around its system calls is told while the error of it is at most this part of
/// the rest.
const ERROR: f64 = 0.25;

/// What the guest says of one class of commands.
#[derive(Default)]
pub struct Latency {
    /// In the NVMe driver and below.
    pub driver: Histogram,
    /// In the block layer and below.
    pub block: Histogram,
    /// In system calls and below, as far as programs waited for their commands in some.
    pub application: Histogram,
    /// In the program, between those calls.
    pub between: Histogram,
}

/// The sum of some reports.
#[derive(Default)]
pub struct Guest {
    /// The guest's nanoseconds.
    span_ns: u64,
    /// The host's, for the same.
    host_ns: u64,
    /// How often the guest's kernel dropped events.
    pub losses: u64,
    classes: BTreeMap<OpcodeClass, Latency>,
}

/// Mean nanoseconds of the layers above the controller, for commands whose controller took
/// `controller` on the mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layers {
    /// In the program, around its system calls: what its own clock has of a command beyond them, as
    /// that is read somewhere between two calls. It is half of the time there, and may be wrong by
    /// as much. None: that would be no estimate.
    pub program: Option<f64>,
    /// From the program's system call to the block layer, and back. None: not every command was
    /// submitted and waited for in system calls.
    pub calls: Option<f64>,
    /// From the submission to the block layer until the driver has it, and back. None: the block
    /// layer split or merged, so a request is not a command.
    pub block: Option<f64>,
    /// The driver, the way to the controller and back: its total less the controller's.
    pub driver: f64,
    /// The whole.
    pub total: f64,
    /// By how much `driver` may be wrong since the two clocks run apart, ns.
    pub clock_error: f64,
}

impl Guest {
    /// Takes a report in, which came `host_ns` after the one before if there was one. What is no
    /// histogram of ours is left out: it is a guest's word.
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

    /// What the guest says of `class`; None for all together.
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

    /// The layers above a controller that took `controller` ns on the mean. None: the guest saw no
    /// such command.
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

    /// How far the guest's clock ran from the host's, as a part of the time: an upper bound, since
    /// how long a report was under way is in it.
    fn drift(&self) -> f64 {
        match self.host_ns {
            0 => 0.0,
            host => (self.span_ns as f64 / host as f64 - 1.0).abs(),
        }
    }
}

/// Whether two are of the same commands.
fn same(one: &Histogram, other: &Histogram) -> bool {
    let (one, other) = (one.count() as f64, other.count() as f64);
    (one - other).abs() <= SAME * one
}

/// What `outer` takes beyond `inner` on the mean, when they are of the same commands.
fn layer_over(inner: &Histogram, outer: &Histogram) -> Option<f64> {
    same(inner, outer).then(|| outer.mean() - inner.mean())
}

/// See [`Layers::program`].
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
        let mut guest = Guest::default();
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
            let mut guest = Guest::default();
            guest.add(&report(requests, waited_for, 8_000), None);
            let layers = guest.layers(Some(OpcodeClass::Read), 20_000.0).unwrap();
            assert_eq!((layers.calls, layers.block, layers.total), (None, block, total));
            assert_eq!(layers.program, None);
        }
    }

    #[test]
    fn a_program_that_thinks_for_long_has_no_layer() {
        let mut guest = Guest::default();
        guest.add(&report(100, 100, 80_000), None);
        let layers = guest.layers(Some(OpcodeClass::Read), 20_000.0).unwrap();
        assert_eq!((layers.program, layers.total), (None, 75_000.0));
    }
}
