//! What was measured, with what it should have been.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::Mix;
use super::engine::Engine;
use super::script::{formula, script};
use crate::json;
use crate::report::Environment;

/// Mixes that are measured beside each other: their executors are slow, so that a core has time for several.
const BESIDE: usize = 3;

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrfPlan {
    /// Random mixes.
    pub mixes: usize,
    /// Of them, how many are measured again with a tenant that floods.
    pub floods: usize,
    /// Of each before it is measured.
    pub warm_up: Duration,
    /// Of each.
    pub time: Duration,
}

impl DrfPlan {
    /// A hundred mixes, which take about a minute.
    pub fn full() -> Self {
        let (warm_up, time) = (Duration::from_millis(400), Duration::from_millis(1200));
        Self { mixes: 100, floods: 10, warm_up, time }
    }

    /// A few, which take seconds.
    pub fn quick() -> Self {
        let (warm_up, time) = (Duration::from_millis(300), Duration::from_millis(600));
        Self { mixes: 6, floods: 2, warm_up, time }
    }
}

/// One mix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrfCase {
    /// `talk`, `mix N`, or `flood N`.
    pub name: String,
    /// Who shared what.
    pub mix: Mix,
    /// Bytes per second of each tenant, as its applications got them.
    pub measured: Vec<f64>,
    /// The same by the scheduler's formula.
    pub formula: Vec<f64>,
    /// The same by the script; none where there is no Python.
    pub script: Option<Vec<f64>>,
    /// Of a flood: bytes per second of each before the first tenant flooded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiet: Option<Vec<f64>>,
}

impl DrfCase {
    /// What each should have: the script's word, and the formula's where there is none.
    pub fn expected(&self) -> &[f64] {
        self.script.as_deref().unwrap_or(&self.formula)
    }

    /// How far each tenant is from what it should have: 0.01 is 1 % more.
    pub fn errors(&self) -> impl Iterator<Item = f64> + '_ {
        self.measured.iter().zip(self.expected()).map(|(got, due)| got / due - 1.0)
    }

    /// Of a flood: how far the others' rates moved.
    pub fn changes(&self) -> impl Iterator<Item = f64> + '_ {
        let quiet = self.quiet.as_deref().unwrap_or_default();
        self.measured.iter().zip(quiet).skip(1).map(|(now, before)| now / before - 1.0)
    }
}

/// Everything measured by one command. Kept as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DrfReport {
    /// Version of this format: [`DrfReport::FORMAT`].
    pub format: u32,
    /// Where and with what.
    pub environment: Environment,
    /// The command that measured, as it was typed.
    pub command: String,
    /// What was done.
    pub plan: DrfPlan,
    /// Mix by mix; the example of the slides first.
    pub cases: Vec<DrfCase>,
}

impl DrfReport {
    /// The format's version.
    pub const FORMAT: u32 = 1;

    /// From what [`DrfReport::to_json`] made.
    ///
    /// # Errors
    /// No JSON, another kind of report, or another format.
    pub fn from_json(text: &str) -> Result<Self> {
        json::read(text, "shares", Self::FORMAT, |report: &Self| report.format)
    }

    /// As JSON, ended by a newline.
    ///
    /// # Errors
    /// None in practice; serialisation reports its own.
    pub fn to_json(&self) -> Result<String> {
        json::write(self)
    }

    /// The largest of `off` by its amount, over the cases whose names begin with `kind`; 0 without any.
    pub fn worst(&self, kind: &str, off: impl Fn(&DrfCase) -> f64) -> f64 {
        let cases = self.cases.iter().filter(|case| case.name.starts_with(kind));
        cases.map(off).fold(0.0, f64::max)
    }
}

/// The largest amount.
pub fn largest(all: impl Iterator<Item = f64>) -> f64 {
    all.map(f64::abs).fold(0.0, f64::max)
}

/// Measures the example of the slides, random mixes, and floods; `progress` is told how many are done of how many.
///
/// # Errors
/// A byte that arrived was not the one that was sent; the script failed.
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
    let measured = measure(&plan, &mixes, &progress)?;
    let scripted = script(&mixes.iter().map(|(_, mix)| mix).collect::<Vec<_>>())?;
    let mut cases: Vec<DrfCase> = Vec::new();
    for (at, ((name, mix), measured)) in mixes.into_iter().zip(measured).enumerate() {
        let (formula, script) = (formula(&mix), scripted.as_ref().map(|all| all[at].clone()));
        let flood = name.strip_prefix("flood ").map(|number| format!("mix {number}"));
        let before = flood.and_then(|mix| cases.iter().find(|case| case.name == mix));
        let quiet = before.map(|case| case.measured.clone());
        cases.push(DrfCase { name, mix, measured, formula, script, quiet });
    }
    Ok(DrfReport { format: DrfReport::FORMAT, environment, command, plan, cases })
}

/// All mixes, some beside each other, in the order given.
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

    /// A report with made-up figures: 1 % too much for A, 1 % too little for B.
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
