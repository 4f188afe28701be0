//! Namespaces: each has a disk and names.
//!
//! - [`Namespace`] is a host's description of one; [`Attached`] is one in use, with the requests
//!   that its disk has and those that wait.
//! - [`Alone`] has the disk carry out fused pairs, each with no other request beside it.
//! - [`Namespaces`] is the table of an engine. A namespace that is detached stays in it until its
//!   disk has no request left.

use std::collections::VecDeque;

use slipway_block::{Completion, Disk, DiskError, Geometry, Operation, Request, Transferred};
use slipway_ram::Span;

use crate::turn::Feeder;

/// The reason why a namespace was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// The namespace ID is in use.
    #[error("namespace ID {0} is taken")]
    Taken(u32),
    /// The namespace ID is 0 or above 1,024.
    #[error("namespace ID {0} is not within 1 to 1024")]
    NamespaceId(u32),
    /// The controller has no such namespace, or no longer has it.
    #[error("the controller has no namespace {0}")]
    Unknown(u32),
    /// The disk's shape is impossible, or its block size has changed.
    #[error("the disk of namespace {0} has an impossible shape")]
    Geometry(u32),
    /// The namespace has fewer disks than there are lanes besides its first disk.
    #[error("namespace {0} needs its disk once more for each lane")]
    Lanes(u32),
}

/// The callback that is called when a change is complete. It is dropped without a call if the
/// controller is dropped first.
pub type Done = Box<dyn FnOnce(Result<(), ChangeError>) + Send>;

/// A namespace as a host configures it.
pub struct Namespace {
    /// NSID, 1 to 1,024.
    pub nsid: u32,
    /// The disk. A read-only geometry makes a write-protected namespace.
    pub disk: Box<dyn Disk>,
    /// NGUID, big-endian; zeros for none (section 5.15.2.1).
    pub nguid: [u8; 16],
    /// EUI-64, big-endian; zeros for none.
    pub eui64: [u8; 8],
    /// UUID; zeros for none (section 5.15.2.4).
    pub uuid: [u8; 16],
    /// `true` if other controllers may have the same disk, under the same names (NMIC bit 0).
    pub shared: bool,
    /// Further handles of the same disk, one for each lane of the controller
    /// ([`Limits::lanes`](crate::Limits::lanes) less one): lanes share a medium, but no `Disk`.
    pub lanes: Vec<Box<dyn Disk>>,
}

impl Namespace {
    /// Makes a namespace of this controller alone, with `uuid` as its UUID and NGUID. Linux names a
    /// disk by these.
    pub fn new(nsid: u32, disk: Box<dyn Disk>, uuid: [u8; 16]) -> Self {
        Self { nsid, disk, nguid: uuid, eui64: [0; 8], uuid, shared: false, lanes: Vec::new() }
    }

    /// Makes the namespace of the next lane, with the next of the disks for lanes. Returns `None`
    /// if no disk is left.
    pub(crate) fn of_lane(&mut self) -> Option<Self> {
        let Self { nsid, nguid, eui64, uuid, shared, .. } = *self;
        let disk = next(&mut self.lanes)?;
        Some(Self { nsid, disk, nguid, eui64, uuid, shared, lanes: Vec::new() })
    }

    /// Returns whether the disk's shape can be presented: 512 to 4,096 bytes per block, and at
    /// least one block.
    pub(crate) fn has_shape(&self) -> bool {
        is_shape(&self.disk.geometry())
    }
}

fn next(disks: &mut Vec<Box<dyn Disk>>) -> Option<Box<dyn Disk>> {
    if disks.is_empty() { None } else { Some(disks.remove(0)) }
}

fn is_shape(geometry: &Geometry) -> bool {
    let block = geometry.block_size;
    block.is_power_of_two() && (512..=4096).contains(&block) && geometry.blocks > 0
}

/// A namespace in use.
pub(crate) struct Attached {
    pub nsid: u32,
    pub geometry: Geometry,
    pub nguid: [u8; 16],
    pub eui64: [u8; 8],
    pub uuid: [u8; 16],
    pub shared: bool,
    /// The Error Recovery feature, TLER in 100 ms (section 5.21.1.5).
    pub error_recovery: u16,
    pub disk: Box<dyn Disk>,
    /// Disks for lanes that have not been made yet.
    pub lanes: Vec<Box<dyn Disk>>,
    /// Requests for the next `submit`.
    pub requests: Vec<Request>,
    /// Requests that the disk carries out with no other request beside them.
    pub alone: Alone,
    feeder: Feeder,
    /// The number of requests that the disk has, including one that it has in part.
    in_flight: usize,
    /// `true` if the disk has requests that wait for the next turn.
    behind: bool,
    /// Callbacks of those who want the disk's new size taken over. It is taken over when nothing is
    /// in flight.
    refreshing: Vec<Done>,
}

