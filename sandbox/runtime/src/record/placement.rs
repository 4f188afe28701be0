//! The part of the host on which a container runs.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use slipway_numa::numbers;

/// One more than the largest number of a CPU of Linux (`CONFIG_NR_CPUS` of 8192) or of a node.
const MOST: usize = 8192;

/// CPUs and memory nodes of the host, as lists such as "0-3,5". Empty: any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Placement {
    /// The CPUs.
    pub cpus: String,
    /// The NUMA nodes of memory.
    pub memory_nodes: String,
}

impl Placement {
    /// Returns the union of placements: any CPU, or any node, if one of them names none.
    pub(crate) fn union<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Self {
        Self {
            cpus: union(all.clone().map(|one| one.cpus.as_str())),
            memory_nodes: union(all.map(|one| one.memory_nodes.as_str())),
        }
    }

    /// Takes over the lists of `change` that are not empty.
    pub(crate) fn change(&mut self, change: &Self) {
        let lists = [&mut self.cpus, &mut self.memory_nodes];
        for (list, new) in lists.into_iter().zip([&change.cpus, &change.memory_nodes]) {
            if !new.is_empty() {
                list.clone_from(new);
            }
        }
    }

    /// Returns the numbers of a list, whose parts may be in any order, or `None` if it is no list.
    pub(crate) fn numbers(list: &str) -> Option<BTreeSet<usize>> {
        let mut is_in = vec![false; MOST];
        for part in list.split(',') {
            numbers(part, MOST)?.into_iter().for_each(|number| is_in[number] = true);
        }
        Some((0..MOST).filter(|number| is_in[*number]).collect())
    }

    /// Returns the list of these numbers.
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

/// Returns the union of lists, or the empty list if one of them is empty.
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
    fn a_union_is_any_if_one_is_any() {
        let union = |all: &[Placement]| Placement::union(all.iter());
        assert_eq!(union(&[placed("4,0-1", "0"), placed("2,7", "1")]), placed("0-2,4,7", "0-1"));
        assert_eq!(union(&[placed("0", "0"), placed("3", "")]), placed("0,3", ""));
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
