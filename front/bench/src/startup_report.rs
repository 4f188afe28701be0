//! A report of start-up, with the context needed to judge and repeat it.

use serde::{Deserialize, Serialize};
use slipway_telemetry::Timeline;

use crate::environment::Environment;
use crate::statistics::{Statistics, statistics};
use crate::turns::Fault;

/// A measurement of start-up: `rounds` times `count` sandboxes at once. Stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StartupReport {
    /// Version of this format: [`StartupReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The number of sandboxes started at once.
    pub count: usize,
    /// The number of rounds, one after the other.
    pub rounds: usize,
    /// The timelines of the sandboxes of each round; times count from the start of the round.
    pub timelines: Vec<Vec<Timeline>>,
    /// Statistics over all rounds.
    pub statistics: Statistics,
    /// Rounds that are void.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

impl StartupReport {
    /// The version of the JSON that [`to_json`](Self::to_json) writes.
    pub const FORMAT: u32 = 1;

    /// Makes a report of `rounds`, each with the timelines of the sandboxes that were started
    /// together.
    pub fn new(
        environment: Environment,
        command: impl Into<String>,
        rounds: Vec<Vec<Timeline>>,
    ) -> Self {
        let all: Vec<Timeline> = rounds.iter().flatten().cloned().collect();
        Self {
            format: Self::FORMAT,
            environment,
            command: command.into(),
            count: rounds.iter().map(Vec::len).max().unwrap_or(0),
            rounds: rounds.len(),
            statistics: statistics(&all),
            timelines: rounds,
            faults: Vec::new(),
        }
    }

    /// Adds the faults of void rounds, given the reason of each round that is void, in order.
    pub fn add_void(&mut self, reasons: impl IntoIterator<Item = Option<String>>) {
        let load = format!("{} at once", self.count);
        let fault = |(round, reason): (u32, Option<String>)| {
            let (subject, load) = ("sandboxes".to_owned(), load.clone());
            Some(Fault { subject, load, round, reason: reason?, failed: false })
        };
        self.faults.extend((0..).zip(reasons).filter_map(fault));
    }

    /// Returns all timelines, round after round.
    pub fn all_timelines(&self) -> Vec<Timeline> {
        self.timelines.iter().flatten().cloned().collect()
    }

    /// Formats the report as indented JSON with a newline at the end.
    ///
    /// # Errors
    /// None in practice; errors of serialisation are passed on.
    pub fn to_json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Parses a report from JSON, and computes the statistics again from the timelines.
    ///
    /// # Errors
    /// If `text` is no report, of another format version, or a stage ends before it begins.
    pub fn from_json(text: &str) -> anyhow::Result<Self> {
        let report: Self = serde_json::from_str(text)
            .map_err(|error| anyhow::anyhow!("not a start-up report: {error}"))?;
        anyhow::ensure!(
            report.format == Self::FORMAT,
            "a start-up report of format {}; this slipway reads format {}",
            report.format,
            Self::FORMAT
        );
        let stages = report.timelines.iter().flatten().flat_map(|timeline| &timeline.stages);
        for stage in stages {
            anyhow::ensure!(
                stage.start_ns <= stage.end_ns,
                "stage {:?} ends before it begins",
                stage.name
            );
        }
        let (faults, command) = (report.faults, report.command);
        Ok(Self { faults, ..Self::new(report.environment, command, report.timelines) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn report() -> StartupReport {
        let environment = Environment { machine: "two cores".into(), ..Environment::default() };
        StartupReport::new(environment, "bench startup", vec![samples::four(), samples::four()])
    }

    #[test]
    fn survives_json() {
        let report = report();
        assert_eq!((report.count, report.rounds), (4, 2));
        assert_eq!(report.statistics.total.count, 8);
        assert_eq!(StartupReport::from_json(&report.to_json().unwrap()).unwrap(), report);
    }

    #[test]
    fn void_rounds_are_kept() {
        let mut report = report();
        report.add_void([None, Some("stolen".to_owned())]);
        let line = "VOID: 1 turn on a busy machine, first sandboxes with 4 at once: stolen\n";
        assert_eq!(crate::fault_lines(&report.faults), line);
        assert_eq!(StartupReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        let warnings = crate::compare(&self::report(), &report).warnings;
        let told = |one: &String| one == "rounds of the report after are void: 1";
        assert_eq!(warnings.iter().filter(|one| told(one)).count(), 1, "{warnings:?}");
    }

    #[test]
    fn statistics_follow_from_the_timelines() {
        let mut forged = report();
        forged.statistics.total.mean_ns = 1;
        let read = StartupReport::from_json(&forged.to_json().unwrap()).unwrap();
        assert_eq!(read, report());
    }

    #[test]
    fn other_files_are_refused() {
        assert!(StartupReport::from_json("{}").is_err());
        let mut other = report();
        other.format = 2;
        let error = StartupReport::from_json(&other.to_json().unwrap()).unwrap_err();
        assert!(error.to_string().contains("format 2"), "{error}");
        let mut backwards = report();
        backwards.timelines[0][0].stages[0].start_ns = u64::MAX;
        assert!(StartupReport::from_json(&backwards.to_json().unwrap()).is_err());
    }
}
