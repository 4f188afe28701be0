//! Links: arenas between two parties, and their streams.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use slipway_ring::cross::{Arena, Region, Regions, Side};

use super::{Broker, Errno, lack};
use crate::accounts::{Account, Resource, ResourceHold};
use crate::remote::StreamCarrier;
use crate::slab::Slab;
use crate::table::Table;

/// The number of descriptors that a link costs: two for its arena.
pub const DESCRIPTORS: u64 = 2;
/// The number of streams of a link whose arena the engine makes. Two families that need more have
/// several links.
pub const STREAMS: u32 = 4096;

/// The party at a side of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Party {
    /// A family, by its number.
    Family(u32),
    /// The engine itself, on behalf of another node or a guest.
    Engine,
    /// A family that has ended.
    Gone,
}

/// The party at a side, and the party's number of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEnd {
    pub party: Party,
    pub number: u16,
}

pub struct ArenaLink {
    pub arena: Arena,
    /// The arena's descriptor, which families get.
    pub file: Arc<OwnedFd>,
    pub ends: [LinkEnd; 2],
    /// If the engine is at one end: the regions of its area that it uses.
    pub bits: Option<Arc<[AtomicU64]>>,
    /// Set if the arena is the carrier's, which is to be told of its end.
    pub supplied: bool,
    free: Vec<u32>,
    next: u32,
    pub live: u32,
    /// The shares for its descriptors and its arena's mapping, which count against the party that
    /// connected first.
    _held: [ResourceHold; 2],
    /// The time since which the link has no stream.
    pub idle: Option<Instant>,
    /// Pages that are being released.
    pub cleaning: Cleaning,
}

/// Pages of a link that another thread releases ([`Arena::punch`]).
#[derive(Clone, Default)]
pub struct Cleaning(Arc<Mutex<Cleaned>>);

#[derive(Default)]
struct Cleaned {
    /// Streams whose own page of a side is being released. They are not reused meanwhile, or
    /// another connection's bytes would be lost with the page.
    streams: HashSet<(u32, u8)>,
    /// Set when the link has ended: the bits in its families' tables are another link's from then
    /// on.
    over: bool,
}

impl Cleaning {
    /// Locks the state. No code under the lock waits.
    fn lock(&self) -> MutexGuard<'_, Cleaned> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the link has ended.
    pub fn end(&self) {
        self.lock().over = true;
    }

    /// Notes that a side's own page of a stream is being released.
    pub fn begin(&self, stream: u32, side: Side) {
        self.lock().streams.insert((stream, side as u8));
    }

    /// Notes that a side's own page of a stream was released.
    pub fn done(&self, stream: u32, side: Side) {
        self.lock().streams.remove(&(stream, side as u8));
    }

    fn is_under_way(&self, stream: u32) -> bool {
        let cleaned = self.lock();
        [Side::Zero, Side::One].iter().any(|side| cleaned.streams.contains(&(stream, *side as u8)))
    }

    /// Releases a region's pages and then the region, whose bit is in a family's table.
    pub fn give(&self, arena: &Arena, side: Side, region: Region, (table, link): (Table, u16)) {
        let (cleaning, shape) = (self.clone(), arena.shape());
        arena.punch(side, region, move || {
            let cleaned = cleaning.lock();
            if !cleaned.over {
                Regions::new(table.bits(link), shape).give(region);
            }
        });
    }
}

impl ArenaLink {
    fn new(
        ends: [LinkEnd; 2],
        supplied: Option<Arena>,
        held: [ResourceHold; 2],
    ) -> std::io::Result<Self> {
        let is_supplied = supplied.is_some();
        let arena = supplied.map_or_else(|| Arena::new(Regions::shape(STREAMS)), Ok)?;
        let file = arena.file().ok_or(std::io::ErrorKind::Unsupported)?.try_clone_to_owned()?;
        let with_engine = ends.iter().any(|end| end.party == Party::Engine);
        let bits = with_engine.then(|| (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect());
        let (free, next) = (Vec::new(), 0);
        Ok(Self {
            arena,
            file: Arc::new(file),
            ends,
            bits,
            supplied: is_supplied,
            free,
            next,
            live: 0,
            _held: held,
            idle: Some(Instant::now()),
            cleaning: Cleaning::default(),
        })
    }

    fn streams(&self) -> u32 {
        self.arena.shape().streams
    }

    fn has_room(&self) -> bool {
        let whole = self.ends.iter().all(|end| end.party != Party::Gone);
        whole && (self.next < self.streams() || !self.free.is_empty())
    }

    /// Takes an unused stream. Nothing is left in it of what earlier connections wrote.
    pub fn take_stream(&mut self) -> Option<u32> {
        let free = |stream: &u32| !self.cleaning.is_under_way(*stream);
        let free = self.free.iter().rposition(free).map(|at| self.free.swap_remove(at));
        let stream = free.or_else(|| {
            let next = self.next;
            (next < self.streams()).then(|| {
                self.next += 1;
                next
            })
        })?;
        self.arena.clear(stream);
        (self.live, self.idle) = (self.live + 1, None);
        Some(stream)
    }

    /// Gives back a stream whose ends are both closed.
    pub fn give_stream(&mut self, stream: u32) {
        self.free.push(stream);
        self.live -= 1;
        if self.live == 0 {
            self.idle = Some(Instant::now());
        }
    }

    /// Releases all pages, even if processes still have the arena mapped. The link's costs count
    /// until that is done.
    pub fn punch(self) {
        let arena = self.arena.clone();
        arena.punch_all(move || drop(self));
    }
}

/// Returns the side that `party` has in a link with another party. Not meant for a link of a party
/// with itself.
pub fn side_of(link: &ArenaLink, party: Party) -> Side {
    if link.ends[0].party == party { Side::Zero } else { Side::One }
}

/// All links.
#[derive(Default)]
pub struct ArenaLinks {
    all: Slab<ArenaLink>,
    between: HashMap<[Party; 2], Vec<u32>>,
}

fn key(a: Party, b: Party) -> [Party; 2] {
    if a <= b { [a, b] } else { [b, a] }
}

impl ArenaLinks {
    /// Returns a link between the two parties that has a stream left.
    pub fn with_room(&self, a: Party, b: Party) -> Option<u32> {
        let mut links = self.between.get(&key(a, b))?.iter().rev();
        links.find(|number| self.all.get(**number).is_some_and(ArenaLink::has_room)).copied()
    }

