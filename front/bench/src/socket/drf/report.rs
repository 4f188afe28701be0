//! A report of shares: measured and expected.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::Mix;
use super::engine::Engine;
use super::script::{formula, script};
use crate::environment::Environment;
use crate::json::SavedReport;
use crate::outside::Own;
use crate::turns::Fault;
use crate::watch::Watch;

/// The number of mixes that are measured at once: their executors are slow, so a core has time for
/// several.
const BESIDE: usize = 3;

/// The mixes and times of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrfPlan {
    /// The number of random mixes.
    pub mixes: usize,
    /// The number of mixes that are measured again with a tenant that floods.
    pub floods: usize,
    /// The time before each measurement.
    pub warm_up: Duration,
    /// The measured time of each mix.
    pub time: Duration,
}

impl DrfPlan {
    /// Returns a plan of a hundred mixes, which takes about a minute.
    pub fn full() -> Self {
        let (warm_up, time) = (Duration::from_millis(400), Duration::from_millis(1200));
        Self { mixes: 100, floods: 10, warm_up, time }
    }

    /// Returns a plan of a few mixes, which takes seconds.
    pub fn quick() -> Self {
        let (warm_up, time) = (Duration::from_millis(300), Duration::from_millis(600));
        Self { mixes: 6, floods: 2, warm_up, time }
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

/// All results of one command, stored as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrfReport {
    /// Version of this format: [`SavedReport::FORMAT`].
    pub format: u32,
    /// The machine and the versions of programs.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// The mixes and times.
    pub plan: DrfPlan,
    /// The results, the slides' example first.
    pub cases: Vec<DrfCase>,
    /// The reason why all results are void, if they are: mixes are measured beside each other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<Fault>,
}

impl SavedReport for DrfReport {
    const KIND: &'static str = "shares";

    fn format(&self) -> u32 {
        self.format
    }

    fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl DrfReport {
    /// Returns the greatest `off` over the cases whose names begin with `kind`, or 0 without any.
    pub fn worst(&self, kind: &str, off: impl Fn(&DrfCase) -> f64) -> f64 {
        let cases = self.cases.iter().filter(|case| case.name.starts_with(kind));
        cases.map(off).fold(0.0, f64::max)
    }
}

/// Returns the greatest absolute value.
pub fn largest(all: impl Iterator<Item = f64>) -> f64 {
    all.map(f64::abs).fold(0.0, f64::max)
}

/// Measures the slides' example, random mixes, and floods. Calls `progress` with the number of
/// mixes done and of all mixes.
///
/// # Errors
/// If a byte that arrived differs from the one that was sent, or the script failed.
pub fn measure_drf(
    plan: DrfPlan,
    environment: Environment,
    command: String,
    progress: impl Fn(usize, usize) + Sync,
) -> Result<DrfReport> {
    let mut mixes = vec![("talk".to_owned(), Mix::talk())];
    mixes.extend((0..plan.mixes).map(|at| (format!("mix {at}"), Mix::random(at as u64))));
    let floods = plan.floods.min(plan.mixes);
    mixes.extend((0..floods).map(|at| (format!("flood {at}"), Mix::random(at as u64).flooded())));
    let watch = Watch::begin_when_idle(Own::Children);
    let measured = measure(&plan, &mixes, &progress)?;
    // The executors' threads share processors, so that they wait for each other.
    let faults = watch.end(None).map(|reason| Fault {
        subject: "executors".to_owned(),
        load: format!("{} mixes", mixes.len()),
        round: 0,
        reason,
        failed: false,
    });
    let faults = faults.into_iter().collect();
    let scripted = script(&mixes.iter().map(|(_, mix)| mix).collect::<Vec<_>>())?;
    let mut cases: Vec<DrfCase> = Vec::new();
    for (at, ((name, mix), measured)) in mixes.into_iter().zip(measured).enumerate() {
        let (formula, script) = (formula(&mix), scripted.as_ref().map(|all| all[at].clone()));
        let flood = name.strip_prefix("flood ").map(|number| format!("mix {number}"));
        let before = flood.and_then(|mix| cases.iter().find(|case| case.name == mix));
        let quiet = before.map(|case| case.measured.clone());
        cases.push(DrfCase { name, mix, measured, formula, script, quiet });
    }
    Ok(DrfReport { format: DrfReport::FORMAT, environment, command, plan, cases, faults })
}

/// Measures all mixes, some at the same time. Results are in the order given.
fn measure(
    plan: &DrfPlan,
    mixes: &[(String, Mix)],
    progress: &(impl Fn(usize, usize) + Sync),
) -> Result<Vec<Vec<f64>>> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let results = Mutex::new(vec![Vec::new(); mixes.len()]);
    let work = || -> Result<()> {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some((name, mix)) = mixes.get(at) else { return Ok(()) };
            let rates = Engine::new(mix).and_then(|mut engine| engine.run(plan.warm_up, plan.time));
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
        ended.try_for_each(|end| end.unwrap_or_else(|_| Err(anyhow::anyhow!("a thread failed"))))
    })
    .map(|()| results.into_inner().unwrap_or_default())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

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
        DrfReport {
            format: DrfReport::FORMAT,
            environment: Environment { machine: "two cores".into(), ..Environment::default() },
            command: "slipway bench socket --drf".into(),
            plan: DrfPlan::quick(),
            cases: vec![case("talk", None), case("mix 0", None), case("flood 0", quiet)],
            faults: Vec::new(),
        }
    }

    #[test]
    fn errors_are_against_the_script() {
        let report = report();
        let errors = report.worst("mix", |case| largest(case.errors()));
        assert!((errors - 0.01).abs() < 1e-9, "{errors}");
        let changes = report.worst("flood", |case| largest(case.changes()));
        assert!((changes - 0.03125).abs() < 1e-9, "{changes}");
        assert_eq!(DrfReport::from_json(&report.to_json().unwrap()).unwrap(), report);
        assert!(DrfReport::from_json("{}").is_err());
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
