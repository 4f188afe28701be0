//! The second pass: a burst's frames sorted by the ports that they go to, as linked lists in arrays
//! (VALE's way: a list per destination, in the order in which the frames came).

use crate::PortIndex;
use crate::burst::Pick;

const END: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct List {
    first: u32,
    last: u32,
    /// Meaningless when it is empty.
    len: u32,
}

/// Lists of picks by port.
pub(crate) struct Fan {
    lists: Vec<List>,
    /// A pick and the next one of its list.
    nodes: Vec<(Pick, u32)>,
    /// Ports whose lists are not empty, in the order of their first frames.
    ports: Vec<PortIndex>,
}

impl Fan {
    pub fn new() -> Self {
        Self { lists: Vec::new(), nodes: Vec::new(), ports: Vec::new() }
    }

    /// Makes room for ports up to number `ports`.
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

    /// How many ports have any.
    pub fn len(&self) -> usize {
        self.ports.len()
    }

    /// Number `at` of the ports that have any.
    #[inline]
    pub fn port(&self, at: usize) -> PortIndex {
        self.ports[at]
    }

    /// Number `at` of the ports that have any, before it is gathered, and how long its list is.
    #[inline]
    pub fn next(&self, at: usize) -> (PortIndex, usize) {
        let port = self.ports[at];
        (port, self.lists[usize::from(port)].len as usize)
    }

    /// Fills `picks` with a port's list, and gives the port: number `at` of those that have any.
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

    /// Forgets the nodes; every list has been gathered.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.ports.clear();
    }
}