/// Fused pairs (section 6.2): each has the disk for itself, from its compare to the end of its
/// write. Other requests wait meanwhile; between two pairs they have a turn.
#[derive(Default)]
pub(crate) struct Alone {
    /// The first requests of pairs that have not begun.
    waiting: VecDeque<Request>,
    /// Requests of the running pair for the next `submit`.
    chosen: Vec<Request>,
    turn: PairTurn,
}

/// The requests that the disk gets while pairs wait or one runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PairTurn {
    /// The next pair begins once nothing is in flight.
    #[default]
    Next,
    /// A pair runs.
    Running,
    /// A pair has just ended: other requests have a turn before the next one.
    Others,
}

impl Alone {
    /// Queues the first request of a pair. It starts when the disk has no other request.
    pub fn start(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// Queues the second request of the running pair.
    pub fn then(&mut self, request: Request) {
        debug_assert_eq!(self.turn, PairTurn::Running);
        self.chosen.push(request);
    }

    /// Ends the running pair.
    pub fn end(&mut self) {
        self.turn = PairTurn::Others;
    }

    /// Returns whether no pair runs or waits.
    fn is_idle(&self) -> bool {
        self.turn != PairTurn::Running && self.waiting.is_empty()
    }

    /// Returns the requests that the disk, which has `in_flight` requests, gets next.
    fn choose<'a>(
        &'a mut self,
        others: &'a mut Vec<Request>,
        in_flight: usize,
    ) -> &'a mut Vec<Request> {
        match self.turn {
            PairTurn::Others => {
                self.turn = PairTurn::Next;
                return others;
            }
            PairTurn::Next if in_flight == 0 => {
                self.chosen.extend(self.waiting.pop_front());
                self.turn = PairTurn::Running;
            }
            PairTurn::Next | PairTurn::Running => {}
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
            shared: namespace.shared,
            error_recovery: 0,
            feeder: Feeder::new(&*namespace.disk),
            disk: namespace.disk,
            lanes: namespace.lanes,
            requests: Vec::new(),
            alone: Alone::default(),
            in_flight: 0,
            behind: false,
            refreshing: Vec::new(),
        }
    }

    /// Makes the namespace of the next lane, with the next of the disks for lanes. Returns `None`
    /// if no disk is left.
    pub fn of_lane(&mut self) -> Option<Namespace> {
        let Self { nsid, nguid, eui64, uuid, shared, .. } = *self;
        let disk = next(&mut self.lanes)?;
        Some(Namespace { nsid, disk, nguid, eui64, uuid, shared, lanes: Vec::new() })
    }

    /// Cancels request `tag`, if that is still possible: it ends with [`DiskError::Cancelled`].
    /// Appends the completions of it and of whatever else has ended. Returns whether the request
    /// was cancelled.
    pub fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        if let Some(at) = self.requests.iter().position(|request| request.tag == tag) {
            let Request { tag, spans, .. } = self.requests.remove(at);
            completions.push(Completion { tag, result: Err(DiskError::Cancelled), spans });
            return true;
        }
        let before = completions.len();
        let cancelled = self.feeder.cancel(tag, completions) || self.disk.cancel(tag, completions);
        self.feeder.take_piece(before, completions);
        self.in_flight = self.in_flight.saturating_sub(completions.len() - before);
        cancelled
    }

    /// Carries out a read or write at once, and returns its result; see [`Disk::transfer`]. Returns
    /// `None` if the disk does not do that, if the bytes `left` of the turn do not suffice, if a
    /// fused pair or a new size needs the disk for itself, or if the transfer would overtake a
    /// waiting request.
    #[inline]
    pub fn transfer(
        &mut self,
        operation: Operation,
        at: (u64, u32),
        spans: &[Span],
        left: &mut u64,
    ) -> Transferred {
        let bytes = u64::from(at.1) * u64::from(self.geometry.block_size);
        if !self.alone.is_idle() || !self.refreshing.is_empty() || self.has_waiting() {
            return None;
        }
        let price = self.feeder.price(operation, bytes, *left)?;
        let result = self.disk.transfer(operation, at, spans)?;
        *left = left.saturating_sub(price);
        Some(result)
    }

    /// Lets the disk work: hands waiting requests to it, as far as the bytes `left` of the turn
    /// suffice, and appends the completions of ended requests.
    pub fn drive(&mut self, left: &mut u64, completions: &mut Vec<Completion>) {
        if self.is_done() {
            return;
        }
        if !self.feeder.bounds_reads {
            return self.feed(left, completions);
        }
        self.disk.allow(*left);
        self.feed(left, completions);
        let spent = self.disk.spent();
        *left = left.saturating_sub(spent.bytes);
        self.behind = spent.behind;
    }

    /// Hands waiting requests over and polls the disk. While a new size is to be taken over,
    /// requests wait: no request that was checked against the old size ends after the change.
    fn feed(&mut self, left: &mut u64, completions: &mut Vec<Completion>) {
        let before = completions.len();
        if self.feeder.is_splitting() {
            self.go_on(left, completions);
        }
        if !self.feeder.is_splitting() {
            let requests = match self.alone.is_idle() {
                // While a new size is to be taken over, nothing is submitted and no pair is chosen.
                _ if !self.refreshing.is_empty() && self.in_flight > completions.len() - before => {
                    &mut Vec::new()
                }
                true => &mut self.requests,
                false => self.alone.choose(&mut self.requests, self.in_flight),
            };
            if !requests.is_empty() {
                let disk = (&mut *self.disk as &mut dyn Disk, self.geometry.block_size);
                self.in_flight += self.feeder.feed(disk, requests, left, completions);
            }
        }
        if self.in_flight > completions.len() - before {
            match self.feeder.is_splitting() {
                true => self.go_on(left, completions),
                false => self.disk.poll(completions),
            }
        }
        self.in_flight = self.in_flight.saturating_sub(completions.len() - before);
    }

    /// Continues the request that the disk has in part.
    #[cold]
    fn go_on(&mut self, left: &mut u64, completions: &mut Vec<Completion>) {
        let before = completions.len();
        self.disk.poll(completions);
        self.feeder.take_piece(before, completions);
        self.feeder.go_on(
            (&mut *self.disk as &mut dyn Disk, self.geometry.block_size),
            left,
            completions,
        );
    }

    /// Returns whether requests wait for the next turn.
    pub fn has_waiting(&self) -> bool {
        self.feeder.is_splitting() || self.behind || !self.requests.is_empty()
    }

    /// Returns whether no request is with the disk or on its way there.
    fn is_done(&self) -> bool {
        self.in_flight == 0 && self.requests.is_empty() && self.alone.is_idle()
    }

    /// Takes the new size over if one is wanted and nothing is in flight. Returns whether the size
    /// changed.
    fn resize(&mut self) -> bool {
        if self.refreshing.is_empty() || self.in_flight > 0 {
            return false;
        }
        let geometry = self.disk.refresh();
        let outcome = match is_shape(&geometry) && geometry.block_size == self.geometry.block_size {
            true => Ok(()),
            false => Err(ChangeError::Geometry(self.nsid)),
        };
        let changed = outcome.is_ok() && geometry != self.geometry;
        if changed {
            self.geometry = geometry;
        }
        self.refreshing.drain(..).for_each(|done| done(outcome.clone()));
        changed
    }
}

