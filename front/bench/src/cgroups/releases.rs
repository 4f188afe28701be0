//! The release of groups that were removed, on which the kernel works after rmdir(2) has returned.
//!
//! The work on each group takes the lock under which groups are made and processes are moved
//! (`css_killed_work_fn`, `css_release_work_fn` in the kernel's *cgroup.c*), so that of one turn
//! delays the requests of the next one.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::Path;
use std::time::Duration;

use slipway_cgroup::ROOT;

/// The kernel's table of controllers (cgroups(7)).
const TABLE: &str = "/proc/cgroups";
/// The counts of version 2, alone or beside version 1.
const STATS: [&str; 2] = ["cgroup.stat", "unified/cgroup.stat"];
/// The time between two looks at the number of groups.
const BETWEEN: Duration = Duration::from_millis(20);
/// The number of looks without a lower number after which the rest stays: memory that is charged to
/// a group keeps the group alive. They take half a second, many grace periods of RCU.
const STILL: u32 = 25;
/// The most looks: 10 s.
const MOST: u32 = 500;

/// The number of groups that the kernel had before the first turn.
#[derive(Debug)]
pub(super) struct Releases {
    before: u64,
}

impl Releases {
    /// Reads the number of groups that there are now.
    pub fn begin() -> Self {
        Self { before: read() }
    }

    /// Waits until there are no more groups than before the first turn, or until their number no
    /// longer falls. Returns the reason why figures are void if it still falls after 10 s.
    pub fn wait(&self) -> Option<String> {
        self.wait_by(read, || std::thread::sleep(BETWEEN))
    }

    fn wait_by(&self, mut read: impl FnMut() -> u64, mut pause: impl FnMut()) -> Option<String> {
        let (mut least, mut still) = (u64::MAX, 0);
        for _ in 0..MOST {
            let now = read();
            still = if now < least { 0 } else { still + 1 };
            least = least.min(now);
            if least <= self.before || still >= STILL {
                return None;
            }
            pause();
        }
        let rest = least - self.before;
        Some(format!("the kernel still releases {rest} control groups of earlier turns"))
    }
}

/// Returns the number of groups in all hierarchies of version 1, and of removed groups in that of
/// version 2.
fn read() -> u64 {
    let stat = STATS.iter().find_map(|file| read_to_string(Path::new(ROOT).join(file)).ok());
    count(&read_to_string(TABLE).unwrap_or_default(), &stat.unwrap_or_default())
}

/// Counts groups by the texts of /proc/cgroups and of version 2's `cgroup.stat`. A removed group of
/// version 1 is in the former until it is released. An unknown number is 0.
fn count(table: &str, stat: &str) -> u64 {
    let number = |text: Option<&str>| text.and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut hierarchies = BTreeMap::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        // Name, number of the hierarchy, number of groups; a hierarchy has a line for each of its
        // controllers.
        let mut fields = line.split_ascii_whitespace().skip(1);
        if let Some(hierarchy) = fields.next().filter(|hierarchy| *hierarchy != "0") {
            hierarchies.insert(hierarchy, number(fields.next()));
        }
    }
    let dying = stat.lines().find_map(|line| line.strip_prefix("nr_dying_descendants "));
    hierarchies.values().sum::<u64>() + number(dying)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "#subsys_name\thierarchy\tnum_cgroups\tenabled\n\
                         cpu\t2\t5\t1\ncpuacct\t2\t5\t1\nmemory\t4\t61\t1\nhugetlb\t0\t9\t1\n";

    /// Returns the answer after the numbers `left`, the last of which stays, and how many looks
    /// there were.
    fn wait(before: u64, left: impl Fn(u32) -> u64) -> (Option<String>, u32) {
        let mut looks = 0;
        let read = || {
            looks += 1;
            left(looks)
        };
        let answer = Releases { before }.wait_by(read, || {});
        (answer, looks)
    }

    #[test]
    fn groups_are_counted_once_in_each_hierarchy() {
        assert_eq!(count(TABLE, ""), 66);
        assert_eq!(count(TABLE, "nr_descendants 3\nnr_dying_descendants 4\n"), 70);
        assert_eq!(count("", "nr_dying_descendants x\n"), 0);
        assert_eq!(count("cpu\ncpu 1\ncpu 1 -2\n", "nr_dying_descendants"), 0);
    }

    #[test]
    fn a_turn_begins_once_the_groups_are_released() {
        assert_eq!(wait(7, |_| 7), (None, 1));
        assert_eq!(wait(7, |look| 17 - u64::from(look)), (None, 10));
        // Fewer than before, since others have removed theirs.
        assert_eq!(wait(7, |_| 3), (None, 1));
    }

    #[test]
    fn groups_that_stay_hold_up_no_turn() {
        assert_eq!(wait(7, |_| 9), (None, STILL + 1));
        assert_eq!(wait(7, |look| u64::from(look.max(100) + 9)), (None, STILL + 1));
        let steps = |look: u32| 1000 - u64::from(look.min(60) / 20);
        assert_eq!(wait(7, steps), (None, 60 + STILL), "a pause between two steps is no end");
    }

    #[test]
    fn a_release_that_does_not_end_makes_the_turn_void() {
        let (answer, looks) = wait(7, |look| 10_007 - u64::from(look));
        let reason = "the kernel still releases 9500 control groups of earlier turns";
        assert_eq!((answer.as_deref(), looks), (Some(reason), MOST));
    }
}
