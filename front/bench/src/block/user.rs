//! `slipway-load` as the load, in guests: its command line and its report.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Measured, Workload};

/// Returns the shell command by which `program` runs `workload` on the function at `address`.
pub fn load_command(
    program: &str,
    address: &str,
    workload: &Workload,
    warm_up: Duration,
    time: Duration,
) -> String {
    let (warm_up, time) = (warm_up.as_millis(), time.as_millis().max(1));
    format!("{program} run {address} {workload} {warm_up} {time}")
}

/// Parses the report in `text` about `workload`. The report comes from a guest, so it is checked,
/// but its numbers may still be false.
///
/// # Errors
/// If `text` is no such report.
pub fn load_measured(text: &str, workload: &Workload) -> Result<Measured> {
    let measured: Measured = serde_json::from_str(text).context("the load printed no report")?;
    let bytes = measured.latency.count().checked_mul(workload.block_size.into());
    ensure!(
        bytes == Some(measured.bytes) && measured.elapsed_ns > 0,
        "the load's report has {} bytes in {} commands",
        measured.bytes,
        measured.latency.count()
    );
    Ok(Measured {
        target_cpu_ns: None,
        at_least: None,
        neighbour_commands: None,
        waited_ns: None,
        ..measured
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_and_checked() {
        let workload: Workload = "randread-8k-d1".parse().unwrap();
        let report = |bytes: u64, elapsed: u64| {
            format!(
                "{{\"latency\":{{\"sum\":300,\"least\":100,\"greatest\":100,\
                 \"buckets\":[[100,3]]}},\
                 \"bytes\":{bytes},\"elapsed_ns\":{elapsed},\"target_cpu_ns\":7}}\n"
            )
        };
        let measured = load_measured(&report(24_576, 5), &workload).unwrap();
        assert_eq!((measured.latency.count(), measured.elapsed_ns), (3, 5));
        assert_eq!(measured.target_cpu_ns, None);
        for bad in [report(4096, 5), report(24_576, 0), String::new(), "{}".to_owned()] {
            assert!(load_measured(&bad, &workload).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_command_line_says_what_the_workload_says() {
        let workload: Workload = "randwrite-4k-d16-t2".parse().unwrap();
        let second = Duration::from_secs(1);
        assert_eq!(
            load_command("/run/x", "0000:00:05.0", &workload, second / 10, second),
            "/run/x run 0000:00:05.0 randwrite-4k-d16-t2 100 1000"
        );
    }
}
