//! A look at the machine while something is measured: figures of a machine that is busy with
//! something else are void.
//!
//! A [`Watch`] begins before a turn and ends after it. Signs of a busy machine are:
//! - processor time that a hypervisor took away (`steal` of `/proc/stat`);
//! - processor time of processes [outside of the measurement](crate::outside), and with
//!   [`Watch::begin_when_idle`] of anything else just before;
//! - time for which a measuring thread that has a processor of its own waited for it
//!   ([`slipway_load::Waiting`]). Benchmarks whose own threads share processors do not look at it.

use std::time::{Duration, Instant};

use crate::cpu_time::own_time;
use crate::outside::{Own, ProcessTable};

/// The time for which the machine is looked at before a turn.
const LOOK: Duration = Duration::from_millis(50);
/// The processors' time that an idle process may use during such a look.
const IDLE: Duration = Duration::from_millis(2);
/// The longest time that this process is given to become idle.
const PATIENCE: Duration = Duration::from_secs(20);
/// The part of all processors that others may use before and during a turn.
const MOST_BUSY: f64 = 0.2;
/// The part of all processors' time that a hypervisor may take away during a turn.
const MOST_STOLEN: f64 = 0.05;
/// The part of its time for which a measuring thread may wait for its processor.
const MOST_WAITED: f64 = 0.1;
/// The ticks of other processes below which a turn counts: a short one is but a few ticks.
const LEAST_TICKS: u64 = 10;

/// A look at the machine's processors while something is measured.
#[derive(Debug)]
pub struct Watch {
    own: Own,
    /// The part of the processors that was busy with something else before.
    before: Option<f64>,
    processes: Option<ProcessTable>,
    processors: Option<Processors>,
}

impl Watch {
    /// Begins to look at the machine. `own` are the processes that belong to the measurement.
    pub fn begin(own: Own) -> Self {
        Self::after(None, own)
    }

    /// Waits until this process is idle, looks at what others use for 50 ms unless the node works
    /// between turns, and begins.
    pub(crate) fn begin_when_idle(own: Own) -> Self {
        let before = busy_with_others().filter(|_| own != Own::BusyNode);
        Self::after(before, own)
    }

    fn after(before: Option<f64>, own: Own) -> Self {
        // Reading the processes takes a while, so the processors are read last.
        let processes = ProcessTable::read(own);
        Self { own, before, processes, processors: Processors::read() }
    }

    /// Ends the look. Returns the reason why the figures of the meantime are void. `waited` is the
    /// part of its time for which a measuring thread waited for a processor of its own; `None` if
    /// it has none, or the kernel does not tell. Returns `None` if the figures count.
    pub fn end(self, waited: Option<f64>) -> Option<String> {
        let passed = self.processors.zip(Processors::read()).map(|(then, now)| now.since(then));
        let processes = self.processes.zip(ProcessTable::read(self.own));
        let ticks = processes.map(|(before, now)| now.outside_since(&before));
        let ticks = ticks.filter(|ticks| *ticks >= LEAST_TICKS);
        let part = |(passed, ticks): (Processors, u64)| passed.part(ticks);
        let (outside, stolen) = (passed.zip(ticks).map(part), passed.map(Processors::stolen));
        Signs { before: self.before, outside, waited, stolen }.reason()
    }
}

/// Signs of a busy machine, each as a part of the time; `None` if it is not known.
#[derive(Clone, Copy, Debug, Default)]
struct Signs {
    before: Option<f64>,
    outside: Option<f64>,
    waited: Option<f64>,
    stolen: Option<f64>,
}

impl Signs {
    /// Returns the reason why a turn is void. Returns `None` if it counts.
    fn reason(self) -> Option<String> {
        let signs = [
            (self.before, MOST_BUSY, "others used", "of the processors"),
            (self.outside, MOST_BUSY, "others used", "of the processors meanwhile"),
            (
                self.waited,
                MOST_WAITED,
                "a measuring thread waited for its processor for",
                "of the time",
            ),
            (self.stolen, MOST_STOLEN, "a hypervisor took away", "of the processors' time"),
        ];
        signs.into_iter().find_map(|(part, most, what, of_what)| {
            let percent = (part.filter(|part| *part > most)? * 100.0).round();
            Some(format!("{what} {percent} % {of_what}"))
        })
    }
}

