//! Selects subjects and loads: those that the user named, or all.
//!
//! A further subject of a benchmark has its name and what it is in `SUBJECTS` of the benchmark's
//! file beside this one, where `subjects` makes it, or says what it needs; without that it is left
//! out with one line. The subject itself is a module of `front/bench`: an implementation of the
//! `Subject` trait of its benchmark (the head of `mod.rs` there names it), which runs one turn. All
//! subjects of sockets are of one type, `Way`: `Shared::way` (`socket.rs`) puts a further one
//! together from a network, TLS and engines, and only a network or an engine of a new kind is code
//! in `front/bench` (`socket/net.rs`, `socket/engine.rs`).
//!
//! A further load is a text that the benchmark's load type parses: in `LOADS` or `QUICK` where
//! these are lists. Loads on disks are made of patterns: the head of `workload.rs` in `front/load`.
//!
//! A further figure is a field of the turn's result (with `#[serde(default)]`, since `--compare`
//! reads older reports), unless a field that is there has it, and a `Figure`, which says which way
//! is better. The figures are where `Measured` is implemented: in `report.rs` of the benchmark's
//! module in `front/bench`, but in `socket/measured.rs` and `block/measure.rs` for these two; the
//! result for disks is in `measured.rs` of `front/load`. The report in JSON has the field, not the
//! figure. A figure of `Measured::figures` (`COMPARED`) is in tables with its spread, in pictures
//! and in `--compare`; one of `Measured::further` (`FURTHER`) is a column of tables only. Sockets,
//! `memory` and `nic` have a list for each kind of load.
//!
//! `docs/bench-NAME.md` has tables of subjects, loads and columns; `tests/e2e/85-bench.sh` to
//! `89-bench-cgroups.sh` run some. `vm` (disks in guests), `arms` and `density` list theirs in
//! their own modules.

use std::fmt::Display;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use slipway_bench::{
    AnySubject, Measured, Measurement, Plan, SavedReport, Turn, Turns, fault_lines,
};

use crate::progress;

/// Returns those of `all` whose names are in `only`, in the order of `all`; if `only` is empty, all
/// of them. `kind` is the word for them in errors.
///
/// # Errors
/// If a name in `only` is unknown.
pub(super) fn chosen<T: Copy>(
    kind: &str,
    only: &[String],
    all: &[T],
    name: impl Fn(T) -> &'static str,
) -> Result<Vec<T>> {
    if let Some(unknown) = only.iter().find(|asked| !all.iter().any(|one| name(*one) == **asked)) {
        bail!("there is no {kind} \"{unknown}\"; --list shows them");
    }
    let wanted = |one: &T| only.is_empty() || only.iter().any(|asked| asked == name(*one));
    Ok(all.iter().copied().filter(wanted).collect())
}

/// Returns a subject of this name if the host has what the subject needs. Otherwise says on
/// standard error that it is left out, and returns `None`.
///
/// # Errors
/// If the host lacks something and `only`, the names that the user gave, is not empty.
pub(super) fn able<T>(
    name: &str,
    only: &[String],
    subject: Result<T, impl Display>,
) -> Result<Option<T>> {
    match subject {
        Ok(subject) => Ok(Some(subject)),
        Err(needs) if !only.is_empty() => bail!("{name} needs {needs}"),
        Err(needs) => {
            eprintln!("Left out: {name} (needs {needs})");
            Ok(None)
        }
    }
}

/// Returns the loads that the user named, or those in `all`.
///
/// # Errors
/// If a text in `all` is not a valid load.
pub(super) fn loads<L: FromStr<Err = String> + Clone>(asked: &[L], all: &[&str]) -> Result<Vec<L>> {
    match asked {
        [] => all.iter().copied().map(load).collect(),
        asked => Ok(asked.to_vec()),
    }
}

fn load<L: FromStr<Err = String>>(text: &str) -> Result<L> {
    text.parse().map_err(anyhow::Error::msg)
}

/// Returns the loads that the user named as text, or those in `all`.
///
/// # Errors
/// If a text is not a valid load.
pub(super) fn parsed<L: FromStr<Err = String> + Clone>(
    asked: &[String],
    all: &[&str],
) -> Result<Vec<L>> {
    let asked = asked.iter().map(|text| load(text));
    loads(&asked.collect::<Result<Vec<L>>>()?, all)
}

/// Returns the turns if any was measured.
///
/// # Errors
/// The reasons of the failures if all turns failed.
pub(super) fn measured<R>(turns: Turns<R>) -> Result<Turns<R>> {
    if turns.runs.is_empty() {
        bail!("nothing could be measured\n{}", fault_lines(&turns.faults).trim_end());
    }
    Ok(turns)
}

/// Measures `subjects`, and makes the report of a host with this accelerator. A plan without loads
/// makes a report without turns.
///
/// # Errors
/// No subject takes any of the loads, or all turns failed or are left out.
pub(super) fn report<M: Measured, E: Default>(
    subjects: Vec<Box<AnySubject<M::Load, M>>>,
    plan: Plan<M::Load>,
    accelerator: String,
) -> Result<Measurement<M::Load, M, E>>
where
    Measurement<M::Load, M, E>: SavedReport,
{
    let bar = progress::turns();
    let report = report_telling(subjects, plan, accelerator, |turn| progress::turn(&bar, turn));
    bar.finish_and_clear();
    report
}

/// As [`report`], but calls `tell` at the start of each turn in place of a bar.
///
/// # Errors
/// The errors of [`report`].
pub(super) fn report_telling<M: Measured, E: Default>(
    mut subjects: Vec<Box<AnySubject<M::Load, M>>>,
    plan: Plan<M::Load>,
    accelerator: String,
    tell: impl Fn(&Turn<'_, M::Load>),
) -> Result<Measurement<M::Load, M, E>>
where
    Measurement<M::Load, M, E>: SavedReport,
{
    let takes = |load| subjects.iter().any(|subject| subject.takes(load));
    let has_loads = !plan.loads.is_empty();
    ensure!(!has_loads || plan.loads.iter().any(takes), "there is nothing to measure");
    let (environment, command) = (super::environment(accelerator), super::command_line());
    let report =
        Measurement::<M::Load, M, E>::take(environment, command, plan, &mut subjects, |turn| {
            tell(&turn);
        });
    let obstacles = report.obstacles();
    let has_turns = !has_loads || !report.runs.is_empty();
    ensure!(has_turns, "nothing could be measured\n{}", obstacles.trim_end());
    Ok(report)
}

/// Lists subjects with their descriptions, and loads. Returns the exit status.
pub(super) fn list(subjects: &[(&str, &str)], loads: &[impl Display]) -> i32 {
    let width = subjects.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    crate::say!("subjects:");
    for (name, about) in subjects {
        crate::say!("  {name:<width$} {about}");
    }
    crate::say!("loads, unless --load names others:");
    for load in loads {
        crate::say!("  {load}");
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_taken_once_and_in_order_and_what_is_none_is_said() {
        let all = ["one", "two", "three"];
        let chosen = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|&name| name.into()).collect();
            chosen("subject", &only, &all, |name| name)
        };
        assert_eq!(chosen(&[]).unwrap(), all);
        assert_eq!(chosen(&["three", "one", "three"]).unwrap(), ["one", "three"]);
        let error = chosen(&["one", "four"]).unwrap_err().to_string();
        assert_eq!(error, "there is no subject \"four\"; --list shows them");
    }
}
