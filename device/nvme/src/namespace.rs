//! Namespaces: a disk each, with names.

use slipway_block::{Completion, Disk, Geometry, Request};

/// A namespace as a host configures it.
pub struct Namespace {
    /// NSID, 1 to 1,024.
    pub nsid: u32,
    /// What it is connected to. A read-only geometry makes a write protected namespace.
    pub disk: Box<dyn Disk>,
    /// NGUID, big-endian; zeros for none (section 5.15.2.1).
    pub nguid: [u8; 16],
    /// EUI-64, big-endian; zeros for none.
    pub eui64: [u8; 8],
    /// UUID; zeros for none (section 5.15.2.4).
    pub uuid: [u8; 16],
}

impl Namespace {
    /// A namespace with `uuid` as its UUID and NGUID. Linux names a disk by these.
    pub fn new(nsid: u32, disk: Box<dyn Disk>, uuid: [u8; 16]) -> Self {
        Self { nsid, disk, nguid: uuid, eui64: [0; 8], uuid }
    }
}

/// A namespace in use.
pub(crate) struct Attached {
    pub nsid: u32,
    pub geometry: Geometry,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    pub uuid: [u8; 16],
    /// The Error Recovery feature, TLER in 100 ms (section 5.21.1.5).
    pub error_recovery: u16,
    pub disk: Box<dyn Disk>,
    /// Requests for the next `submit`.
    pub requests: Vec<Request>,
    /// Requests that the disk has.
    in_flight: usize,
}

impl Attached {
    pub fn new(namespace: Namespace) -> Self {
        Self {
            nsid: namespace.nsid,
            geometry: namespace.disk.geometry(),
            nguid: namespace.nguid,
            eui64: namespace.eui64,
            uuid: namespace.uuid,
            error_recovery: 0,
            disk: namespace.disk,
            requests: Vec::new(),
            in_flight: 0,
        }
    }

    /// Hands waiting requests to the disk and appends what has ended.
    pub fn drive(&mut self, completions: &mut Vec<Completion>) {
        let before = completions.len();
        self.in_flight += self.requests.len();
        if !self.requests.is_empty() {
            self.disk.submit(&mut self.requests, completions);
            // The contract drains the vector; a disk that leaves a request behind would make us
            // submit it twice.
            self.requests.clear();
        }
        if self.in_flight > completions.len() - before {
            self.disk.poll(completions);
        }
        self.in_flight = self.in_flight.saturating_sub(completions.len() - before);
    }
}

/// All namespaces, ascending by NSID.
pub(crate) struct Namespaces(Vec<Attached>);

impl Namespaces {
    pub fn new(namespaces: Vec<Namespace>) -> Self {
        let mut all: Vec<Attached> = namespaces.into_iter().map(Attached::new).collect();
        all.sort_by_key(|namespace| namespace.nsid);
        Self(all)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Attached> {
        self.0.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Attached> {
        self.0.iter_mut()
    }

    pub fn get(&self, nsid: u32) -> Option<&Attached> {
        let at = self.position(nsid)?;
        self.0.get(at)
    }

    pub fn get_mut(&mut self, nsid: u32) -> Option<&mut Attached> {
        let at = self.position(nsid)?;
        self.0.get_mut(at)
    }

    /// NN: the highest NSID that there can be (section 5.15.2.2); at least 1, as drivers take 0
    /// for a broken controller.
    pub fn highest(&self) -> u32 {
        self.0.last().map_or(1, |namespace| namespace.nsid)
    }

    fn position(&self, nsid: u32) -> Option<usize> {
        // Nearly always the namespaces are 1, 2, 3, …
        let guess = nsid.wrapping_sub(1) as usize;
        if self.0.get(guess).is_some_and(|namespace| namespace.nsid == nsid) {
            return Some(guess);
        }
        self.0.binary_search_by_key(&nsid, |namespace| namespace.nsid).ok()
    }
}
