//! fio as the load, on the host and in guests: its arguments and its report.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use slipway_telemetry::Histogram;

use super::{Measured, Workload};

/// Returns fio's arguments for `workload` on `file`, as in the thesis's Listing 3.1: directly on
/// the device, without the page cache, one report for all threads. Sequential threads each get
/// their own part of the file.
pub fn fio_arguments(
    workload: &Workload,
    file: &str,
    warm_up: Duration,
    time: Duration,
) -> Vec<String> {
    let Workload { pattern, block_size, depth, threads } = workload;
    let mut arguments = vec![
        "--name=slipway".to_owned(),
        format!("--filename={file}"),
        format!("--rw={}", pattern.name()),
        format!("--bs={block_size}"),
        format!("--iodepth={depth}"),
        format!("--numjobs={threads}"),
        format!("--ramp_time={}ms", warm_up.as_millis()),
        format!("--runtime={}ms", time.as_millis().max(1)),
        format!("--offset_increment={}%", if pattern.is_random() { 0 } else { 100 / threads }),
    ];
    let fixed = [
        "--ioengine=libaio",
        "--direct=1",
        "--thread",
        "--time_based",
        "--group_reporting",
        "--randrepeat=0",
        "--lat_percentiles=1",
        "--clat_percentiles=0",
        "--output-format=json+",
    ];
    arguments.extend(fixed.map(str::to_owned));
    arguments
}

/// Returns [`fio_arguments`] for the first bytes of a device that may be larger: `place` is the
/// device's path and their number. Sequential threads each get their own part of these bytes.
pub fn fio_arguments_within(
    workload: &Workload,
    place: (&str, u64),
    warm_up: Duration,
    time: Duration,
) -> Vec<String> {
    const PART: &str = "--offset_increment=";
    let (device, bytes) = place;
    let mut arguments = fio_arguments(workload, device, warm_up, time);
    let (block, threads) = (u64::from(workload.block_size), u64::from(workload.threads));
    let parts = if workload.pattern.is_random() { 1 } else { threads };
    // At least one block, which the device refuses if it is too small.
    let size = (bytes / parts / block).max(1) * block;
    arguments.retain(|argument| !argument.starts_with(PART));
    arguments.push(format!("--size={size}"));
    arguments.push(format!("{PART}{}", if parts == 1 { 0 } else { size }));
    arguments
}

/// The most commands that all threads together may have in flight.
const MOST_UNDER_WAY: u64 = (Workload::GREATEST_DEPTH * Workload::MOST_THREADS) as u64;

/// The parts of fio's report that are used; "json+" contains whole histograms.
#[derive(Deserialize)]
struct Report {
    jobs: Vec<FioJob>,
}

#[derive(Deserialize)]
struct FioJob {
    error: i64,
    read: Direction,
    write: Direction,
}

#[derive(Deserialize)]
struct Direction {
    io_bytes: u64,
    total_ios: u64,
    /// Milliseconds.
    runtime: u64,
    lat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    /// Missing in a direction without commands.
    #[serde(default)]
    bins: BTreeMap<u64, u64>,
}

/// Parses fio's report in `text`, which may have other lines around it. The report comes from a
/// guest, so it is checked, but its numbers may still be false.
///
/// # Errors
/// If `text` has no such report, or a command failed.
pub fn fio_measured(text: &str) -> Result<Measured> {
    let start = text.find('{').context("fio printed no report")?;
    let mut reports = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Report>();
    let report = reports.next().context("fio printed no report")?;
    let report = report.context("fio's report is not as expected (fio 3 prints it)")?;
    let [job] = report.jobs.as_slice() else {
        anyhow::bail!("fio reports on {} jobs instead of one", report.jobs.len());
    };
    ensure!(job.error == 0, "fio: a command failed with error {}", job.error);
    let mut measured = Measured::default();
    for direction in [&job.read, &job.write] {
        let mut latency = Histogram::new();
        for (&ns, &count) in &direction.lat_ns.bins {
            latency.record_many(ns, count);
        }
        // Commands in flight when the warm-up ends may be in one count and not in the other.
        ensure!(
            latency.count().abs_diff(direction.total_ios) <= MOST_UNDER_WAY,
            "fio's histogram has {} commands of {}",
            latency.count(),
            direction.total_ios
        );
        measured.latency.merge(&latency);
        measured.bytes = measured.bytes.saturating_add(direction.io_bytes);
        let elapsed_ns = direction.runtime.saturating_mul(1_000_000);
        measured.elapsed_ns = measured.elapsed_ns.max(elapsed_ns);
    }
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(error: i64, ios: u64) -> String {
        let idle = r#"{"io_bytes":0,"total_ios":0,"runtime":0,"lat_ns":{"min":0}}"#;
        let latencies = r#"{"bins":{"13888":2,"14016":1}}"#;
        let busy =
            format!(r#"{{"io_bytes":12288,"total_ios":{ios},"runtime":2,"lat_ns":{latencies}}}"#);
        let job = format!(r#"{{"error":{error},"read":{busy},"write":{idle},"trim":{{}}}}"#);
        format!("fio: a warning\n{{\"fio version\":\"fio-3.33\",\"jobs\":[{job}]}}\n")
    }

    #[test]
    fn a_report_is_read() {
        let measured = fio_measured(&report(0, 3)).unwrap();
        assert_eq!((measured.latency.count(), measured.bytes), (3, 12_288));
        assert_eq!((measured.elapsed_ns, measured.target_cpu_ns), (2_000_000, None));
        assert!((13_000..15_000).contains(&measured.latency.percentile(50.0)));
        assert!((measured.iops() - 1_500.0).abs() < 1e-6);
    }

    #[test]
    fn what_is_no_report_is_refused() {
        let error = |text: &str| fio_measured(text).unwrap_err().to_string();
        assert!(error("").contains("no report"));
        assert!(error("{}").contains("not as expected"));
        assert!(error(r#"{"jobs":[]}"#).contains("0 jobs"));
        assert!(error(&report(5, 3)).contains("error 5"));
        assert!(error(&report(0, 70_000)).contains("3 commands of 70000"));
    }

    #[test]
    fn arguments_say_what_the_workload_says() {
        let load = |name: &str| {
            let second = Duration::from_secs(1);
            fio_arguments(&name.parse().unwrap(), "/dev/x", second / 5, second).join(" ")
        };
        let random = load("randwrite-8k-d16-t4");
        for part in ["--rw=randwrite", "--bs=8192", "--iodepth=16", "--numjobs=4"] {
            assert!(random.contains(part), "{random}");
        }
        assert!(random.contains("--ramp_time=200ms --runtime=1000ms --offset_increment=0%"));
        assert!(load("read-4k-d1-t4").contains("--offset_increment=25%"));
    }

    #[test]
    fn a_part_of_a_device_is_divided_among_sequential_threads() {
        let load = |name: &str, bytes| {
            let (workload, second) = (name.parse().unwrap(), Duration::from_secs(1));
            fio_arguments_within(&workload, ("/dev/x", bytes), second, second).join(" ")
        };
        let ends = |text: String, end: &str| {
            assert!(
                text.ends_with(end) && text.matches("--offset_increment").count() == 1,
                "{text}"
            );
        };
        ends(load("randread-4k-t4", 64 << 20), "--size=67108864 --offset_increment=0");
        ends(load("read-4k-t4", 64 << 20), "--size=16777216 --offset_increment=16777216");
        ends(load("read-4k-t3", 64 << 10), "--size=20480 --offset_increment=20480");
        ends(load("write-1m-t2", 1 << 20), "--size=1048576 --offset_increment=1048576");
    }
}
