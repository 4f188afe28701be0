//! Metrics of a task, in the form of a control group's. containerd reads those of version 1 and of
//! version 2 by the name of the message; its clients expect those of the host's control groups.
//!
//! Figures of a container are its guest's, which may be any numbers: the memory in use never
//! exceeds the limit that is told with it, since readers subtract the one from the other.
//!
//! A new figure of a container is one of the daemon's `Stats` first: the head of `stats` in
//! `front/cli` says how it gets there, and those of control groups are in `GroupStats`. Here it is
//! a field of `Metrics` or `UnifiedMetrics`, or of a message in them (`proto/containerd.proto`),
//! with containerd's own number, which `version_1` or `version_2` fills in; `simple` has it if it
//! is known of a pod's sandbox too. Tests are below; `docs/containerd.md` has a row, "metrics".

use std::path::Path;

use prost::Message;
use slipway_sandbox_api::v1::{self, StatsReply};

use crate::containerd as cd;

/// The names of the messages.
const VERSION_1: &str = "io.containerd.cgroups.v1.Metrics";
const VERSION_2: &str = "io.containerd.cgroups.v2.Metrics";
/// A file that is there if the host's control groups are of version 2 alone.
const UNIFIED: &str = "/sys/fs/cgroup/cgroup.controllers";

/// The form of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Control groups of version 1.
    Version1,
    /// Control groups of version 2.
    Version2,
}

impl Form {
    /// Returns the form of the host's own control groups.
    pub fn of_host() -> Self {
        if Path::new(UNIFIED).exists() { Self::Version2 } else { Self::Version1 }
    }
}

/// Returns the metrics of a pod's sandbox: what its VMM takes of the host, and the processes of all
/// its containers.
pub fn of_pod(stats: &StatsReply, form: Form) -> cd::Any {
    let used = stats.vmm_resident_bytes;
    // The VMM has memory beside its guest's.
    let limit = stats.memory_total_bytes.max(used);
    metrics(simple(stats, stats.vmm_cpu_ns, (used, limit)), form)
}

/// Returns the metrics of a container: the counts of its control group in the guest. An agent of an
/// earlier version tells its memory and processes only, and `cpu_ns` is its CPU time then.
pub fn of_container(stats: &StatsReply, cpu_ns: u64, form: Form) -> cd::Any {
    let limit = stats.memory_total_bytes;
    let used = limit.saturating_sub(stats.memory_available_bytes);
    let group = stats.group.clone();
    let mut group = group.unwrap_or_else(|| simple(stats, cpu_ns, (used, limit)));
    // A group without a limit has its guest's memory.
    if let (Some(memory), 1..) = (&mut group.memory, limit) {
        memory.usage_limit = memory.usage_limit.min(limit);
    }
    metrics(group, form)
}

/// Returns the metrics of a task whose figures are not known: containerd takes a message without
/// values for an error.
pub fn none(form: Form) -> cd::Any {
    metrics(v1::GroupStats::default(), form)
}

/// Makes counts of the few that are known. `memory` is what is used and its limit, bytes.
fn simple(stats: &StatsReply, cpu_ns: u64, memory: (u64, u64)) -> v1::GroupStats {
    let (usage, usage_limit) = memory;
    let memory = v1::GroupMemory { usage, usage_limit, anon: usage, ..Default::default() };
    v1::GroupStats {
        tasks: stats.processes.into(),
        tasks_limit: u64::MAX,
        cpu: Some(v1::GroupCpu { usage_usec: cpu_ns / 1000, ..Default::default() }),
        memory: Some(memory),
        ..Default::default()
    }
}

fn metrics(mut group: v1::GroupStats, form: Form) -> cd::Any {
    if let Some(memory) = &mut group.memory {
        memory.usage = memory.usage.min(memory.usage_limit);
    }
    let (type_url, value) = match form {
        Form::Version1 => (VERSION_1, version_1(&group).encode_to_vec()),
        Form::Version2 => (VERSION_2, version_2(group).encode_to_vec()),
    };
    cd::Any { type_url: type_url.to_owned(), value }
}

fn version_1(group: &v1::GroupStats) -> cd::Metrics {
    let cpu = group.cpu.unwrap_or_default();
    let ns = |microseconds: u64| microseconds.saturating_mul(1000);
    let (total, kernel, user) = (ns(cpu.usage_usec), ns(cpu.system_usec), ns(cpu.user_usec));
    let throttling = cd::Throttle {
        periods: cpu.nr_periods,
        throttled_periods: cpu.nr_throttled,
        throttled_time: ns(cpu.throttled_usec),
    };
    let failures = group.memory_events.map_or(0, |events| events.max);
    // 0 stands for no limit.
    let limit = if group.tasks_limit == u64::MAX { 0 } else { group.tasks_limit };
    cd::Metrics {
        pids: Some(cd::PidsStat { current: group.tasks, limit }),
        cpu: Some(cd::CpuStat {
            usage: Some(cd::CpuUsage { total, kernel, user }),
            throttling: Some(throttling),
        }),
        memory: Some(memory_1(&group.memory.unwrap_or_default(), failures)),
    }
}

