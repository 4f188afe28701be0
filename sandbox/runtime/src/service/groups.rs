//! The counts of a container's control group, as its guest says.

use slipway_agent_protocol::v1 as agent_v1;

use crate::v1;

/// The most devices whose I/O is passed on.
const MOST_DEVICES: usize = 64;

/// Passes on what a guest says of a container's control group.
pub(super) fn group(group: agent_v1::GroupStats) -> v1::GroupStats {
    let agent_v1::GroupStats { tasks, tasks_limit, cpu, memory, memory_events, io } = group;
    v1::GroupStats {
        tasks,
        tasks_limit,
        cpu: cpu.map(to_cpu),
        memory: memory.map(to_memory),
        memory_events: memory_events.map(to_events),
        io: io.into_iter().take(MOST_DEVICES).map(to_io).collect(),
    }
}

fn to_cpu(cpu: agent_v1::GroupCpu) -> v1::GroupCpu {
    v1::GroupCpu {
        usage_usec: cpu.usage_usec,
        user_usec: cpu.user_usec,
        system_usec: cpu.system_usec,
        nr_periods: cpu.nr_periods,
        nr_throttled: cpu.nr_throttled,
        throttled_usec: cpu.throttled_usec,
    }
}

fn to_memory(memory: agent_v1::GroupMemory) -> v1::GroupMemory {
    v1::GroupMemory {
        usage: memory.usage,
        usage_limit: memory.usage_limit,
        swap_usage: memory.swap_usage,
        swap_limit: memory.swap_limit,
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
    }
}

fn to_events(events: agent_v1::GroupMemoryEvents) -> v1::GroupMemoryEvents {
    let agent_v1::GroupMemoryEvents { low, high, max, oom, oom_kill } = events;
    v1::GroupMemoryEvents { low, high, max, oom, oom_kill }
}

fn to_io(io: agent_v1::GroupIo) -> v1::GroupIo {
    let agent_v1::GroupIo { major, minor, rbytes, wbytes, rios, wios } = io;
    v1::GroupIo { major, minor, rbytes, wbytes, rios, wios }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_counts_are_passed_on_for_a_bounded_number_of_devices() {
        let device = agent_v1::GroupIo { major: 259, rbytes: u64::MAX, ..Default::default() };
        let memory = agent_v1::GroupMemory { usage: 1, pgmajfault: 22, ..Default::default() };
        let told = agent_v1::GroupStats {
            tasks: u64::MAX,
            memory: Some(memory),
            io: vec![device; 1000],
            ..Default::default()
        };
        let group = group(told);
        let memory = group.memory.unwrap();
        assert_eq!((group.tasks, memory.usage, memory.pgmajfault), (u64::MAX, 1, 22));
        assert_eq!((group.cpu, group.io.len()), (None, MOST_DEVICES));
        assert_eq!((group.io[0].major, group.io[0].rbytes), (259, u64::MAX));
    }
}
