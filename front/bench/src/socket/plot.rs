//! Draws a report of sockets.

use anyhow::Result;

use super::{SocketFigures, SocketLoad, SocketReport, Traffic};
use crate::duration::{human, rate};
use crate::groups::{Group, groups};

/// Draws `report`, with a row for each subject of each load. Its bar shows the bytes per second,
/// the median round trip, or the processors that idle sockets keep busy.
///
/// # Errors
/// If nothing was measured.
pub fn socket_plot(report: &SocketReport, title: &str) -> Result<String> {
    let group = |load: &SocketLoad| {
        let what = match load.traffic {
            Traffic::Idle => "processors kept busy",
            Traffic::Pingpong(_) => "median round trip",
            Traffic::Stream | Traffic::Window => "bits a second",
        };
        let more_is_better = matches!(load.traffic, Traffic::Stream | Traffic::Window);
        Group::of(format!("{load}: {what}"), more_is_better, &report.subjects, |subject| {
            let figures = report.figures(load, subject)?;
            let (length, text) = length(load, &figures);
            Some((length, figures.range, text))
        })
    };
    groups(title, report.plan.loads.iter().map(group))
}

/// Returns the length of a bar, in the unit of [`SocketFigures::range`], and the text at its end.
fn length(load: &SocketLoad, figures: &SocketFigures) -> (f64, String) {
    match (load.traffic, figures.latency) {
        (Traffic::Idle, _) => (figures.cores, idle_cores(figures.cores)),
        (_, Some([p50, p99, _])) => {
            (p50, format!("{}, p99 {}", human(p50 as u64), human(p99 as u64)))
        }
        _ => {
            let (bits, cores) = (rate(figures.bytes * 8.0, "bit/s"), figures.cores_per_10_gbits());
            let engines = figures.engines_per_byte * 1.25;
            let engines = match engines {
                0.0 => String::new(),
                _ => format!(" ({engines:.2} engines')"),
            };
            (figures.bytes, format!("{bits}, {cores:.2} cores for 10 Gbit/s{engines}"))
        }
    }
}

/// Returns the text of processors that are used by connections at rest.
fn idle_cores(cores: f64) -> String {
    match cores < 0.0001 {
        true => "under 0.0001 cores".to_owned(),
        false => format!("{cores:.4} cores"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;
    use crate::pictures::fair;

    #[test]
    fn every_subject_is_drawn() {
        let both: [(&str, &[u64]); 2] = [("tcp", &[1_000_000_000]), ("<ours>", &[1])];
        for (load, end) in [
            ("stream-128k-c1", "8.00 Gbit/s, 5.00 cores"),
            ("pingpong-64b-busy", "p99 1 ns"),
            ("idle-c1024", "4.0000 cores"),
        ] {
            let text = socket_plot(&report(load, &both), "a & b").unwrap();
            fair(&text).unwrap();
            for name in ["tcp", "&lt;ours&gt;", "a &amp; b", load, end] {
                assert!(text.contains(name), "{name}: {text}");
            }
        }
        assert!(socket_plot(&report("idle-c1", &[]), "x").is_err());
    }
}
