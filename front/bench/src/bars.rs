//! Draws timelines as bars in the terminal.

use slipway_telemetry::Timeline;

use crate::duration::{Ticks, human};
use crate::palette::{self, Look};
use crate::slices::{self, Slice};
use crate::table::{DIM, PLAIN};

/// The most bars that fit a screen; of more sandboxes only every n-th is drawn.
const MOST_BARS: usize = 40;
/// The most columns for a sandbox's name.
const MOST_NAME: usize = 16;
/// The fewest columns of the axis. In a narrower terminal lines overflow.
const LEAST_AXIS: usize = 10;

/// Draws one bar for each sandbox on a shared time axis from the start of the run, `width` columns
/// wide (the terminal's), in the order in which the sandboxes were ready, with a legend. Each line
/// ends with a newline. The text is empty if there is no stage.
///
/// A cell shows the letter (and colour, if `colour`) of the stage that fills most of it. If several
/// stages run at the same time, it is the one that began last, in lower case. Stages much shorter
/// than a cell do not show. Of more than 40 sandboxes every n-th is drawn, and always the slowest.
pub fn bars(timelines: &[Timeline], width: usize, colour: bool) -> String {
    let sorted = slices::by_end(timelines);
    let Some(slowest) = sorted.last() else { return String::new() };
    let looks = palette::looks(timelines);
    let step = sorted.len().div_ceil(MOST_BARS);
    let mut shown: Vec<&Timeline> = sorted.iter().rev().step_by(step).copied().collect();
    shown.reverse();

    let longest = shown.iter().map(|timeline| timeline.sandbox.chars().count()).max().unwrap_or(0);
    let name_width = longest.min(MOST_NAME);
    let end_label = human(slices::end_ns(slowest)).chars().count();
    let cells = width.saturating_sub(name_width + end_label + 4).max(LEAST_AXIS);
    let axis = Axis { span_ns: slices::end_ns(slowest).max(1), cells };

    let mut text = String::new();
    for timeline in &shown {
        let name = clip(&timeline.sandbox, name_width);
        let end_ns = slices::end_ns(timeline);
        let bar = paint(&row(timeline, &looks, &axis), &looks, colour);
        text.push_str(&format!("{name:<name_width$} │{bar}│ {}\n", human(end_ns)));
    }
    text.push_str(&axis.draw(name_width));
    text.push_str(&legend(&looks, width, colour));
    if step > 1 {
        let note = format!("every {step}th of {} sandboxes is shown", sorted.len());
        text.push_str(&if colour { format!("{DIM}{note}{PLAIN}\n") } else { note + "\n" });
    }
    text
}

/// The shared time axis: `span_ns` from 0 on, over `cells` columns.
struct Axis {
    span_ns: u64,
    cells: usize,
}

impl Axis {
    /// Returns the time at which column `cell` begins, in nanoseconds.
    fn edge_ns(&self, cell: usize) -> u64 {
        let place = u128::from(self.span_ns) * cell as u128 / self.cells as u128;
        u64::try_from(place).unwrap_or(u64::MAX)
    }

    /// Returns the column of `ns`.
    fn cell(&self, ns: u64) -> usize {
        let place = u128::from(ns) * self.cells as u128 / u128::from(self.span_ns);
        usize::try_from(place).unwrap_or(usize::MAX).min(self.cells - 1)
    }

    /// Draws a line with ticks and a line with their labels.
    fn draw(&self, indent: usize) -> String {
        let ticks = Ticks::new(self.span_ns, (self.cells / 10).max(1));
        let mut line = vec!['─'; self.cells];
        let mut labels = vec![' '; self.cells + 1];
        for at in ticks.places(self.span_ns) {
            let cell = self.cell(at);
            line[cell] = '┴';
            let label = format!("{} {}", ticks.label(at), ticks.unit);
            let end = cell + label.chars().count();
            if end <= labels.len() && labels[cell.saturating_sub(1)..end].iter().all(|c| *c == ' ')
            {
                labels.splice(cell..end, label.chars());
            }
        }
        let (line, labels): (String, String) = (line.iter().collect(), labels.iter().collect());
        format!("{:indent$} └{line}┘\n{:indent$}  {}\n", "", "", labels.trim_end())
    }
}

/// The content of a cell.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cell {
    /// Index of the stage's look.
    look: usize,
    /// Other stages run at the same time.
    beside: bool,
}

fn row(timeline: &Timeline, looks: &[Look], axis: &Axis) -> Vec<Option<Cell>> {
    let slices = slices::slices(timeline);
    (0..axis.cells)
        .map(|cell| {
            let (from, to) = (axis.edge_ns(cell), axis.edge_ns(cell + 1));
            dominant(&slices, from, to.max(from + 1)).map(|slice| shown(timeline, slice, looks))
        })
        .collect()
}

fn shown(timeline: &Timeline, slice: &Slice, looks: &[Look]) -> Cell {
    let latest = slice.running[slice.running.len() - 1];
    let name = &timeline.stages[latest].name;
    let look = looks.iter().position(|look| look.name == *name).unwrap_or(0);
    Cell { look, beside: slice.running.len() > 1 }
}

