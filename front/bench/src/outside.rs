//! The processor time that processes outside of a measurement use while it runs.
//!
//! Times are read from `/proc/PID/stat` (proc(5)) at two moments. The kernel adds the time of a
//! process that has ended to that of the process which waited for it, so the short-lived processes
//! of a compilation count with their parent.
//!
//! A process whose parent has ended is given to a *reaper*: the nearest ancestor that is a child
//! subreaper (`PR_SET_CHILD_SUBREAPER` of prctl(2)), such as a user's service manager, or init. The
//! reapers of the measurement's own processes are ancestors of the measurement. The times of
//! children that these have waited for are not counted: they may be the measurement's.
//!
//! Three kinds of processes are not counted:
//! - the kernel's threads: they may work for the measurement, for example on its packets;
//! - processes that began between the two moments and whose nearest ancestor from before is such a
//!   reaper: the measurement may have left them, as runc leaves its containers;
//! - processes in other PID namespaces, which this process cannot see.

use std::collections::{HashMap, HashSet};

use crate::program::runs_slipway;

/// The flag `PF_KTHREAD` of a process (include/linux/sched.h).
const KERNEL_THREAD: u64 = 0x0020_0000;
/// The process id of init. A process whose parent has ended is given to it if no ancestor is a
/// subreaper.
const INIT: u32 = 1;
/// The greatest number of a process and its ancestors that are visited. Processes are read one
/// after the other, so the parents in a table may form a circle.
const DEPTH: usize = 64;

/// The processes that belong to a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// This process and its descendants.
    Children,
    /// This process, all processes of Slipway's programs, and the descendants of both: the node's
    /// daemon does the measured work.
    Node,
    /// The processes of [`Own::Node`], of a node that works between turns, too: sandboxes idle on
    /// it, or it zeroes memory. So a look before a turn does not tell whether others are busy.
    BusyNode,
}

/// The fields of a process in `/proc/PID/stat` that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    parent: u32,
    /// Processor time in ticks, without that of ended children.
    used: u64,
    /// Processor time of ended children in ticks.
    of_children: u64,
    /// The start of the process in ticks after boot, by which it differs from an earlier process
    /// with the same id.
    began: u64,
    is_kernel: bool,
}

impl Process {
    /// Returns the processor time in ticks, with that of ended children.
    fn total(&self) -> u64 {
        self.used.saturating_add(self.of_children)
    }
}

/// The processes of the machine at one moment, by id.
#[derive(Clone, Debug)]
pub(crate) struct ProcessTable {
    all: HashMap<u32, Process>,
    /// The processes that belong to the measurement.
    own: HashSet<u32>,
    /// The processes that may have been given processes of the measurement, as init or subreapers:
    /// [`INIT`] and all ancestors of the measurement.
    reapers: HashSet<u32>,
}

impl ProcessTable {
    /// Reads the processes. Returns `None` if `/proc` cannot be read.
    pub(crate) fn read(own: Own) -> Option<Self> {
        let entries = std::fs::read_dir("/proc").ok()?;
        let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        // A process that has just ended has no file any more.
        let read = |id: u32| parse(&std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?);
        let this = std::process::id();
        let is_root = |id: u32| id == this || own != Own::Children && runs_slipway(id);
        Some(Self::new(ids.filter_map(read).collect(), is_root))
    }

    /// Makes a table of these processes. Those with `is_root` and all of their descendants belong
    /// to the measurement.
    fn new(all: HashMap<u32, Process>, is_root: impl Fn(u32) -> bool) -> Self {
        let users = all.iter().filter(|(_, one)| !one.is_kernel).map(|(id, _)| *id);
        let roots: HashSet<u32> = users.filter(|id| is_root(*id)).collect();
        let is_own = |id: &u32| line(&all, *id).any(|ancestor| roots.contains(&ancestor));
        let own: HashSet<u32> = all.keys().copied().filter(is_own).collect();
        let ancestors = roots.iter().flat_map(|root| line(&all, *root));
        let reapers = ancestors.filter(|id| !own.contains(id)).chain([INIT]).collect();
        Self { all, own, reapers }
    }