/// Returns the memory of a group and of those below it, which are the same: version 2 counts both.
fn memory_1(memory: &v1::GroupMemory, failcnt: u64) -> cd::MemoryStat {
    let (limit, usage) = (memory.usage_limit, memory.usage);
    cd::MemoryStat {
        cache: memory.file,
        rss: memory.anon,
        mapped_file: memory.file_mapped,
        dirty: memory.file_dirty,
        writeback: memory.file_writeback,
        pg_fault: memory.pgfault,
        pg_maj_fault: memory.pgmajfault,
        inactive_anon: memory.inactive_anon,
        active_anon: memory.active_anon,
        inactive_file: memory.inactive_file,
        active_file: memory.active_file,
        unevictable: memory.unevictable,
        hierarchical_memory_limit: limit,
        total_cache: memory.file,
        total_rss: memory.anon,
        total_mapped_file: memory.file_mapped,
        total_dirty: memory.file_dirty,
        total_writeback: memory.file_writeback,
        total_pg_fault: memory.pgfault,
        total_pg_maj_fault: memory.pgmajfault,
        total_inactive_anon: memory.inactive_anon,
        total_active_anon: memory.active_anon,
        total_inactive_file: memory.inactive_file,
        total_active_file: memory.active_file,
        total_unevictable: memory.unevictable,
        usage: Some(cd::MemoryEntry { limit, usage, failcnt }),
    }
}

fn version_2(group: v1::GroupStats) -> cd::UnifiedMetrics {
    let v1::GroupStats { tasks, tasks_limit, cpu, memory, memory_events, io } = group;
    let cpu = cpu.unwrap_or_default();
    let v1::GroupMemoryEvents { low, high, max, oom, oom_kill } = memory_events.unwrap_or_default();
    cd::UnifiedMetrics {
        pids: Some(cd::PidsStat { current: tasks, limit: tasks_limit }),
        cpu: Some(cd::UnifiedCpu {
            usage_usec: cpu.usage_usec,
            user_usec: cpu.user_usec,
            system_usec: cpu.system_usec,
            nr_periods: cpu.nr_periods,
            nr_throttled: cpu.nr_throttled,
            throttled_usec: cpu.throttled_usec,
        }),
        memory: Some(memory_2(&memory.unwrap_or_default())),
        io: Some(cd::UnifiedIo { usage: io.into_iter().map(device).collect() }),
        memory_events: Some(cd::UnifiedEvents { low, high, max, oom, oom_kill }),
    }
}

fn memory_2(memory: &v1::GroupMemory) -> cd::UnifiedMemory {
    cd::UnifiedMemory {
        anon: memory.anon,
        file: memory.file,
        kernel_stack: memory.kernel_stack,
        slab: memory.slab,
        sock: memory.sock,
        shmem: memory.shmem,
        file_mapped: memory.file_mapped,
        file_dirty: memory.file_dirty,
        file_writeback: memory.file_writeback,
        inactive_anon: memory.inactive_anon,
        active_anon: memory.active_anon,
        inactive_file: memory.inactive_file,
        active_file: memory.active_file,
        unevictable: memory.unevictable,
        slab_reclaimable: memory.slab_reclaimable,
        slab_unreclaimable: memory.slab_unreclaimable,
        pgfault: memory.pgfault,
        pgmajfault: memory.pgmajfault,
        usage: memory.usage,
        usage_limit: memory.usage_limit,
        swap_usage: memory.swap_usage,
        swap_limit: memory.swap_limit,
    }
}

