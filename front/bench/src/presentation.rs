//! Tables, comparisons and pictures of measurements, by the figures of their results.

use std::fmt::Display;

use anyhow::Result;

use crate::compare::{ONE_ROUND, figure_row, figure_table};
use crate::figure::{Figure, ratio};
use crate::groups::{Group, groups};
use crate::measurement::{Measured, Measurement};
use crate::table::titled;
use crate::turns::{Described, LeftOut, fault_lines, foot};

impl<L: Display, M, E> Measurement<L, M, E> {
    /// Formats a table for each load of which `rows` returns any. The load is its title, the lines
    /// of `below` follow it, and an empty line ends it. Headings are bold if `colour`.
    pub(crate) fn tables<const N: usize>(
        &self,
        headings: &[&str; N],
        colour: bool,
        rows: impl Fn(&L) -> Vec<[String; N]>,
        below: impl Fn(&L) -> String,
    ) -> String {
        let table = |load: &L| {
            let rows = rows(load);
            let table = titled(&load.to_string(), headings, &rows, colour);
            (!rows.is_empty()).then(|| table + &below(load) + "\n")
        };
        self.plan.loads.iter().filter_map(table).collect()
    }

    /// Returns the rows of those subjects for which `row` returns one, by their names.
    pub(crate) fn rows<R>(&self, row: impl FnMut(&String) -> Option<R>) -> Vec<R> {
        self.subjects.iter().map(|one| &one.name).filter_map(row).collect()
    }
}

impl<L, M, E> Measurement<L, M, E> {
    /// Formats what stands below all tables: loads that the host cannot run, faults, and what each
    /// subject is.
    pub(crate) fn foot(&self) -> String {
        self.obstacles() + &foot(&[], &self.subjects)
    }

    /// Formats a line for each load that the host cannot run, and lines for faults.
    pub fn obstacles(&self) -> String {
        let lines: String = self.left_out.iter().map(LeftOut::line).collect();
        lines + &fault_lines(&self.faults)
    }
}

impl<M: Measured, E> Measurement<M::Load, M, E> {
    /// Formats a table for each load with a row for each subject: the medians of its figures, for
    /// those that are compared with the spread and the ratio to the first row. The lines of `below`
    /// follow each table. Headings are bold if `colour`.
    pub(crate) fn figure_tables(&self, colour: bool, below: impl Fn(&M::Load) -> String) -> String {
        let table = |load: &M::Load| {
            let compared = M::figures(load).iter();
            let compared = compared.flat_map(|one| [one.name, "spread", "of the first"]);
            let further = M::further(load).iter().map(|one| one.name);
            let headings: Vec<&str> = [""].into_iter().chain(compared).chain(further).collect();
            let rows = self.rows(|name| self.cells(load, name));
            let table = titled(&load.to_string(), &headings, &rows, colour);
            (!rows.is_empty()).then(|| table + &below(load) + "\n")
        };
        self.plan.loads.iter().filter_map(table).collect()
    }

    /// Formats the row of a subject, or returns `None` if it had no turn.
    fn cells(&self, load: &M::Load, name: &str) -> Option<Vec<String>> {
        self.turns(load, name).next()?;
        let mut cells = vec![name.to_owned()];
        for figure in M::figures(load) {
            let own = self.over_rounds(load, name, figure);
            let three = own.map(|own| {
                let all = |one: &Described| self.over_rounds(load, &one.name, figure);
                let first = self.subjects.iter().find_map(all).map_or(0.0, |one| one.median);
                [(figure.text)(own.median), own.spread_text(), ratio(own.median, first)]
            });
            cells.extend(three.unwrap_or_default());
        }
        let further = M::further(load).iter();
        cells.extend(further.map(|one| self.shown(load, name, one).unwrap_or_default()));
        Some(cells)
    }

    /// Formats the median of a figure, or returns `None` if no turn has it.
    pub(crate) fn shown(
        &self,
        load: &M::Load,
        subject: &str,
        figure: &Figure<M::Load, M>,
    ) -> Option<String> {
        Some((figure.text)(self.over_rounds(load, subject, figure)?.median))
    }