/// Time of all processors since boot, in the kernel's ticks (proc(5), `/proc/stat`).
#[derive(Clone, Copy, Debug)]
struct Processors {
    busy: u64,
    stolen: u64,
    all: u64,
}

impl Processors {
    fn read() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let words = text.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace();
        let ticks: Vec<u64> = words.take(8).map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [user, nice, system, idle, wait, irq, softirq, stolen] = ticks.try_into().ok()?;
        let busy = user + nice + system + irq + softirq + stolen;
        Some(Self { busy, stolen, all: busy + idle + wait })
    }

    fn since(self, before: Self) -> Self {
        Self {
            busy: self.busy.saturating_sub(before.busy),
            stolen: self.stolen.saturating_sub(before.stolen),
            all: self.all.saturating_sub(before.all),
        }
    }

    /// Returns the part of all processors' time that `ticks` are.
    fn part(self, ticks: u64) -> f64 {
        ticks as f64 / self.all.max(1) as f64
    }

    fn stolen(self) -> f64 {
        self.part(self.stolen)
    }

    /// Returns the part of all processors' time that other processes and the kernel used, given the
    /// time that this process used meanwhile.
    fn others(self, own: Duration) -> f64 {
        let own = own.as_secs_f64() * rustix::param::clock_ticks_per_second() as f64;
        (self.busy as f64 - own).max(0.0) / self.all.max(1) as f64
    }
}

/// Returns the part of all processors' time that other processes use, seen for [`LOOK`]. Waits
/// first until this process is idle: its threads may still free the memory of the turn before.
fn busy_with_others() -> Option<f64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (before, own) = (Processors::read()?, own_time());
        std::thread::sleep(LOOK);
        let (passed, own) = (Processors::read()?.since(before), own_time().saturating_sub(own));
        if own < IDLE || Instant::now() > deadline {
            return Some(passed.others(own));
        }
    }
}

/// Returns the time in nanoseconds for which the machine's processors were busy since boot, all of
/// them together. Returns `None` where the kernel does not say.
pub fn busy_ns() -> Option<u64> {
    let ticks = Processors::read()?.busy;
    Some(ticks.saturating_mul(1_000_000_000) / rustix::param::clock_ticks_per_second().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_makes_figures_void() {
        let none = Signs::default();
        assert_eq!(none.reason(), None);
        let quiet =
            Signs { before: Some(0.1), outside: Some(0.1), waited: Some(0.05), stolen: Some(0.01) };
        assert_eq!(quiet.reason(), None);
        for (signs, reason) in [
            (Signs { before: Some(0.5), ..quiet }, "others used 50 % of the processors"),
            (Signs { outside: Some(0.3), ..quiet }, "others used 30 % of the processors meanwhile"),
            (
                Signs { waited: Some(0.4), ..none },
                "a measuring thread waited for its processor for 40 % of the time",
            ),
            (
                Signs { stolen: Some(0.25), ..quiet },
                "a hypervisor took away 25 % of the processors' time",
            ),
        ] {
            assert_eq!(signs.reason().as_deref(), Some(reason));
        }
    }

    #[test]
    fn a_watch_ends_with_what_it_is_told() {
        // Whatever else the machine does, more than half of the time is too long to wait.
        assert!(Watch::begin(Own::Children).end(Some(0.6)).is_some());
        // Nothing is known of what cannot be read.
        let blind = Watch { own: Own::Children, before: None, processes: None, processors: None };
        assert_eq!(blind.end(None), None);
    }

    #[test]
    fn time_of_this_process_is_not_that_of_others() {
        let ticks = rustix::param::clock_ticks_per_second();
        let passed = Processors { busy: ticks, stolen: 0, all: 2 * ticks };
        assert_eq!(passed.others(Duration::ZERO), 0.5);
        assert_eq!(passed.others(Duration::from_millis(500)), 0.25);
        // The kernel counts whole ticks, and the clock counts nanoseconds.
        assert_eq!(passed.others(Duration::from_secs(2)), 0.0);
        assert_eq!(passed.part(ticks / 2), 0.25);
    }

    #[test]
    fn processors_are_parsed() {
        let text = "cpu  10 1 5 100 4 1 1 2 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        let first = Processors::parse(text).unwrap();
        assert_eq!((first.busy, first.stolen, first.all), (20, 2, 124));
        assert!(Processors::parse("intr 1").is_none());
        assert!(Processors::read().is_some());
    }
}