    /// Returns the ticks that processes outside of the measurement have used since `before`.
    pub(crate) fn outside_since(&self, before: &Self) -> u64 {
        let moved = self.moved_since(before);
        let used = |(id, now): (&u32, &Process)| {
            let Some(was) = before.all.get(id).filter(|was| was.began == now.began) else {
                return if self.is_foreign(*id, before) { now.total() } else { 0 };
            };
            if self.reapers.contains(id) {
                return now.used.saturating_sub(was.used);
            }
            let of_children = moved.get(id).copied().unwrap_or(0);
            now.total().saturating_sub(was.total().saturating_add(of_children))
        };
        // A process whose parent has ended still belongs to the measurement.
        self.outside().filter(|(id, _)| !before.own.contains(*id)).map(used).sum()
    }

    /// Returns, by process, the time to subtract from its growth since `before`: the time, at
    /// `before`, of its descendants that have ended since. The kernel has added it to the process
    /// that waited for their end, taken to be their nearest ancestor that still runs.
    fn moved_since(&self, before: &Self) -> HashMap<u32, u64> {
        let mut moved: HashMap<u32, u64> = HashMap::new();
        for (id, ended) in before.outside().filter(|(id, one)| !self.has(**id, one)) {
            let is_left = |at: &u32| before.all.get(at).is_some_and(|one| self.has(*at, one));
            if let Some(ancestor) = line(&before.all, *id).skip(1).find(is_left) {
                *moved.entry(ancestor).or_default() += ended.total();
            }
        }
        moved
    }

    /// Returns whether a process that has begun since `before` is outside of the measurement. It is
    /// if its nearest ancestor that was there at `before` is no reaper of the measurement.
    fn is_foreign(&self, id: u32, before: &Self) -> bool {
        let was = |at: &u32| self.all.get(at).is_some_and(|one| before.has(*at, one));
        line(&self.all, id)
            .skip(1)
            .find(was)
            .is_some_and(|ancestor| !self.reapers.contains(&ancestor))
    }

    /// Returns whether the process with this id is the same as `process`, and no later one.
    fn has(&self, id: u32, process: &Process) -> bool {
        self.all.get(&id).is_some_and(|one| one.began == process.began)
    }

    /// Returns the processes outside of the measurement, without the kernel's threads.
    fn outside(&self) -> impl Iterator<Item = (&u32, &Process)> {
        self.all.iter().filter(|(id, one)| !one.is_kernel && !self.own.contains(*id))
    }
}

/// Returns the ids of a process and of its ancestors, the nearest first, at most [`DEPTH`] in all.
fn line(all: &HashMap<u32, Process>, id: u32) -> impl Iterator<Item = u32> {
    let parent = move |at: &u32| all.get(at).map(|one| one.parent).filter(|parent| *parent != 0);
    std::iter::successors(Some(id), parent).take(DEPTH)
}

