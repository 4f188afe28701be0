//! The CPUs and memory nodes of the host on which a container runs, and lists of them.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use slipway_numa::numbers;

/// One more than the largest number of a CPU on Linux (`CONFIG_NR_CPUS` is at most 8192), or of a
/// NUMA node.
const NUMBERS: usize = 8192;

/// CPUs and memory nodes of the host, as lists such as "0-3,5". An empty list stands for all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Placement {
    /// The CPUs.
    pub cpus: String,
    /// The NUMA nodes of memory.
    pub memory_nodes: String,
}

impl Placement {
    /// Returns the union of placements. Its list of CPUs is empty if one of theirs is, since an
    /// empty list stands for all; the same holds for the list of nodes.
    pub(crate) fn union<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Self {
        Self {
            cpus: union(all.clone().map(|one| one.cpus.as_str())),
            memory_nodes: union(all.map(|one| one.memory_nodes.as_str())),
        }
    }

    /// Replaces lists by those of `change` that are not empty.
    pub(crate) fn change(&mut self, change: &Self) {
        let lists = [&mut self.cpus, &mut self.memory_nodes];
        for (list, new) in lists.into_iter().zip([&change.cpus, &change.memory_nodes]) {
            if !new.is_empty() {
                list.clone_from(new);
            }
        }
    }

    /// Parses a list. Its parts may overlap and be in any order, unlike those of
    /// [`slipway_numa::numbers`]. Returns `None` if `list` has another form, or a number of 8192 or
    /// more.
    pub(crate) fn numbers(list: &str) -> Option<BTreeSet<usize>> {
        let mut is_in = vec![false; NUMBERS];
        for part in list.split(',') {
            numbers(part, NUMBERS)?.into_iter().for_each(|number| is_in[number] = true);
        }
        Some((0..NUMBERS).filter(|number| is_in[*number]).collect())
    }

    /// Formats numbers as a list.
    pub(crate) fn list(numbers: &BTreeSet<usize>) -> String {
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for number in numbers.iter().copied() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => ranges.push((number, number)),
            }
        }
        let part = |(first, last): (usize, usize)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        ranges.into_iter().map(part).collect::<Vec<_>>().join(",")
    }
}

/// Returns the union of lists, or the empty list if one of them is empty or has another form.
fn union<'a>(lists: impl Iterator<Item = &'a str>) -> String {
    let mut all = BTreeSet::new();
    for list in lists {
        match Placement::numbers(list) {
            Some(numbers) if !numbers.is_empty() => all.extend(numbers),
            _ => return String::new(),
        }
    }
    Placement::list(&all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(cpus: &str, memory_nodes: &str) -> Placement {
        Placement { cpus: cpus.to_owned(), memory_nodes: memory_nodes.to_owned() }
    }

    #[test]
    fn a_union_is_all_if_one_is_all() {
        let union = |all: &[Placement]| Placement::union(all.iter());
        assert_eq!(union(&[placed("4,0-1", "0"), placed("2,7", "1")]), placed("0-2,4,7", "0-1"));
        assert_eq!(union(&[placed("0", "0"), placed("3", "")]), placed("0,3", ""));
        assert_eq!(union(&[placed("0", "0"), placed("no list", "8192")]), Placement::default());
        assert_eq!(union(&[]), Placement::default());
    }

    #[test]
    fn a_change_leaves_what_it_does_not_name() {
        let mut placement = placed("0", "0");
        placement.change(&placed("1-2", ""));
        assert_eq!(placement, placed("1-2", "0"));
        placement.change(&placed("", "1"));
        assert_eq!(placement, placed("1-2", "1"));
    }
}