/// Returns the slice that covers most of `from` to `to`, or `None` if most of it is empty.
fn dominant(slices: &[Slice], from: u64, to: u64) -> Option<&Slice> {
    let covered = |slice: &Slice| slice.end_ns.min(to).saturating_sub(slice.start_ns.max(from));
    let best = slices.iter().max_by_key(|slice| covered(slice))?;
    let all: u64 = slices.iter().map(covered).sum();
    (all.saturating_mul(2) >= to - from).then_some(best)
}

fn paint(row: &[Option<Cell>], looks: &[Look], colour: bool) -> String {
    let mut text = String::new();
    // Escapes are written only where the colour changes: a bar has a few stages, not a hundred.
    let mut current = None;
    for cell in row {
        let look = cell.map(|cell| cell.look);
        if colour && look != current {
            text.push_str(PLAIN);
            text.push_str(&look.map(|look| escape(&looks[look])).unwrap_or_default());
            current = look;
        }
        text.push(match cell {
            Some(Cell { look, beside: false }) => looks[*look].letter,
            Some(Cell { look, beside: true }) => looks[*look].letter.to_ascii_lowercase(),
            None => ' ',
        });
    }
    if current.is_some() {
        text.push_str(PLAIN);
    }
    text
}

fn escape(look: &Look) -> String {
    let text = if look.dark { 231 } else { 16 };
    format!("\x1b[48;5;{};38;5;{text}m", look.ansi)
}

/// Formats letters and names, as many on a line as fit.
fn legend(looks: &[Look], width: usize, colour: bool) -> String {
    let mut text = String::new();
    let mut column = 0;
    for look in looks {
        // A coloured letter has a space on each side.
        let needed = look.name.chars().count() + if colour { 6 } else { 4 };
        if column > 0 && column + needed > width {
            text.push('\n');
            column = 0;
        }
        let letter = look.letter;
        if colour {
            text.push_str(&format!("{} {letter} {PLAIN} {}  ", escape(look), look.name));
        } else {
            text.push_str(&format!("{letter} {}  ", look.name));
        }
        column += needed;
    }
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    format!(
        "{}\nlower case: the latest of several stages that run side by side\n",
        lines.join("\n")
    )
}

/// Returns the first `width` characters; the last of them is `…` if something was cut off.
fn clip(name: &str, width: usize) -> String {
    if name.chars().count() <= width {
        return name.to_owned();
    }
    name.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn bar_of(line: &str) -> &str {
        line.split('│').nth(1).expect("a bar")
    }

    #[test]
    fn a_bar_shows_what_ran_when() {
        let mut timeline = Timeline::new("web");
        timeline.record("vmm", 0, 250_000_000);
        timeline.record("kernel", 500_000_000, 1_000_000_000);
        timeline.record("vf-driver", 750_000_000, 1_000_000_000);
        // 3 columns for the name, 6 for "1.00 s", 4 between: 40 cells of 25 ms remain.
        let text = bars(&[timeline], 53, false);
        let expected =
            format!("{}{}{}{}", "M".repeat(10), " ".repeat(10), "K".repeat(10), "n".repeat(10));
        assert_eq!(bar_of(&text), expected, "{text}");
        assert!(text.contains("N vf-driver"), "{text}");
        assert!(text.contains("500 ms") || text.contains("0.5 s"), "{text}");
    }

    #[test]
    fn lines_fit_the_terminal() {
        for width in [40, 60, 80, 133, 300] {
            let text = bars(&samples::staircase(60), width, false);
            for line in text.lines().filter(|line| !line.starts_with("lower case")) {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
    }

    #[test]
    fn hundreds_of_sandboxes_are_thinned_and_keep_the_slowest() {
        let timelines = samples::staircase(500);
        let text = bars(&timelines, 100, false);
        let drawn = text.lines().filter(|line| line.contains('│')).count();
        assert!((30..=MOST_BARS).contains(&drawn), "{drawn}");
        assert!(text.contains("every 13th of 500"), "{text}");
        assert!(text.contains("s499"), "{text}");
    }

    #[test]
    fn colour_changes_nothing_but_colour() {
        let timelines = samples::four();
        let colourful = bars(&timelines, 90, true);
        let plain = bars(&timelines, 90, false);
        let mut stripped = String::new();
        let mut escape = false;
        for letter in colourful.chars() {
            match letter {
                '\x1b' => escape = true,
                'm' if escape => escape = false,
                _ if escape => {}
                _ => stripped.push(letter),
            }
        }
        assert!(colourful.contains("\x1b[48;5;"));
        let bars_only = |text: &str| {
            text.lines().filter(|line| line.contains('│')).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(bars_only(&stripped), bars_only(&plain));
        assert!(!plain.contains('\x1b'));
    }

    #[test]
    fn degenerate_input_draws_without_a_panic() {
        assert_eq!(bars(&[], 80, true), "");
        assert_eq!(bars(&[Timeline::new("a")], 80, true), "");
        let mut timeline = Timeline::new("ünïcödé-with-a-rather-long-name");
        timeline.record("", 0, 0);
        timeline.record("odd", u64::MAX, u64::MAX);
        for width in [0, 1, 20, 80] {
            assert!(!bars(std::slice::from_ref(&timeline), width, false).is_empty());
        }
        let mut huge = Timeline::new("h");
        huge.record("kernel", 0, u64::MAX);
        assert!(bars(&[huge], 80, false).contains('K'));
    }
}
