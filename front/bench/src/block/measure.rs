//! Measures subjects, in turn.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use slipway_telemetry::Histogram;

use super::Workload;
use crate::outside::Own;
use crate::turns::{Subjects, Turn, Turns, take_turns};

/// The result of one turn.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Latencies in ns, from writing a command to seeing its completion. One value for each command
    /// that ended during the measured time.
    pub latency: Histogram,
    /// Bytes that these commands moved.
    pub bytes: u64,
    /// The measured time, ns.
    pub elapsed_ns: u64,
    /// CPU time that the target's process used meanwhile, ns, if there is such a process.
    pub target_cpu_ns: Option<u64>,
    /// Lower bounds of the same latencies, up to the last poll that did not see the completion.
    /// Measured if the client has more work than polling, which delays it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<Histogram>,
    /// The number of commands that a neighbour completed meanwhile, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour_commands: Option<u64>,
    /// The longest time for which a thread of the load waited for a processor that it shares with
    /// no other of the measurement, ns. Measured by the native load if there are enough processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ns: Option<u64>,
}

/// One turn of one subject.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The subject's name.
    pub subject: String,
    /// The load.
    pub workload: Workload,
    /// The number of the round, from 0.
    pub round: u32,
    /// The result.
    pub measured: Measured,
}

/// A target that can be put under load.
pub trait Subject {
    /// Returns the short name for tables.
    fn name(&self) -> &str;

    /// Describes the subject in a sentence.
    fn about(&self) -> String;

    /// Returns whether the subject can run this load.
    fn takes(&self, workload: &Workload) -> bool {
        let _ = workload;
        true
    }

    /// Runs the load for `warm_up`, then for `time`, which is measured.
    ///
    /// # Errors
    /// A sentence about the failure; an error of a single command is one.
    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured>;

    /// Returns the processes that do the work of its turns.
    fn own(&self) -> Own {
        Own::Children
    }
}

/// The loads and times of [`measure`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The loads, one after the other.
    pub workloads: Vec<Workload>,
    /// The number of turns of each subject with each load.
    pub rounds: u32,
    /// The time of load before each measurement.
    pub warm_up: Duration,
    /// The measured time of each turn.
    pub time: Duration,
}

/// The subjects with the times of their turns.
struct Timed<'a> {
    subjects: &'a mut [Box<dyn Subject>],
    plan: &'a Plan,
}

impl Subjects for Timed<'_> {
    type Load = Workload;
    type Run = Run;

    fn count(&self) -> usize {
        self.subjects.len()
    }

    fn name(&self, subject: usize) -> String {
        self.subjects[subject].name().to_owned()
    }

    fn takes(&self, subject: usize, load: &Workload) -> bool {
        self.subjects[subject].takes(load)
    }

    fn run(&mut self, subject: usize, load: &Workload, round: u32) -> Result<Run> {
        let subject = &mut self.subjects[subject];
        let measured = subject.run(load, self.plan.warm_up, self.plan.time)?;
        let time = self.plan.time;
        ensure!(measured.latency.count() > 0, "not one command ended within {time:?}");
        Ok(Run { subject: subject.name().to_owned(), workload: *load, round, measured })
    }

    fn own(&self, subject: usize) -> Own {
        self.subjects[subject].own()
    }

    fn waited(&self, Run { measured, .. }: &Run) -> Option<f64> {
        let elapsed_ns = measured.elapsed_ns.max(1) as f64;
        measured.waited_ns.map(|waited_ns| waited_ns as f64 / elapsed_ns)
    }
}

/// Gives every subject its turns. Calls `before` at the start of each.
pub fn measure(
    subjects: &mut [Box<dyn Subject>],
    plan: &Plan,
    before: impl FnMut(Turn<'_, Workload>),
) -> Turns<Run> {
    take_turns(&mut Timed { subjects, plan }, &plan.workloads, plan.rounds, before)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(&'static str, u64);

    impl Subject for Fixed {
        fn name(&self) -> &str {
            self.0
        }

        fn about(&self) -> String {
            String::new()
        }

        fn takes(&self, workload: &Workload) -> bool {
            self.0 != "b" || workload.depth == 1
        }

        fn run(&mut self, _: &Workload, _: Duration, time: Duration) -> Result<Measured> {
            let mut latency = Histogram::new();
            latency.record_many(1, self.1);
            Ok(Measured { latency, elapsed_ns: time.as_nanos() as u64, ..Measured::default() })
        }
    }

    fn plan() -> Plan {
        let workloads = vec!["read-4k-d1".parse().unwrap(), "read-4k-d2".parse().unwrap()];
        let time = Duration::from_secs(1);
        Plan { workloads, rounds: 2, warm_up: Duration::ZERO, time }
    }

    #[test]
    fn a_turn_without_a_command_is_no_measurement() {
        let mut subjects: Vec<Box<dyn Subject>> = vec![Box::new(Fixed("stuck", 0))];
        let turns = measure(&mut subjects, &plan(), |_| {});
        assert!(turns.runs.is_empty());
        let lines = crate::fault_lines(&turns.faults);
        assert!(lines.starts_with("FAILED: stuck with read-4k-d1-t1: not one command"), "{lines}");
    }
}