/// A namespace that was taken away while its disk may have requests in flight.
struct Leaving {
    namespace: Attached,
    done: Done,
    /// The number of lanes that still have requests of the namespace.
    lanes: usize,
}

/// All namespaces, ascending by NSID.
pub(crate) struct Namespaces {
    all: Vec<Attached>,
    /// Namespaces that no new command reaches. Commands in flight still take all of their steps.
    leaving: Vec<Leaving>,
    /// `true` while a namespace leaves, or waits to take over a new size.
    changing: bool,
    /// The number of the namespace that the next turn begins with, counted over `all` and then
    /// `leaving`. A number that none of them has stands for the first one.
    first: usize,
}

impl Namespaces {
    pub fn new(namespaces: Vec<Namespace>) -> Self {
        let mut all: Vec<Attached> = namespaces.into_iter().map(Attached::new).collect();
        all.sort_by_key(|namespace| namespace.nsid);
        Self { all, leaving: Vec::new(), changing: false, first: 0 }
    }

    /// Adds a namespace whose NSID is free.
    pub fn attach(&mut self, namespace: Namespace) {
        let at = self.all.partition_point(|one| one.nsid < namespace.nsid);
        self.all.insert(at, Attached::new(namespace));
    }

    /// Makes all disks release the guest's memory. No disk has a request in flight.
    pub fn release_memory(&mut self) {
        let leaving = self.leaving.iter_mut().map(|one| &mut one.namespace);
        self.all.iter_mut().chain(leaving).for_each(|namespace| namespace.disk.release());
    }

