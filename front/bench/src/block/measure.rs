//! Measures subjects, in turn.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use slipway_telemetry::Histogram;

use super::Workload;

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

/// A turn that begins.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// The subject's name.
    pub subject: &'a str,
    /// The load.
    pub workload: Workload,
    /// The number of the round, from 0.
    pub round: u32,
    /// The number of turns done so far.
    pub done: usize,
    /// The number of turns in all.
    pub turns: usize,
}

/// Gives every subject its turns. Calls `begins` at the start of each.
///
/// # Errors
/// The first error of a subject.
pub fn measure(
    subjects: &mut [Box<dyn Subject>],
    plan: &Plan,
    mut begins: impl FnMut(Turn<'_>),
) -> Result<Vec<Run>> {
    let turns = plan.workloads.iter().map(|load| takers(subjects, load)).sum::<usize>()
        * plan.rounds as usize;
    let mut runs = Vec::with_capacity(turns);
    for workload in &plan.workloads {
        for round in 0..plan.rounds {
            for subject in subjects.iter_mut().filter(|subject| subject.takes(workload)) {
                let name = subject.name().to_owned();
                let done = runs.len();
                begins(Turn { subject: &name, workload: *workload, round, done, turns });
                let measured = subject.run(workload, plan.warm_up, plan.time);
                let measured = measured.with_context(|| format!("{name}, {workload}"))?;
                anyhow::ensure!(
                    measured.latency.count() > 0,
                    "{name}, {workload}: not one command ended within {:?}",
                    plan.time
                );
                runs.push(Run { subject: name, workload: *workload, round, measured });
            }
        }
    }
    Ok(runs)
}

fn takers(subjects: &[Box<dyn Subject>], workload: &Workload) -> usize {
    subjects.iter().filter(|subject| subject.takes(workload)).count()
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
    fn subjects_take_turns_within_a_round() {
        let mut subjects: Vec<Box<dyn Subject>> =
            vec![Box::new(Fixed("a", 1)), Box::new(Fixed("b", 1))];
        let mut seen = Vec::new();
        let runs = measure(&mut subjects, &plan(), |turn| {
            seen.push((turn.subject.to_owned(), turn.workload.depth, turn.round));
            assert_eq!((turn.done, turn.turns), (seen.len() - 1, 6));
        });
        assert_eq!(runs.unwrap().len(), 6);
        let seen: Vec<_> =
            seen.iter().map(|(name, depth, round)| (name.as_str(), *depth, *round)).collect();
        assert_eq!(
            seen,
            [("a", 1, 0), ("b", 1, 0), ("a", 1, 1), ("b", 1, 1), ("a", 2, 0), ("a", 2, 1)]
        );
    }

    #[test]
    fn a_turn_without_a_command_is_no_measurement() {
        let mut subjects: Vec<Box<dyn Subject>> = vec![Box::new(Fixed("stuck", 0))];
        let error = measure(&mut subjects, &plan(), |_| {}).unwrap_err();
        assert!(error.to_string().contains("stuck"), "{error}");
    }
}
