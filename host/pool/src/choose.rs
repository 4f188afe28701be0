//! The choice of memory for a sandbox: which of the free ones, or the NUMA node of new memory.
//!
//! A request that names a node gets recycled memory of that node, else new memory there. Any other
//! request gets recycled memory wherever it is, the one that was zeroed furthest, and of equal ones
//! the one on the node where sandboxes have least; else new memory on the node where the pool has
//! least. On a host with one node all memory is equal, and new memory has no home.

use std::cmp::Reverse;

use slipway_numa::NumaNode;

/// Free memory that a request may have by its size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// Its place in the list of free memory.
    pub(crate) at: usize,
    /// The NUMA node of its pages, if there is one.
    pub(crate) home: Option<NumaNode>,
    /// The number of granules that were looked at, and are zero.
    pub(crate) zeroed: usize,
}

/// The memory of a pool that has its home on one NUMA node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeBytes {
    /// The node.
    pub node: NumaNode,
    /// Bytes that nobody uses.
    pub free: u64,
    /// Bytes that sandboxes use.
    pub lent: u64,
}

/// The memory that a request gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The free memory at this place.
    Recycled(usize),
    /// New memory on this node, or on any.
    New(Option<NumaNode>),
}

/// Chooses memory for a request that names `near`, one of the nodes of `loads`, or none. `loads` is
/// empty on a host with one node.
pub(crate) fn choose(
    candidates: impl Iterator<Item = Candidate>,
    near: Option<NumaNode>,
    loads: &[NodeBytes],
) -> Choice {
    let fits = |one: &Candidate| near.is_none() || one.home == near;
    let lent = |home: Option<NumaNode>| {
        loads.iter().find(|load| Some(load.node) == home).map_or(0, |load| load.lent)
    };
    let found = candidates.filter(fits).max_by_key(|one| (one.zeroed, Reverse(lent(one.home))));
    let least = || loads.iter().min_by_key(|load| load.lent + load.free).map(|load| load.node);
    match found {
        Some(one) => Choice::Recycled(one.at),
        None => Choice::New(near.or_else(least)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(number: u64) -> NumaNode {
        NumaNode::new(number).unwrap()
    }

    /// Free memory by its home, if there is one, and the number of its granules that are zero.
    fn free(all: &[(Option<u64>, usize)]) -> impl Iterator<Item = Candidate> {
        all.iter().enumerate().map(|(at, &(home, zeroed))| Candidate {
            at,
            home: home.map(node),
            zeroed,
        })
    }

    /// Two nodes, with free and with lent bytes each.
    fn loads([zero, one]: [(u64, u64); 2]) -> [NodeBytes; 2] {
        let load = |number, (free, lent)| NodeBytes { node: node(number), free, lent };
        [load(0, zero), load(1, one)]
    }

    #[test]
    fn a_named_node_is_kept_to() {
        let all = [(Some(0), 9), (Some(1), 1), (Some(1), 3), (None, 9)];
        let loads = loads([(9, 0), (4, 99)]);
        assert_eq!(choose(free(&all), Some(node(1)), &loads), Choice::Recycled(2));
        assert_eq!(choose(free(&all), Some(node(0)), &loads), Choice::Recycled(0));
        let others = choose(free(&all[..1]), Some(node(1)), &loads);
        assert_eq!(others, Choice::New(Some(node(1))));
    }

    #[test]
    fn without_a_node_the_memory_that_was_zeroed_furthest_is_taken() {
        let loads = loads([(4, 0), (9, 99)]);
        let all = [(Some(0), 2), (Some(1), 5), (None, 1)];
        assert_eq!(choose(free(&all), None, &loads), Choice::Recycled(1));
    }

    #[test]
    fn of_equal_memory_that_on_the_node_with_least_lent_is_taken() {
        let all = [(Some(0), 5), (Some(1), 5)];
        assert_eq!(choose(free(&all), None, &loads([(9, 1), (5, 2)])), Choice::Recycled(0));
        assert_eq!(choose(free(&all), None, &loads([(5, 2), (9, 1)])), Choice::Recycled(1));
    }

    #[test]
    fn new_memory_goes_to_the_node_with_least() {
        for (bytes, number) in [
            ([(0, 0), (0, 0)], 0),
            ([(1, 0), (0, 0)], 1),
            ([(0, 2), (1, 0)], 1),
            ([(0, 2), (1, 2)], 0),
        ] {
            let choice = choose(free(&[]), None, &loads(bytes));
            assert_eq!(choice, Choice::New(Some(node(number))), "{bytes:?}");
        }
    }

    #[test]
    fn a_host_with_one_node_has_the_last_of_those_that_were_zeroed_furthest() {
        let all = [(None, 5), (None, 7), (None, 7), (None, 1)];
        assert_eq!(choose(free(&all), None, &[]), Choice::Recycled(2));
        assert_eq!(choose(free(&[]), None, &[]), Choice::New(None));
    }
}
