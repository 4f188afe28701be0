//! A report of shares: measured and expected.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};

use super::Mix;
use super::engine::Engine;
use super::script::{formula, script};
use crate::Times;
use crate::figure::Figure;
use crate::measurement::{AnySubject, Measured, Measurement, Plan, Subject};

/// The number of mixes that are measured at once: their executors are slow, so a core has time for
/// several.
const BESIDE: usize = 3;
/// The name of the only subject.
const EXECUTORS: &str = "executors";

/// The load: the slides' example, and mixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrfLoad {
    /// The number of random mixes.
    pub mixes: usize,
    /// The number of mixes that are measured again with a tenant that floods.
    pub floods: usize,
}

impl fmt::Display for DrfLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} mixes, {} floods", self.mixes, self.floods)
    }
}

/// The loads and times of a measurement. The times are those of each mix.
pub type DrfPlan = Plan<DrfLoad>;

impl DrfPlan {
    /// Returns a plan of a hundred mixes, which takes about a minute.
    pub fn full() -> Self {
        Self::of(DrfLoad { mixes: 100, floods: 10 }, 400, 1200)
    }

    /// Returns a plan of a few mixes, which takes seconds.
    pub fn quick() -> Self {
        Self::of(DrfLoad { mixes: 6, floods: 2 }, 300, 600)
    }

    /// Returns a plan of one round, with times in milliseconds.
    fn of(load: DrfLoad, warm_up: u64, time: u64) -> Self {
        let [warm_up, time] = [warm_up, time].map(Duration::from_millis);
        Self::timed(vec![load], 1, Times { warm_up, time })
    }
}

/// The results of one mix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrfCase {
    /// `talk`, `mix N`, or `flood N`.
    pub name: String,
    /// The executors and the tenants.
    pub mix: Mix,
    /// Bytes per second that each tenant's applications received.
    pub measured: Vec<f64>,
    /// Bytes per second of each tenant by the scheduler's formula.
    pub formula: Vec<f64>,
    /// Bytes per second of each tenant by the script, or `None` without Python.
    pub script: Option<Vec<f64>>,
    /// For a flood, bytes per second of each tenant before the first one flooded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiet: Option<Vec<f64>>,
}

impl DrfCase {
    /// Returns the expected rate of each tenant: by the script, or else by the formula.
    pub fn expected(&self) -> &[f64] {
        self.script.as_deref().unwrap_or(&self.formula)
    }

    /// Returns the relative error of each tenant's rate: 0.01 is 1 % more than expected.
    pub fn errors(&self) -> impl Iterator<Item = f64> + '_ {
        self.measured.iter().zip(self.expected()).map(|(got, due)| got / due - 1.0)
    }

    /// Returns, for a flood, the relative changes of the other tenants' rates.
    pub fn changes(&self) -> impl Iterator<Item = f64> + '_ {
        let quiet = self.quiet.as_deref().unwrap_or_default();
        self.measured.iter().zip(quiet).skip(1).map(|(now, before)| now / before - 1.0)
    }
}

/// The result of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrfMeasured {
    /// The results of all mixes, the slides' example first.
    pub cases: Vec<DrfCase>,
}

impl DrfMeasured {
    /// Returns the greatest `off` over the cases whose names begin with `kind`, or `None` without
    /// any.
    fn worst(&self, kind: &str, off: fn(&DrfCase) -> f64) -> Option<f64> {
        let cases = self.cases.iter().filter(|case| case.name.starts_with(kind));
        cases.map(off).reduce(f64::max)
    }
}

/// Returns the greatest relative error of a tenant's rate.
pub(super) fn error(case: &DrfCase) -> f64 {
    largest(case.errors())
}

/// Returns the greatest relative change of another tenant's rate by a flood.
pub(super) fn change(case: &DrfCase) -> f64 {
    largest(case.changes())
}

/// Returns the greatest absolute value.
fn largest(all: impl Iterator<Item = f64>) -> f64 {
    all.map(f64::abs).fold(0.0, f64::max)
}

/// Formats a part as percent.
pub(super) fn percent(part: f64) -> String {
    format!("{:.2} %", part * 100.0)
}

impl Measured for DrfMeasured {
    type Load = DrfLoad;

    const KIND: &'static str = "shares";
    const FORMAT: u32 = 2;
    const HAS_ONE_ROUND: bool = true;

    fn figures(_: &DrfLoad) -> &'static [Figure<DrfLoad, Self>] {
        type DrfFigure = Figure<DrfLoad, DrfMeasured>;
        const TALK: DrfFigure = DrfFigure::less(
            "the example",
            "greatest error of the example",
            |_, turn| turn.worst("talk", error),
            percent,
        );
        const MIX: DrfFigure = DrfFigure::less(
            "mixes",
            "greatest error of a mix",
            |_, turn| turn.worst("mix", error),
            percent,
        );
        const FLOOD: DrfFigure = DrfFigure::less(
            "the others' change by a flood",
            "greatest change by a flood",
            |_, turn| turn.worst("flood", change),
            percent,
        );
        const COMPARED: &[DrfFigure] = &[TALK, MIX, FLOOD];
        COMPARED
    }
}

/// Executors that can be measured.
pub type DrfSubject = AnySubject<DrfLoad, DrfMeasured>;
/// All results of one command, stored as JSON.
pub type DrfReport = Measurement<DrfLoad, DrfMeasured>;

impl DrfReport {
    /// Returns the results of all mixes.
    pub fn cases(&self) -> impl Iterator<Item = &DrfCase> {
        self.runs.iter().flat_map(|run| &run.measured.cases)
    }
}

/// The simulated executors. Their threads share processors, so that they wait for each other.
pub struct Executors<P> {
    times: Times,
    progress: P,
}