    /// Adds a link in an arena of its own, or in the one that the carrier has `supplied`.
    pub fn add(
        &mut self,
        ends: [LinkEnd; 2],
        supplied: Option<Arena>,
        held: [ResourceHold; 2],
    ) -> std::io::Result<u32> {
        let number = self.all.insert(ArenaLink::new(ends, supplied, held)?);
        self.between.entry(key(ends[0].party, ends[1].party)).or_default().push(number);
        Ok(number)
    }

    pub fn get(&self, number: u32) -> Option<&ArenaLink> {
        self.all.get(number)
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut ArenaLink> {
        self.all.get_mut(number)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &ArenaLink)> {
        self.all.iter()
    }

    /// Notes that a family has ended, so that its links get no new streams. Returns its links
    /// without streams.
    pub fn part(&mut self, family: Party) -> Vec<u32> {
        let keys: Vec<_> =
            self.between.keys().filter(|key| key.contains(&family)).copied().collect();
        let mut empty = Vec::new();
        for number in keys.iter().filter_map(|key| self.between.remove(key)).flatten() {
            let Some(link) = self.all.get_mut(number) else { continue };
            for end in link.ends.iter_mut().filter(|end| end.party == family) {
                end.party = Party::Gone;
            }
            if link.live == 0 {
                empty.push(number);
            }
        }
        empty
    }

    /// Removes a link without streams, and returns it: its parties are still to forget it.
    pub fn remove(&mut self, number: u32) -> Option<ArenaLink> {
        let link = self.all.remove(number)?;
        let key = key(link.ends[0].party, link.ends[1].party);
        if let Some(numbers) = self.between.get_mut(&key) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                self.between.remove(&key);
            }
        }
        Some(link)
    }

    /// Returns the links that have had no stream for this long.
    pub fn idle(&self, for_long: std::time::Duration) -> Vec<u32> {
        let is_idle = |link: &ArenaLink| link.idle.is_some_and(|since| since.elapsed() >= for_long);
        self.all.iter().filter(|(_, link)| is_idle(link)).map(|(number, _)| number).collect()
    }
}

impl Broker {
    /// Returns a link between the two parties that has room, or makes one.
    pub(super) fn link_between(
        &mut self,
        a: Party,
        b: Party,
        account: &Arc<Account>,
    ) -> Result<u32, Errno> {
        if let Some(link) = self.links.with_room(a, b) {
            return Ok(link);
        }
        let first = self.free_number(a, None)?;
        let second = self.free_number(b, (a == b).then_some(first))?;
        let ends = [LinkEnd { party: a, number: first }, LinkEnd { party: b, number: second }];
        let held = [
            account.hold(Resource::Descriptors, DESCRIPTORS)?,
            account.hold(Resource::Mappings, 1)?,
        ];
        let link = self.add_link(ends, held)?;
        for (end, side) in ends.iter().zip([Side::Zero, Side::One]) {
            if let Party::Family(number) = end.party
                && let Some(family) = self.families.get_mut(number)
            {
                family.set_link(end.number, Some((link, side)));
            }
        }
        Ok(link)
    }

    /// Returns a number of a link that a party has free, except `but`. The engine has no numbers,
    /// and its links have 0.
    fn free_number(&self, party: Party, but: Option<u16>) -> Result<u16, Errno> {
        match party {
            Party::Family(number) => self
                .families
                .get(number)
                .and_then(|family| family.free_link(but))
                .ok_or(Errno::NOBUFS),
            Party::Engine | Party::Gone => Ok(0),
        }
    }

    /// Adds a link with an arena. A carrier may supply the arena of a link with the engine.
    fn add_link(&mut self, ends: [LinkEnd; 2], held: [ResourceHold; 2]) -> Result<u32, Errno> {
        let has_engine = ends.iter().any(|end| end.party == Party::Engine);
        let supplied = match &mut self.remote {
            Some(remote) if has_engine => remote.arena().transpose().map_err(lack)?,
            _ => None,
        };
        let link = self.links.add(ends, supplied.clone(), held).map_err(lack);
        if link.is_err()
            && let (Some(remote), Some(arena)) = (&mut self.remote, &supplied)
        {
            remote.arena_gone(arena);
        }
        link
    }
}
