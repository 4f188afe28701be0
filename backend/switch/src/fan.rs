//! The second pass: a burst's frames sorted by destination port, as linked lists in arrays (as VALE
//! has them: a list per destination, in the order in which the frames came).

use crate::PortIndex;
use crate::burst::Pick;

const END: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct List {
    first: u32,
    last: u32,
    /// Meaningless if the list is empty.
    len: u32,
}

/// Lists of picks by port.
pub(crate) struct Fan {
    lists: Vec<List>,
    /// The picks, each with the index of the next one of its list.
    nodes: Vec<(Pick, u32)>,
    /// The ports with a list that is not empty, in the order of their first frames.
    ports: Vec<PortIndex>,
}

impl Fan {
    pub fn new() -> Self {
        Self { lists: Vec::new(), nodes: Vec::new(), ports: Vec::new() }
    }

    /// Makes room for ports with numbers below `ports`.
    pub fn grow(&mut self, ports: usize) {
        let empty = List { first: END, last: END, len: 0 };
        self.lists.resize(self.lists.len().max(ports), empty);
    }

    /// Adds a pick to a port's list.
    #[inline]
    pub fn add(&mut self, port: PortIndex, pick: Pick) {
        let node = self.nodes.len() as u32;
        self.nodes.push((pick, END));
        let list = &mut self.lists[usize::from(port)];
        match list.first {
            END => {
                (list.first, list.len) = (node, 0);
                self.ports.push(port);
            }
            _ => self.nodes[list.last as usize].1 = node,
        }
        list.last = node;
        list.len += 1;
    }

    /// Returns the number of ports with a list.
    pub fn len(&self) -> usize {
        self.ports.len()
    }

    /// Returns port `at` of those with a list.
    #[inline]
    pub fn port(&self, at: usize) -> PortIndex {
        self.ports[at]
    }

    /// Returns port `at` of those with a list, which is not gathered yet, and the length of its
    /// list.
    #[inline]
    pub fn next(&self, at: usize) -> (PortIndex, usize) {
        let port = self.ports[at];
        (port, self.lists[usize::from(port)].len as usize)
    }

    /// Fills `picks` with the list of port `at` of those with a list, and returns the port.
    #[inline]
    pub fn gather(&mut self, at: usize, picks: &mut Vec<Pick>) -> PortIndex {
        let port = self.ports[at];
        let list = &mut self.lists[usize::from(port)];
        let mut node = list.first;
        list.first = END;
        picks.clear();
        while node != END {
            let (pick, next) = self.nodes[node as usize];
            picks.push(pick);
            node = next;
        }
        port
    }

    /// Removes all picks; every list must have been gathered.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.ports.clear();
    }
}
