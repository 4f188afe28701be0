//! The nodes of the host, as sysfs has them.

use std::fmt;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::list::numbers;

/// The number of a NUMA node: 0 to 1023.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NumaNode(u16);

impl NumaNode {
    /// The number of NUMA nodes that Linux can have at most (`CONFIG_NODES_SHIFT` of 10).
    pub const MOST: usize = 1024;

    /// Returns the node with this number, or `None` if Linux has none with it.
    pub fn new(number: u64) -> Option<Self> {
        u16::try_from(number).ok().filter(|number| usize::from(*number) < Self::MOST).map(Self)
    }

    /// Returns the number.
    pub fn number(self) -> u16 {
        self.0
    }
}

impl fmt::Display for NumaNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The NUMA nodes of a host that have memory and CPUs; empty unless there are several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology(Vec<(NumaNode, CpuSet)>);

impl Topology {
    /// Reads the nodes whose memory this process may use. Memory and CPUs that the host is given
    /// later are not noticed.
    ///
    /// Returns an empty topology if there is only one such node, if the kernel knows no NUMA nodes,
    /// or if it has CPUs that [`CpuSet`] cannot name.
    pub fn of_host() -> Self {
        let nodes = Path::new("/sys/devices/system/node");
        Self::read(nodes, || std::fs::read_to_string("/proc/self/status").ok()).unwrap_or_default()
    }

    fn read(folder: &Path, status: impl FnOnce() -> Option<String>) -> Option<Self> {
        let text = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let with_memory = numbers(&text("has_memory")?, NumaNode::MOST)?;
        if with_memory.len() < 2 {
            return None;
        }
        let status = status()?;
        let allowed = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
        let allowed = numbers(allowed, NumaNode::MOST)?;
        let mut nodes = Vec::new();
        for number in with_memory.into_iter().filter(|number| allowed.contains(number)) {
            let cpus = numbers(&text(&format!("node{number}/cpulist"))?, CpuSet::MAX_CPU)?;
            if !cpus.is_empty() {
                nodes.push((NumaNode::new(number as u64)?, set(&cpus)));
            }
        }
        (nodes.len() > 1).then_some(Self(nodes))
    }

    /// Returns a topology of these nodes and their CPUs, for tests.
    pub fn of(nodes: &[(u16, &[usize])]) -> Self {
        Self(nodes.iter().map(|(number, cpus)| (NumaNode(*number), set(cpus))).collect())
    }

    /// Returns whether the host has only one node where memory may have its home.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the nodes in ascending order.
    pub fn nodes(&self) -> impl Iterator<Item = NumaNode> + '_ {
        self.0.iter().map(|(node, _)| *node)
    }

    /// Returns the CPUs of a node, or `None` if the topology has no such node.
    pub fn cpus(&self, node: NumaNode) -> Option<&CpuSet> {
        self.0.iter().find(|(one, _)| *one == node).map(|(_, cpus)| cpus)
    }

    /// Returns the node that all of `cpus` belong to, or `None` if there is none.
    pub fn node_of(&self, cpus: &CpuSet) -> Option<NumaNode> {
        let has_all = |of_node: &CpuSet| common(of_node, cpus) == *cpus;
        let found = self.0.iter().find(|(_, of_node)| has_all(of_node));
        found.filter(|_| cpus.count() > 0).map(|(node, _)| *node)
    }

    /// Returns the CPUs that the calling thread may run on. Returns `None` if the kernel does not
    /// tell, and for an empty topology, which does not ask it.
    pub fn allowed_cpus(&self) -> Option<CpuSet> {
        if self.is_empty() { None } else { sched_getaffinity(None).ok() }
    }

    /// Returns the CPUs of a node that are among `allowed`: none if the topology has no such node.
    pub fn cpus_among(&self, node: NumaNode, allowed: &CpuSet) -> CpuSet {
        self.cpus(node).map_or_else(CpuSet::new, |cpus| common(cpus, allowed))
    }
}

fn set(cpus: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    set
}

fn common(one: &CpuSet, other: &CpuSet) -> CpuSet {
    let both = |cpu: &usize| one.is_set(*cpu) && other.is_set(*cpu);
    set(&(0..CpuSet::MAX_CPU).filter(both).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        folder
    }

    fn status(nodes: &str) -> Option<String> {
        Some(format!("Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{nodes}\n"))
    }

    const FOUR: [(&str, &str); 5] = [
        ("has_memory", "0-3\n"),
        ("node0/cpulist", "0,2\n"),
        ("node1/cpulist", "1,3\n"),
        ("node2/cpulist", "\n"),
        ("node3/cpulist", "4-7\n"),
    ];

    #[test]
    fn nodes_have_memory_that_may_be_used_and_cpus() {
        let folder = host(&FOUR);
        let read = |nodes: &str| Topology::read(folder.path(), || status(nodes));
        let all = [(0, &[0, 2][..]), (1, &[1, 3]), (3, &[4, 5, 6, 7])];
        assert_eq!(read("0-3"), Some(Topology::of(&all)));
        assert_eq!(read("1-3"), Some(Topology::of(&all[1..])));
        assert_eq!(read("0,2"), None, "one node is left");
        assert_eq!(read("none"), None);
    }

    #[test]
    fn a_host_with_one_node_is_not_looked_at_further() {
        for files in [vec![], vec![("has_memory", "0\n")], vec![("has_memory", "\n")]] {
            let (folder, asked) = (host(&files), Cell::new(false));
            let status = || {
                asked.set(true);
                status("0")
            };
            assert_eq!(Topology::read(folder.path(), status), None);
            assert!(!asked.get());
        }
    }

    #[test]
    fn a_node_is_found_by_cpus_that_are_all_its_own() {
        let topology = Topology::of(&[(0, &[0, 2]), (1, &[1, 3])]);
        let node_of = |cpus: &[usize]| topology.node_of(&set(cpus)).map(NumaNode::number);
        for (cpus, node) in [
            (&[0][..], Some(0)),
            (&[0, 2], Some(0)),
            (&[3], Some(1)),
            (&[0, 1], None),
            (&[0, 2, 9], None),
            (&[], None),
        ] {
            assert_eq!(node_of(cpus), node, "{cpus:?}");
        }
        assert_eq!(Topology::default().node_of(&set(&[0])), None);
    }

    #[test]
    fn cpus_of_a_node_are_limited_to_those_allowed() {
        let topology = Topology::of(&[(0, &[0, 2]), (1, &[1, 3])]);
        let among = |node| topology.cpus_among(NumaNode(node), &set(&[1, 2, 3]));
        assert_eq!((among(0), among(1), among(7)), (set(&[2]), set(&[1, 3]), set(&[])));
        assert!(topology.allowed_cpus().is_some_and(|cpus| cpus.count() > 0));
        assert_eq!(Topology::default().allowed_cpus(), None);
    }

    #[test]
    fn numbers_that_linux_has_no_node_for_are_refused() {
        assert_eq!(NumaNode::new(1023).map(NumaNode::number), Some(1023));
        for number in [1024, 1 << 16, u64::MAX] {
            assert_eq!(NumaNode::new(number), None);
        }
    }
}
