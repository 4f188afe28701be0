//! Namespaces: a disk each, with names.

use std::collections::VecDeque;

use slipway_block::{Completion, Disk, DiskError, Geometry, Request};

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
    /// Requests that the disk carries out with no other beside them.
    pub alone: Alone,
    /// Requests that the disk has.
    in_flight: usize,
}

/// Fused pairs (section 6.2): each has the disk for itself, from its compare to the end of its
/// write. Other requests wait meanwhile; between two pairs they have a turn.
#[derive(Default)]
pub(crate) struct Alone {
    waiting: VecDeque<Request>,
    chosen: Vec<Request>,
    running: bool,
    others: bool,
}

impl Alone {
    /// The first request of a pair. It starts when the disk has nothing else.
    pub fn start(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// The second request of the pair that runs.
    pub fn then(&mut self, request: Request) {
        debug_assert!(self.running);
        self.chosen.push(request);
    }

    /// The pair that ran has ended.
    pub fn end(&mut self) {
        (self.running, self.others) = (false, true);
    }

    fn is_idle(&self) -> bool {
        !self.running && self.waiting.is_empty()
    }

    /// What the disk gets next, when it has `in_flight` requests.
    fn choose<'a>(
        &'a mut self,
        others: &'a mut Vec<Request>,
        in_flight: usize,
    ) -> &'a mut Vec<Request> {
        if !self.running && std::mem::take(&mut self.others) {
            return others;
        }
        if !self.running && in_flight == 0 {
            self.chosen.extend(self.waiting.pop_front());
            self.running = true;
        }
        &mut self.chosen
    }
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
            alone: Alone::default(),
            in_flight: 0,
        }
    }

    /// Gives up request `tag`, if that can still be done: it ends with [`DiskError::Cancelled`].
    /// Appends that, or whatever else has ended.
    pub fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        if let Some(at) = self.requests.iter().position(|request| request.tag == tag) {
            let Request { tag, spans, .. } = self.requests.remove(at);
            completions.push(Completion { tag, result: Err(DiskError::Cancelled), spans });
            return true;
        }
        let before = completions.len();
        let cancelled = self.disk.cancel(tag, completions);
        self.in_flight = self.in_flight.saturating_sub(completions.len() - before);
        cancelled
    }

    /// Hands waiting requests to the disk and appends what has ended.
    pub fn drive(&mut self, completions: &mut Vec<Completion>) {
        let before = completions.len();
        let requests = match self.alone.is_idle() {
            true => &mut self.requests,
            false => self.alone.choose(&mut self.requests, self.in_flight),
        };
        self.in_flight += requests.len();
        if !requests.is_empty() {
            self.disk.submit(requests, completions);
            // The contract drains the vector; a disk that leaves a request behind would make us
            // submit it twice.
            requests.clear();
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
