//! The result of a turn, and its figures.

use serde::{Deserialize, Serialize};
use slipway_telemetry::Histogram;

use super::{Cost, SocketLoad, Traffic};
use crate::duration::rate;
use crate::figure::{Figure, time};
use crate::measurement::Measured;

/// The result of a turn.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SocketMeasured {
    /// Bytes that arrived; for a ping-pong those of one direction.
    pub bytes: u64,
    /// The measured time, ns.
    pub elapsed_ns: u64,
    /// Cost of the program that drives the load.
    pub client: Cost,
    /// Cost of the program that answers.
    pub server: Cost,
    /// Cost of the engines.
    pub engine: Cost,
    /// Cost of the kernel's threads for the network.
    pub kernel: Cost,
    /// Round trips of a ping-pong, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Histogram>,
    /// With idle sockets, the growth of memory in use since before the client was started, in
    /// bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The work of two linked engines, measured alone after the turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Parts>,
}

/// The parts of the work of two linked engines: processor time per byte, ns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parts {
    /// A copy, into records, of data that another processor has written, as an engine finds it in a
    /// program's FIFO. Each of two engines makes one.
    pub copy: f64,
    /// Sealing a record.
    pub seal: f64,
    /// Opening a record.
    pub open: f64,
    /// Kernel TCP between the engines' namespaces: both ends, and the kernel's threads.
    pub transport: f64,
}

impl Parts {
    /// Returns the sum of the parts' times for a byte, with two copies.
    pub fn sum(&self) -> f64 {
        2.0 * self.copy + self.seal + self.open + self.transport
    }
}

impl SocketMeasured {
    /// Returns what the two programs cost.
    pub(super) fn of_programs(&self) -> Cost {
        self.client.plus(self.server)
    }

    /// Returns what programs, engines and the kernel cost.
    fn of_all(&self) -> Cost {
        self.of_programs().plus(self.engine).plus(self.kernel)
    }

    /// Returns the processor time of `cost` per byte, ns; infinite without bytes.
    pub(super) fn per_byte(&self, cost: Cost) -> f64 {
        cost.cpu_ns as f64 / self.bytes as f64
    }

    /// Returns the processor time of `cost` for a GiB, s.
    fn per_gib(&self, cost: Cost) -> f64 {
        self.per_byte(cost) * f64::from(1 << 30) / 1e9
    }

    /// Returns the bytes per second.
    fn rate(&self) -> f64 {
        self.bytes as f64 * 1e9 / self.elapsed_ns.max(1) as f64
    }

    /// Returns the context switches of all processes for each of `count`.
    fn switches(&self, count: f64) -> f64 {
        self.of_all().switches as f64 / count
    }

    /// Returns the round trip that so many percent do not exceed, ns.
    fn percentile(&self, percent: f64) -> Option<f64> {
        Some(self.latency.as_ref()?.percentile(percent) as f64)
    }
}

/// The processors of a nanosecond for a byte, at 10 Gbit/s.
const AT_10_GBITS: f64 = 1.25;

/// A figure of sockets.
type SocketFigure = Figure<SocketLoad, SocketMeasured>;

/// Bytes per second.
pub(super) const BANDWIDTH: SocketFigure = SocketFigure {
    name: "bandwidth",
    about: "bits a second",
    more_is_better: true,
    of: |_, turn| Some(turn.rate()),
    text: |bytes| rate(bytes * 8.0, "bit/s"),
    beside: &[
        SocketFigure { text: |cores| format!("{cores:.2} cores for 10 Gbit/s"), ..FOR_10_GBITS },
        OF_ENGINES,
    ],
};
/// The median round trip, ns.
pub(super) const ROUND_TRIP: SocketFigure = SocketFigure {
    name: "p50",
    about: "median round trip",
    more_is_better: false,
    of: |_, turn| turn.percentile(50.0),
    text: time,
    beside: &[SocketFigure { text: |ns| format!("p99 {}", time(ns)), ..P99 }],
};
const P99: SocketFigure =
    SocketFigure::less("p99", "p99 of a round trip", |_, turn| turn.percentile(99.0), time);
const P999: SocketFigure =
    SocketFigure::less("p99.9", "p99.9 of a round trip", |_, turn| turn.percentile(99.9), time);