impl<P: Fn(usize, usize) + Sync> Executors<P> {
    /// Makes executors that have the times of the plan for each mix. They call `progress` with the
    /// number of mixes done and of all mixes.
    ///
    /// # Errors
    /// The plan has no times.
    pub fn new(plan: &DrfPlan, progress: P) -> Result<Self> {
        Ok(Self { times: plan.times.context("a plan without times")?, progress })
    }
}

impl<P: Fn(usize, usize) + Sync> Subject for Executors<P> {
    type Load = DrfLoad;
    type Measured = DrfMeasured;

    fn name(&self) -> &str {
        EXECUTORS
    }

    fn about(&self) -> String {
        "simulated, each with a rate of its own; the scheduler and its pipes are the engine's"
            .into()
    }

    /// Measures the slides' example, random mixes, and floods. Fails if a byte that arrived differs
    /// from the one that was sent, or the script failed.
    fn run(&mut self, load: &DrfLoad) -> Result<DrfMeasured> {
        let mut mixes = vec![("talk".to_owned(), Mix::talk())];
        mixes.extend((0..load.mixes).map(|at| (format!("mix {at}"), Mix::random(at as u64))));
        let floods = 0..load.floods.min(load.mixes);
        mixes.extend(floods.map(|at| (format!("flood {at}"), Mix::random(at as u64).flooded())));
        let measured = measure(self.times, &mixes, &self.progress)?;
        let scripted = script(&mixes.iter().map(|(_, mix)| mix).collect::<Vec<_>>())?;
        let mut cases: Vec<DrfCase> = Vec::new();
        for (at, ((name, mix), measured)) in mixes.into_iter().zip(measured).enumerate() {
            let (formula, script) = (formula(&mix), scripted.as_ref().map(|all| all[at].clone()));
            let flood = name.strip_prefix("flood ").map(|number| format!("mix {number}"));
            let before = flood.and_then(|mix| cases.iter().find(|case| case.name == mix));
            let quiet = before.map(|case| case.measured.clone());
            cases.push(DrfCase { name, mix, measured, formula, script, quiet });
        }
        Ok(DrfMeasured { cases })
    }
}

/// Measures all mixes, some at the same time. Results are in the order given.
fn measure(
    times: Times,
    mixes: &[(String, Mix)],
    progress: &(impl Fn(usize, usize) + Sync),
) -> Result<Vec<Vec<f64>>> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let results = Mutex::new(vec![Vec::new(); mixes.len()]);
    let work = || -> Result<()> {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((name, mix)) = mixes.get(at) else { return Ok(()) };
            let rates =
                Engine::new(mix).and_then(|mut engine| engine.run(times.warm_up, times.time));
            let rates = rates.with_context(|| name.clone())?;
            if let Ok(mut results) = results.lock() {
                results[at] = rates;
            }
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, mixes.len());
        }
    };
    std::thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (0..BESIDE).map(|_| scope.spawn(work)).collect();
        let ended = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        let mut ended = ended;
        ended.try_for_each(|end| end.unwrap_or_else(|_| Err(anyhow!("a thread failed"))))
    })
    .map(|()| results.into_inner().unwrap_or_default())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::compare::ONE_ROUND;
    use crate::json::SavedReport;

    /// Makes a report with invented figures: 1 % too much for A, 1 % too little for B.
    pub(in super::super) fn report() -> DrfReport {
        let mix = Mix::talk();
        let case = |name: &str, quiet: Option<Vec<f64>>| DrfCase {
            name: name.into(),
            mix: mix.clone(),
            measured: vec![37.875e6, 61.875e6],
            formula: vec![37.5e6, 62.5e6],
            script: Some(vec![37.5e6, 62.5e6]),
            quiet,
        };
        let quiet = Some(vec![37.5e6, 60e6]);
        let cases = vec![case("talk", None), case("mix 0", None), case("flood 0", quiet)];
        let measured = [DrfMeasured { cases }];
        let (loads, subjects) = (DrfPlan::quick().loads, [(EXECUTORS, &measured[..])]);
        let command = "slipway bench socket --drf";
        DrfReport::sample_of(command, loads, &subjects, |_, _, measured| measured.clone())
    }

    #[test]
    fn errors_are_against_the_script() {
        let report = report();
        let load = report.plan.loads[0];
        let figures = DrfMeasured::figures(&load).iter();
        let off = figures.map(|one| report.over_rounds(&load, EXECUTORS, one).unwrap().median);
        for (off, expected) in off.zip([0.01, 0.01, 0.03125]) {
            assert!((off - expected).abs() < 1e-9, "{off} {expected}");
        }
        assert_eq!(DrfReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(DrfReport::from_json("{}").is_err());
    }

    #[test]
    fn comparisons_ask_for_no_further_rounds() {
        let text = report().compare(&report());
        let figures = text.lines().filter(|line| line.ends_with(ONE_ROUND));
        assert_eq!(figures.count(), 3, "{text}");
        assert!(!text.contains("needs"), "{text}");
    }

    #[test]
    fn script_and_formula_agree() {
        let mixes: Vec<Mix> = (0..20).map(Mix::random).chain([Mix::talk()]).collect();
        let Some(scripted) = script(&mixes.iter().collect::<Vec<_>>()).unwrap() else {
            println!("SKIPPED: script_and_formula_agree: needs python3");
            return;
        };
        for (mix, scripted) in mixes.iter().zip(scripted) {
            let off = formula(mix).into_iter().zip(scripted).map(|(a, b)| a / b - 1.0);
            assert!(largest(off) < 1e-6, "{mix:?}");
        }
    }
}