/// Parses the text of a file `/proc/PID/stat`. The name in it may hold spaces and brackets.
fn parse(text: &str) -> Option<(u32, Process)> {
    let (head, rest) = text.rsplit_once(") ")?;
    let id: u32 = head.split_once(' ')?.0.parse().ok()?;
    let words: Vec<&str> = rest.split_ascii_whitespace().collect();
    // Fields are numbered from 3, the state, on.
    let field = |number: usize| words.get(number - 3)?.parse::<u64>().ok();
    let process = Process {
        parent: u32::try_from(field(4)?).ok()?,
        used: field(14)?.saturating_add(field(15)?),
        of_children: field(16)?.saturating_add(field(17)?),
        began: field(22)?,
        is_kernel: field(9)? & KERNEL_THREAD != 0,
    };
    Some((id, process))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The measurement's process in the tables below.
    const SELF: u32 = 10;

    /// Returns a table of processes: id, parent, ticks.
    fn table(all: &[(u32, u32, u64)]) -> ProcessTable {
        let process = |(id, parent, used): &(u32, u32, u64)| {
            let (of_children, is_kernel) = (0, *parent == 2);
            (*id, Process { parent: *parent, used: *used, of_children, began: 7, is_kernel })
        };
        ProcessTable::new(all.iter().map(process).collect(), |id| id == SELF)
    }

    #[test]
    fn others_count_and_the_measurement_does_not() {
        // Process 3 is a thread of the kernel, 5 a shell, and 11 a child of the measurement.
        let before = table(&[(1, 0, 50), (3, 2, 10), (5, 1, 100), (SELF, 5, 20), (11, SELF, 30)]);
        let after = table(&[(1, 0, 51), (3, 2, 90), (5, 1, 104), (SELF, 5, 90), (11, SELF, 99)]);
        assert_eq!(after.outside_since(&before), 1 + 4);
        assert_eq!(after.outside_since(&after), 0);
    }

    #[test]
    fn children_that_begin_and_end_count_once() {
        let before = table(&[(1, 0, 0), (5, 1, 100), (6, 5, 1000), (7, 6, 500), (SELF, 1, 0)]);
        // Processes 7 and 6 have ended: the kernel has added their times to 5, with 7 ticks more
        // than before. Process 8 is new.
        let after = table(&[(1, 0, 0), (5, 1, 1607), (8, 5, 20), (SELF, 1, 0)]);
        assert_eq!(after.outside_since(&before), 3 + 4 + 20);
    }

    #[test]
    fn what_the_measurement_leaves_is_its_own() {
        let before = table(&[(1, 0, 0), (5, 1, 0), (SELF, 5, 0), (11, SELF, 10), (12, 11, 10)]);
        // Process 11 has ended, and 12 is given to init; so is 13, whose parent began and ended
        // meanwhile.
        let after = table(&[(1, 0, 0), (5, 1, 0), (SELF, 5, 0), (12, 1, 900), (13, 1, 800)]);
        assert_eq!(after.outside_since(&before), 0);
    }

    #[test]
    fn what_the_measurement_leaves_to_an_ancestor_is_its_own() {
        // Process 4 is a service manager, to which the kernel gives processes whose parent ended.
        let before = table(&[(1, 0, 0), (4, 1, 10), (SELF, 4, 0), (11, SELF, 10)]);
        let mut after = table(&[(1, 0, 0), (4, 1, 13), (SELF, 4, 0), (12, 4, 800), (14, 12, 70)]);
        // Process 11 has ended, and 4 has waited for it.
        after.all.get_mut(&4).unwrap().of_children = 900;
        assert_eq!(after.outside_since(&before), 3);
    }

    #[test]
    fn another_process_with_the_same_id_is_new() {
        let before = table(&[(1, 0, 0), (5, 1, 0), (6, 5, 1000), (SELF, 1, 0)]);
        let mut after = table(&[(1, 0, 0), (5, 1, 1000), (6, 5, 30), (SELF, 1, 0)]);
        after.all.get_mut(&6).unwrap().began = 8;
        assert_eq!(after.outside_since(&before), 30);
    }

    #[test]
    fn files_of_processes_are_parsed() {
        let text = "42 (a (b) c) S 5 42 42 0 -1 4194304 9 8 7 6 100 20 3 4 20 0 1 0 555 9 9\n";
        let (id, process) = parse(text).unwrap();
        assert_eq!((id, process.parent, process.used, process.began), (42, 5, 120, 555));
        assert_eq!((process.of_children, process.total()), (7, 127));
        assert!(!process.is_kernel);
        let (_, thread) = parse(&text.replace("4194304", "2129984")).unwrap();
        assert!(thread.is_kernel);
        assert_eq!(parse("42 (a) S 5"), None);
        assert_eq!(parse(""), None);
        let here = ProcessTable::read(Own::Children).unwrap();
        assert!(here.own.contains(&std::process::id()));
    }
}
