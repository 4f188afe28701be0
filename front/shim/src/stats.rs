//! Metrics of a task, in the form of a control group's (version 1), which all versions of
//! containerd read.

use prost::Message;
use slipway_sandbox_api::v1::StatsReply;

use crate::containerd as cd;

/// The name of the message.
const TYPE: &str = "io.containerd.cgroups.v1.Metrics";

/// Returns the metrics of a sandbox: the guest's memory and processes, and the host's time for its
/// VMM.
pub fn of_sandbox(stats: &StatsReply) -> cd::Any {
    metrics(stats, stats.vmm_cpu_ns)
}

/// Returns the metrics of a container of a pod, as its guest's kernel counts them.
pub fn of_member(stats: &StatsReply) -> cd::Any {
    metrics(stats, stats.guest_cpu_busy_ns)
}

/// Returns the metrics of a task whose figures are not known: containerd takes a message without
/// values for an error.
pub fn none() -> cd::Any {
    metrics(&StatsReply::default(), 0)
}

fn metrics(stats: &StatsReply, cpu_ns: u64) -> cd::Any {
    let limit = stats.memory_total_bytes;
    let used = limit.saturating_sub(stats.memory_available_bytes);
    let metrics = cd::Metrics {
        pids: Some(cd::PidsStat { current: stats.processes.into() }),
        cpu: Some(cd::CpuStat { usage: Some(cd::CpuUsage { total: cpu_ns }) }),
        memory: Some(cd::MemoryStat {
            rss: used,
            total_rss: used,
            usage: Some(cd::MemoryEntry { limit, usage: used }),
        }),
    };
    cd::Any { type_url: TYPE.to_owned(), value: metrics.encode_to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_lies_about_its_memory_breaks_nothing() {
        let stats =
            StatsReply { memory_total_bytes: 1, memory_available_bytes: 9, ..Default::default() };
        let any = of_sandbox(&stats);
        let decoded = cd::Metrics::decode(any.value.as_slice()).unwrap();
        assert_eq!(decoded.memory.unwrap().usage.unwrap().usage, 0);
    }
}