fn device(io: v1::GroupIo) -> cd::UnifiedIoEntry {
    let v1::GroupIo { major, minor, rbytes, wbytes, rios, wios } = io;
    cd::UnifiedIoEntry { major, minor, rbytes, wbytes, rios, wios }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(any: &cd::Any) -> cd::Metrics {
        assert_eq!(any.type_url, "io.containerd.cgroups.v1.Metrics");
        cd::Metrics::decode(any.value.as_slice()).unwrap()
    }

    fn second(any: &cd::Any) -> cd::UnifiedMetrics {
        assert_eq!(any.type_url, "io.containerd.cgroups.v2.Metrics");
        cd::UnifiedMetrics::decode(any.value.as_slice()).unwrap()
    }

    fn group() -> v1::GroupStats {
        let memory = v1::GroupMemory {
            usage: 4096,
            usage_limit: 8192,
            anon: 1024,
            file: 2048,
            inactive_file: 512,
            pgmajfault: 3,
            ..Default::default()
        };
        let device = v1::GroupIo { major: 259, minor: 1, rbytes: 2, wbytes: 3, rios: 4, wios: 5 };
        v1::GroupStats {
            tasks: 3,
            tasks_limit: u64::MAX,
            cpu: Some(v1::GroupCpu { usage_usec: 7, nr_throttled: 8, ..Default::default() }),
            memory: Some(memory),
            memory_events: Some(v1::GroupMemoryEvents {
                max: 6,
                oom_kill: 1,
                ..Default::default()
            }),
            io: vec![device],
        }
    }

    #[test]
    fn a_containers_group_in_both_forms() {
        let stats = StatsReply { group: Some(group()), ..Default::default() };
        let metrics = first(&of_container(&stats, 9, Form::Version1));
        assert_eq!(metrics.pids, Some(cd::PidsStat { current: 3, limit: 0 }));
        let cpu = metrics.cpu.unwrap();
        assert_eq!(cpu.usage.unwrap().total, 7000);
        assert_eq!(cpu.throttling.unwrap().throttled_periods, 8);
        let memory = metrics.memory.unwrap();
        assert_eq!((memory.total_cache, memory.total_rss), (2048, 1024));
        assert_eq!((memory.total_inactive_file, memory.pg_maj_fault), (512, 3));
        let usage = cd::MemoryEntry { limit: 8192, usage: 4096, failcnt: 6 };
        assert_eq!(memory.usage, Some(usage));
        let metrics = second(&of_container(&stats, 9, Form::Version2));
        assert_eq!(metrics.pids, Some(cd::PidsStat { current: 3, limit: u64::MAX }));
        let cpu = metrics.cpu.unwrap();
        assert_eq!((cpu.usage_usec, cpu.nr_throttled), (7, 8));
        let memory = metrics.memory.unwrap();
        assert_eq!((memory.usage, memory.usage_limit), (4096, 8192));
        assert_eq!((memory.anon, memory.inactive_file, memory.pgmajfault), (1024, 512, 3));
        assert_eq!(metrics.memory_events.unwrap().oom_kill, 1);
        let device =
            cd::UnifiedIoEntry { major: 259, minor: 1, rbytes: 2, wbytes: 3, rios: 4, wios: 5 };
        assert_eq!(metrics.io.unwrap().usage, [device]);
    }

    #[test]
    fn an_earlier_agent_tells_memory_and_processes() {
        let stats = StatsReply {
            memory_total_bytes: 9,
            memory_available_bytes: 4,
            processes: 2,
            ..Default::default()
        };
        let metrics = second(&of_container(&stats, 5000, Form::Version2));
        assert_eq!(metrics.cpu.unwrap().usage_usec, 5);
        assert_eq!(metrics.pids.unwrap().current, 2);
        let memory = metrics.memory.unwrap();
        assert_eq!((memory.usage, memory.usage_limit, memory.anon), (5, 9, 5));
    }

    #[test]
    fn a_pod_has_the_figures_of_its_vmm() {
        let stats = StatsReply {
            vmm_cpu_ns: 2000,
            vmm_resident_bytes: 11,
            guest_cpu_busy_ns: 1000,
            memory_total_bytes: 10,
            group: Some(group()),
            ..Default::default()
        };
        let metrics = second(&of_pod(&stats, Form::Version2));
        assert_eq!(metrics.cpu.unwrap().usage_usec, 2);
        let memory = metrics.memory.unwrap();
        assert_eq!((memory.usage, memory.usage_limit), (11, 11));
    }

    #[test]
    fn a_guest_that_lies_breaks_nothing() {
        let stats =
            StatsReply { memory_total_bytes: 1, memory_available_bytes: 9, ..Default::default() };
        let metrics = first(&of_container(&stats, u64::MAX, Form::Version1));
        assert_eq!(metrics.memory.unwrap().usage.unwrap().usage, 0);
        let memory = v1::GroupMemory { usage: u64::MAX, usage_limit: 5, ..Default::default() };
        let cpu = v1::GroupCpu { usage_usec: u64::MAX, ..Default::default() };
        let group = v1::GroupStats { cpu: Some(cpu), memory: Some(memory), ..Default::default() };
        let stats = StatsReply { group: Some(group), ..Default::default() };
        let metrics = first(&of_container(&stats, 0, Form::Version1));
        assert_eq!(metrics.cpu.unwrap().usage.unwrap().total, u64::MAX);
        assert_eq!(metrics.memory.unwrap().usage.unwrap().usage, 5);
        let metrics = second(&of_container(&stats, 0, Form::Version2));
        assert_eq!(metrics.memory.unwrap().usage, 5);
        // A guest may leave all of it out.
        let group = Some(v1::GroupStats::default());
        let stats = StatsReply { group, ..Default::default() };
        assert!(second(&of_container(&stats, 0, Form::Version2)).memory.is_some());
        assert!(first(&none(Form::Version1)).cpu.unwrap().usage.is_some());
    }
}
