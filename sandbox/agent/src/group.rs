//! The counts of a cgroup, from the files in its directory (kernel documentation, "Control Group
//! v2").

use std::fs::File;
use std::io::Read;
use std::path::Path;

use slipway_agent_protocol::v1::{GroupCpu, GroupIo, GroupMemory, GroupMemoryEvents, GroupStats};

/// The most bytes that are read of a file.
const MOST_BYTES: u64 = 64 << 10;
/// The most devices whose I/O is told.
const MOST_DEVICES: usize = 64;

/// Returns the counts of the cgroup at `directory`. A count whose file is not there is 0.
pub fn stats(directory: &Path) -> GroupStats {
    let read = |file: &str| read(&directory.join(file));
    GroupStats {
        tasks: number(&read("pids.current")),
        tasks_limit: number(&read("pids.max")),
        cpu: Some(cpu(&read("cpu.stat"))),
        memory: Some(GroupMemory {
            usage: number(&read("memory.current")),
            usage_limit: number(&read("memory.max")),
            swap_usage: number(&read("memory.swap.current")),
            swap_limit: number(&read("memory.swap.max")),
            ..memory(&read("memory.stat"))
        }),
        memory_events: Some(memory_events(&read("memory.events"))),
        io: read("io.stat").lines().filter_map(device).take(MOST_DEVICES).collect(),
    }
}

/// Reads a file, or its first [`MOST_BYTES`] bytes. Returns no text if it is not there.
pub fn read(path: &Path) -> String {
    let mut text = Vec::new();
    let Ok(file) = File::open(path) else { return String::new() };
    match file.take(MOST_BYTES).read_to_end(&mut text) {
        Ok(_) => String::from_utf8_lossy(&text).into_owned(),
        Err(_) => String::new(),
    }
}

/// Returns the value of `name` in lines of a name and a value each, or 0 without such a line.
pub fn value(text: &str, name: &str) -> u64 {
    let of = |line: &str| Some(number(line.strip_prefix(name)?.strip_prefix(' ')?));
    text.lines().find_map(of).unwrap_or(0)
}

/// Returns the number that is the text, or the largest one for "max", which stands for no limit.
pub fn number(text: &str) -> u64 {
    match text.trim() {
        "max" => u64::MAX,
        text => text.parse().unwrap_or(0),
    }
}

/// Returns the last node of a list such as "0,2-3". Returns `None` if it has none.
pub fn last_node(list: &str) -> Option<u32> {
    list.trim().rsplit([',', '-']).next()?.parse().ok()
}

fn cpu(text: &str) -> GroupCpu {
    let value = |name| value(text, name);
    GroupCpu {
        usage_usec: value("usage_usec"),
        user_usec: value("user_usec"),
        system_usec: value("system_usec"),
        nr_periods: value("nr_periods"),
        nr_throttled: value("nr_throttled"),
        throttled_usec: value("throttled_usec"),
    }
}

fn memory(text: &str) -> GroupMemory {
    let value = |name| value(text, name);
    GroupMemory {
        anon: value("anon"),
        file: value("file"),
        kernel_stack: value("kernel_stack"),
        slab: value("slab"),
        sock: value("sock"),
        shmem: value("shmem"),
        file_mapped: value("file_mapped"),
        file_dirty: value("file_dirty"),
        file_writeback: value("file_writeback"),
        inactive_anon: value("inactive_anon"),
        active_anon: value("active_anon"),
        inactive_file: value("inactive_file"),
        active_file: value("active_file"),
        unevictable: value("unevictable"),
        slab_reclaimable: value("slab_reclaimable"),
        slab_unreclaimable: value("slab_unreclaimable"),
        pgfault: value("pgfault"),
        pgmajfault: value("pgmajfault"),
        ..GroupMemory::default()
    }
}

fn memory_events(text: &str) -> GroupMemoryEvents {
    let value = |name| value(text, name);
    GroupMemoryEvents {
        low: value("low"),
        high: value("high"),
        max: value("max"),
        oom: value("oom"),
        oom_kill: value("oom_kill"),
    }
}

/// Parses a line of io.stat: a device's numbers, and its counts as NAME=VALUE.
fn device(line: &str) -> Option<GroupIo> {
    let (device, counts) = line.split_once(' ')?;
    let (major, minor) = device.split_once(':')?;
    let count = |name: &str| {
        let pair = |pair: &str| Some(number(pair.strip_prefix(name)?.strip_prefix('=')?));
        counts.split_whitespace().find_map(pair).unwrap_or(0)
    };
    Some(GroupIo {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        rbytes: count("rbytes"),
        wbytes: count("wbytes"),
        rios: count("rios"),
        wios: count("wios"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_node_of_a_list() {
        let nodes = ["", "0", "0-1\n", "0,2-3", "0,15\n", "x"].map(last_node);
        assert_eq!(nodes, [None, Some(0), Some(1), Some(3), Some(15), None]);
    }

    #[test]
    fn the_files_of_a_group() {
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("pids.current", "3\n"),
            ("pids.max", "max\n"),
            ("cpu.stat", "usage_usec 1500\nuser_usec 1000\nnr_throttled 2\n"),
            ("memory.current", "8192\n"),
            ("memory.max", "16384\n"),
            ("memory.stat", "anon 4096\nfile 1\nfile_mapped 2\ninactive_file 7\npgmajfault 9\n"),
            ("memory.events", "low 0\nmax 5\noom 3\noom_kill 2\noom_group_kill 1\n"),
            ("io.stat", "259:1 rbytes=512 wbytes=0 rios=1 wios=4 dbytes=0 dios=0\nbroken\n8:0\n"),
        ] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        let stats = stats(dir.path());
        assert_eq!((stats.tasks, stats.tasks_limit), (3, u64::MAX));
        let cpu = stats.cpu.unwrap();
        assert_eq!((cpu.usage_usec, cpu.user_usec, cpu.nr_throttled), (1500, 1000, 2));
        let memory = stats.memory.unwrap();
        assert_eq!((memory.usage, memory.usage_limit, memory.swap_usage), (8192, 16384, 0));
        assert_eq!((memory.anon, memory.file, memory.file_mapped), (4096, 1, 2));
        assert_eq!((memory.inactive_file, memory.pgmajfault, memory.pgfault), (7, 9, 0));
        let events = stats.memory_events.unwrap();
        assert_eq!((events.max, events.oom, events.oom_kill), (5, 3, 2));
        let device = GroupIo { major: 259, minor: 1, rbytes: 512, wbytes: 0, rios: 1, wios: 4 };
        assert_eq!(stats.io, [device]);
    }

    #[test]
    fn a_file_that_is_missing_or_endless_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(stats(dir.path()).memory, Some(GroupMemory::default()));
        assert!(stats(dir.path()).io.is_empty());
        let line = "8:0 rbytes=1\n";
        std::fs::write(dir.path().join("io.stat"), line.repeat(100_000)).unwrap();
        assert_eq!(stats(dir.path()).io.len(), MOST_DEVICES);
        assert_eq!(read(&dir.path().join("io.stat")).len() as u64, MOST_BYTES);
        assert_eq!(number("18446744073709551616"), 0);
    }
}
