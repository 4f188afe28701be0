//! Figures of a running machine, for the control socket and the end.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use slipway_vmm::Running;
use slipway_vmm::board::Exit;

/// Returns what the machine has used since its start: exits by kind, the time of each CPU's thread
/// in microseconds (guest and exits), page faults of the process, and the guest's memory in bytes,
/// without and with what is `plugged`, and the part that somebody has touched.
pub fn collect(running: &Running, plugged: u64) -> Value {
    let exits: BTreeMap<_, _> = Exit::NAMES.into_iter().zip(running.board.exits()).collect();
    let times = running.cpus.times().into_iter().map(|time| time.as_micros() as u64);
    let times: Vec<u64> = times.collect();
    let (minor, major) = faults();
    let faults = json!({ "minor": minor, "major": major });
    let ram = &running.chassis.ram;
    let memory = json!({
        "bytes": ram.bytes(),
        "plugged": plugged,
        "touched": running.chassis.touched(),
    });
    json!({ "exits": exits, "cpu_us": times, "faults": faults, "memory": memory })
}

/// Returns the page faults of this process that were served at once, and those that waited for a
/// disk.
fn faults() -> (i64, i64) {
    // SAFETY: all zeros is a valid `rusage`, which the call may write.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    (usage.ru_minflt, usage.ru_majflt)
}