    /// Returns the namespace of a command in flight, even if the namespace is leaving.
    pub fn working(&mut self, nsid: u32) -> Option<&mut Attached> {
        match self.position(nsid) {
            Some(at) => self.all.get_mut(at),
            None => {
                let leaving = self.leaving.iter_mut().map(|one| &mut one.namespace);
                leaving.into_iter().find(|one| one.nsid == nsid)
            }
        }
    }

    /// Takes a namespace out. Callers that wait for its new size are told that it is gone.
    pub fn detach(&mut self, nsid: u32) -> Option<Attached> {
        let mut namespace = self.all.remove(self.position(nsid)?);
        namespace.refreshing.drain(..).for_each(|done| done(Err(ChangeError::Unknown(nsid))));
        Some(namespace)
    }

    /// Drops a namespace that was taken out as soon as its disk has nothing in flight, and then
    /// calls `done`. `lanes` lanes have the namespace as well; each reports with
    /// [`Namespaces::left`] that it has not.
    pub fn leave(&mut self, namespace: Attached, done: Done, lanes: usize) {
        self.leaving.push(Leaving { namespace, done, lanes });
        self.changing = true;
    }

    /// Notes that one more lane has no requests of a namespace that was taken out.
    pub fn left(&mut self, nsid: u32) {
        if let Some(leaving) = self.leaving.iter_mut().find(|one| one.namespace.nsid == nsid) {
            leaving.lanes = leaving.lanes.saturating_sub(1);
        }
    }

    /// Makes a namespace take over its disk's size as soon as no request is in flight. New requests
    /// wait until then.
    pub fn refresh(&mut self, nsid: u32, done: Done) {
        match self.get_mut(nsid) {
            Some(namespace) => {
                namespace.refreshing.push(done);
                self.changing = true;
            }
            None => done(Err(ChangeError::Unknown(nsid))),
        }
    }

    /// Returns all namespaces whose disks have work, including those that are leaving, in the order
    /// of this turn.
    pub fn driven(&mut self) -> impl Iterator<Item = &mut Attached> {
        let first = self.first();
        let at = first.min(self.all.len());
        let (before, from) = self.all.split_at_mut(at);
        let (leaving_before, leaving_from) = self.leaving.split_at_mut(first - at);
        let leaving_before = leaving_before.iter_mut().map(|one| &mut one.namespace);
        let leaving_from = leaving_from.iter_mut().map(|one| &mut one.namespace);
        from.iter_mut().chain(leaving_from).chain(before.iter_mut()).chain(leaving_before)
    }

    /// Makes the next turn begin after the namespace with this place in the order of the last one.
    pub fn begin_after(&mut self, place: usize) {
        let count = self.all.len() + self.leaving.len();
        self.first = (self.first() + place + 1) % count.max(1);
    }

    fn first(&self) -> usize {
        let count = self.all.len() + self.leaving.len();
        if self.first < count { self.first } else { 0 }
    }

    /// Returns whether there may be work for [`Namespaces::complete_changes`].
    pub fn is_changing(&self) -> bool {
        self.changing
    }

    /// Completes changes whose requests have ended. Returns the namespaces whose size has changed.
    pub fn complete_changes(&mut self) -> Vec<u32> {
        let resized = self.all.iter_mut().filter_map(|one| one.resize().then_some(one.nsid));
        let resized = resized.collect();
        let quiet = self.leaving.extract_if(.., |one| one.lanes == 0 && one.namespace.is_done());
        for Leaving { namespace, done, .. } in quiet {
            // Drops the disk first: the callback's owner may open the files that the disk had open.
            drop(namespace);
            done(Ok(()));
        }
        let waits = |one: &Attached| !one.refreshing.is_empty();
        self.changing = !self.leaving.is_empty() || self.all.iter().any(waits);
        resized
    }

    pub fn iter(&self) -> impl Iterator<Item = &Attached> {
        self.all.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Attached> {
        self.all.iter_mut()
    }

    pub fn get(&self, nsid: u32) -> Option<&Attached> {
        let at = self.position(nsid)?;
        self.all.get(at)
    }

    pub fn get_mut(&mut self, nsid: u32) -> Option<&mut Attached> {
        let at = self.position(nsid)?;
        self.all.get_mut(at)
    }

    fn position(&self, nsid: u32) -> Option<usize> {
        // The namespaces are nearly always 1, 2, 3, …
        let guess = nsid.wrapping_sub(1) as usize;
        if self.all.get(guess).is_some_and(|namespace| namespace.nsid == nsid) {
            return Some(guess);
        }
        self.all.binary_search_by_key(&nsid, |namespace| namespace.nsid).ok()
    }
}