    /// Formats a table of one load: for each subject that has any of these figures their medians.
    /// The text is empty without such a subject.
    pub(crate) fn medians(
        &self,
        title: &str,
        load: &M::Load,
        figures: &[Figure<M::Load, M>],
        colour: bool,
    ) -> String {
        let row = |name: &String| {
            let shown: Vec<_> = figures.iter().map(|one| self.shown(load, name, one)).collect();
            let has_any = shown.iter().any(Option::is_some);
            let cells = shown.into_iter().map(Option::unwrap_or_default);
            has_any.then(|| [name.clone()].into_iter().chain(cells).collect::<Vec<_>>())
        };
        let (rows, names) = (self.rows(row), figures.iter().map(|one| one.name));
        let headings: Vec<&str> = [""].into_iter().chain(names).collect();
        if rows.is_empty() { String::new() } else { titled(title, &headings, &rows, colour) }
    }

    /// Formats a row for each load, subject and compared figure that this report and `before` have,
    /// with the means. A difference counts as real if it exceeds half the 99 % confidence interval
    /// of the means' difference (Welch). The noise stays unknown where reports have one round by
    /// design ([`Measured::HAS_ONE_ROUND`]).
    pub fn compare(&self, before: &Self) -> String {
        let mut rows = Vec::new();
        for load in &self.plan.loads {
            let figures = M::figures(load);
            for Described { name, .. } in &self.subjects {
                let row = |figure: &Figure<M::Load, M>| {
                    let [old, new] = [before, self].map(|one| one.values(load, name, figure));
                    // A figure that has no other beside it needs no name.
                    let of = if figures.len() > 1 {
                        format!(", {}", figure.name)
                    } else {
                        String::new()
                    };
                    let shown = (figure.text, figure.more_is_better);
                    let mut row = figure_row(format!("{load} {name}{of}"), &old, &new, shown)?;
                    if M::HAS_ONE_ROUND {
                        let [.., verdict] = &mut row;
                        ONE_ROUND.clone_into(verdict);
                    }
                    Some(row)
                };
                rows.extend(figures.iter().filter_map(row));
            }
        }
        figure_table(&rows)
    }

    /// Returns a group of bars for each compared figure of a load, with a bar for each subject.
    pub(crate) fn groups(&self, load: &M::Load) -> impl Iterator<Item = Group> {
        M::figures(load).iter().map(move |figure| self.group(load, figure))
    }

    /// Returns a bar for each subject that has a figure of a load.
    pub(crate) fn group(&self, load: &M::Load, figure: &Figure<M::Load, M>) -> Group {
        let name = format!("{}: {}", M::title(load), figure.about);
        Group::of(name, figure.more_is_better, &self.subjects, |subject| {
            let own = self.over_rounds(load, subject, figure)?;
            let beside = figure.beside.iter().filter_map(|one| self.shown(load, subject, one));
            let texts: Vec<String> =
                [(figure.text)(own.median)].into_iter().chain(beside).collect();
            Some((own.median, own.range, texts.join(", ")))
        })
    }

    /// Draws the report: for each load and each compared figure a bar for each subject.
    ///
    /// # Errors
    /// If nothing was measured.
    pub fn picture(&self, title: &str) -> Result<String> {
        groups(title, self.plan.loads.iter().flat_map(|load| self.groups(load)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::tests::Taken;

    type Report = Measurement<u32, Taken>;

    /// Makes a report of the subjects `a` and `b` with these times, round by round.
    fn report(a: &[u64], b: &[u64]) -> Report {
        Report::sample("test", &["1"], &[("a", a), ("b", b)], |_, _, &ns| Taken(ns))
    }

    #[test]
    fn differences_are_told_from_noise_and_better_is_as_the_figure_says() {
        let before = report(&[100, 101, 102], &[100, 150, 200]);
        let now = report(&[50, 51, 52], &[90, 140, 190]);
        let ends = |text: &str, name: &str, end: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            assert!(line.ends_with(end), "{text}");
        };
        let text = now.compare(&before);
        for (name, end) in [("1 a, taken", "faster"), ("1 a, rate", "faster"), ("1 b", "noise")] {
            ends(&text, name, end);
        }
        ends(&before.compare(&now), "1 a, rate", "slower");
        ends(&now.compare(&report(&[9], &[])), "1 a, taken", "needs three rounds");
        assert!(now.compare(&report(&[], &[])).contains("nothing in common"));
    }

    #[test]
    fn bars_have_the_figures_that_are_beside_theirs() {
        let text = report(&[10], &[]).picture("x").unwrap();
        assert!(text.contains("100000000/s, 10 ns"), "{text}");
        assert!(text.contains("more is better") && text.contains("less is better"), "{text}");
    }
}
