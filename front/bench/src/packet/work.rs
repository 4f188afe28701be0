//! Formats the work of e1000 functions: what each frame has cost, beside the paper's rates.

use super::report::DELIVERED;
use super::{FunctionCounts, Mode, PacketLoad, PacketReport};
use crate::table::titled;

/// The columns of the table of work.
const HEADINGS: [&str; 11] =
    ["", "exits", "TDT", "RDT", "ICR", "other", "kicks", "interrupts", "IMC", "IMS", "STATUS"];

/// Returns the number of events per unit, or `-` if there are no units.
fn per(units: u64, events: u64) -> String {
    match units {
        0 => "-".to_owned(),
        _ => format!("{:.4}", events as f64 / units as f64),
    }
}

/// Returns a row of the table of work: the events per frame that a function moved, and the accesses
/// to IMC, IMS and STATUS per read of ICR, which begins the service of an interrupt.
fn row(name: String, counts: &FunctionCounts) -> [String; HEADINGS.len()] {
    let frames = counts.frames();
    let per_frame = |events: u64| per(frames, events);
    let [tdt, rdt, icr, imc, ims, status] =
        ["TDT", "RDT", "ICR", "IMC", "IMS", "STATUS"].map(|name| counts.accesses(name));
    let known = tdt + rdt + icr + imc + ims + status;
    [
        name,
        per_frame(counts.exits()),
        per_frame(tdt),
        per_frame(rdt),
        per_frame(icr),
        per_frame(counts.exits() - known),
        per_frame(counts.kicks),
        per_frame(counts.interrupts),
        per(icr, imc),
        per(icr, ims),
        per(icr, status),
    ]
}

/// Formats the work of all functions with a load. The text is empty if no function was measured.
pub(super) fn work_table(report: &PacketReport, load: &PacketLoad, colour: bool) -> String {
    let mut rows = Vec::new();
    for subject in &report.subjects {
        let Some(work) = report.work(load, &subject.name) else { continue };
        for (side, counts) in [("sends", &work.one), ("receives", &work.two)] {
            if counts.frames() > 0 {
                rows.push(row(format!("{} {side}", subject.name), counts));
            }
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let about = "For each frame: accesses to registers, kicks, interrupts. For each interrupt that \
                 was served (a read of ICR): IMC, IMS, STATUS.\n";
    titled(&load.to_string(), &HEADINGS, &rows, colour) + about
}

/// Formats the rate of each mode of the e1000 as a multiple of the rate without any technique
/// ([`Mode::Base`]), beside the paper's. The text is empty if that one was not measured.
pub(super) fn paper_table(report: &PacketReport, load: &PacketLoad, colour: bool) -> String {
    let rate = |mode: Mode| report.over_rounds(load, mode.name(), &DELIVERED).map(|one| one.median);
    let bases = rate(Mode::Base).zip(Mode::Base.paper(load));
    let Some((base, paper_base)) = bases else { return String::new() };
    let row = |mode: Mode| {
        let (now, then) = rate(mode).zip(mode.paper(load))?;
        let kpps = |rate: f64| format!("{:.0}", rate / 1e3);
        let ratio = |rate: f64, base: f64| match base > 0.0 {
            true => format!("{:.1}", rate / base),
            false => "-".to_owned(),
        };
        let name = mode.name().to_owned();
        Some([name, kpps(now), ratio(now, base), kpps(then), ratio(then, paper_base)])
    };
    let rows: Vec<_> = Mode::ALL.into_iter().filter_map(row).collect();
    let headings = ["", "kpps", "of base", "the paper's kpps", "of base"];
    titled(&load.to_string(), &headings, &rows, colour)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::report::Work;
    use crate::packet::report::tests::report;

    #[test]
    fn work_is_shown_per_frame_and_per_interrupt() {
        let mut report = report(&[("e1000-base", &[30_000]), ("e1000-csb", &[600_000])]);
        let load = PacketLoad::default();
        assert_eq!(work_table(&report, &load, false), "");
        let registers =
            [("TDT", (0, 100)), ("ICR", (50, 0)), ("STATUS", (100, 0)), ("CTRL", (5, 0))];
        let one = FunctionCounts {
            registers: registers.map(|(name, counts)| (name.to_owned(), counts)).into(),
            kicks: 100,
            interrupts: 50,
            sent: 100,
            received: 0,
        };
        report.runs[0].measured.work = Some(Work { one, two: FunctionCounts::default() });
        let text = work_table(&report, &load, false);
        let line = text.lines().find(|line| line.starts_with("e1000-base sends")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().skip(2).collect();
        let wanted = ["2.5500", "1.0000", "0.0000", "0.5000", "0.0500", "1.0000", "0.5000"];
        assert_eq!(cells[..7], wanted, "{text}");
        assert_eq!(cells[7..], ["0.0000", "0.0000", "2.0000"], "{text}");
        assert!(!text.contains("receives"), "{text}");
        let text = paper_table(&report, &load, false);
        let line = text.lines().find(|line| line.starts_with("e1000-csb")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().skip(1).collect();
        assert_eq!(cells, ["600", "20.0", "1526", "47.7"], "{text}");
    }
}