/// Processors kept busy by programs, engines and the kernel together.
const CORES: SocketFigure = SocketFigure::less(
    "cores",
    "processors kept busy",
    |_, turn| Some(turn.of_all().cpu_ns as f64 / turn.elapsed_ns.max(1) as f64),
    |cores| format!("{cores:.2}"),
);
/// Processors kept busy by connections at rest.
pub(super) const CORES_AT_REST: SocketFigure = SocketFigure { text: cores_at_rest, ..CORES };
/// Messages, or round trips, per second.
const MESSAGES: SocketFigure = SocketFigure::more(
    "messages",
    "messages a second",
    |load, turn| Some(turn.rate() / size(load)),
    |messages| rate(messages, "/s"),
);
const TRIPS: SocketFigure = SocketFigure { name: "round trips", ..MESSAGES };
const FOR_10_GBITS: SocketFigure = SocketFigure::less(
    "cores for 10 Gbit/s",
    "processors for 10 Gbit/s",
    |_, turn| Some(turn.per_byte(turn.of_all()) * AT_10_GBITS),
    |cores| format!("{cores:.3}"),
);
const OF_ENGINES: SocketFigure = SocketFigure::less(
    "engines' cores for 10 Gbit/s",
    "processors of engines for 10 Gbit/s",
    |_, turn| Some(turn.per_byte(turn.engine) * AT_10_GBITS).filter(|cores| *cores > 0.0),
    |cores| format!("{cores:.2} the engines'"),
);
const FOR_GIB: SocketFigure = SocketFigure::less(
    "s for a GiB",
    "processor time for a GiB",
    |_, turn| Some(turn.per_gib(turn.of_all())),
    seconds,
);
const PROGRAMS_FOR_GIB: SocketFigure = SocketFigure::less(
    "programs'",
    "processor time of the programs for a GiB",
    |_, turn| Some(turn.per_gib(turn.of_programs())),
    seconds,
);
const ENGINES_FOR_GIB: SocketFigure = SocketFigure::less(
    "engines'",
    "processor time of the engines for a GiB",
    |_, turn| Some(turn.per_gib(turn.engine)),
    seconds,
);
/// Context switches of all processes for each message or round trip.
pub(super) const SWITCHES: SocketFigure = SocketFigure::less(
    "switches each",
    "context switches for each message",
    |load, turn| Some(turn.switches(turn.bytes as f64 / size(load))),
    |switches| format!("{switches:.4}"),
);
/// Context switches of all processes per second, with idle sockets.
pub(super) const SWITCHES_AT_REST: SocketFigure = SocketFigure::less(
    "switches/s",
    "context switches a second",
    |_, turn| Some(turn.switches(turn.elapsed_ns as f64 / 1e9)),
    |switches| format!("{switches:.0}"),
);
/// Memory for each pair of idle sockets, bytes.
pub(super) const MEMORY: SocketFigure = SocketFigure::less(
    "memory a pair",
    "memory for a pair of sockets",
    |load, turn| Some(turn.memory_bytes? as f64 / f64::from(load.sockets)),
    |bytes| format!("{bytes:.0} bytes"),
);

/// Returns the bytes of a message.
fn size(load: &SocketLoad) -> f64 {
    f64::from(load.bytes.max(1))
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.3}")
}

/// Formats the processors that are used by connections at rest.
fn cores_at_rest(cores: f64) -> String {
    match cores < 0.0001 {
        true => "under 0.0001 cores".to_owned(),
        false => format!("{cores:.4} cores"),
    }
}

impl Measured for SocketMeasured {
    type Load = SocketLoad;

    const KIND: &'static str = "sockets";
    const SHOWS: &'static str = "Bytes between two programs";
    const TURN: &'static str = "round";

    fn figures(load: &SocketLoad) -> &'static [SocketFigure] {
        const IDLE: &[SocketFigure] = &[CORES_AT_REST];
        const LATENCY: &[SocketFigure] = &[ROUND_TRIP];
        const RATE: &[SocketFigure] = &[BANDWIDTH];
        match load.traffic {
            Traffic::Idle => IDLE,
            Traffic::Pingpong(_) => LATENCY,
            Traffic::Stream | Traffic::Window => RATE,
        }
    }

    fn further(load: &SocketLoad) -> &'static [SocketFigure] {
        const IDLE: &[SocketFigure] = &[SWITCHES_AT_REST, MEMORY];
        const LATENCY: &[SocketFigure] = &[P99, P999, TRIPS, CORES, SWITCHES];
        const RATE: &[SocketFigure] =
            &[MESSAGES, CORES, FOR_10_GBITS, FOR_GIB, PROGRAMS_FOR_GIB, ENGINES_FOR_GIB, SWITCHES];
        match load.traffic {
            Traffic::Idle => IDLE,
            Traffic::Pingpong(_) => LATENCY,
            Traffic::Stream | Traffic::Window => RATE,
        }
    }
}
