//! An image of which parts are missing: which they are, and what is to be fetched next.
//!
//! [`Partial::want`] waits until a range of the image's file is there. It does not fetch: `fill`
//! takes what is wanted ([`Partial::next_wanted`]), or what comes next in the layers
//! ([`Partial::next_ahead`]), and fetches it (`request`). A member is fetched by one request at a
//! time, for all that wait for it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use slipway_lazy_spec::Extent;
use tokio::sync::{Notify, mpsc};

use super::budget::Budget;
use super::have::Have;
use super::map::{Map, Span};
use super::members::Members;
use super::stamp::Stamp;
use crate::source::blocking;
use crate::source::registry::{Access, Registry};
use crate::{Cache, Digest, Error, Image, Progress, Reference, Result};

/// The most bytes of one request for members that are wanted together. One member may have more.
const MOST_RANGE: u64 = 8 << 20;
/// The most bytes of one request for members that nobody waits for.
const MOST_AHEAD: u64 = 4 << 20;

/// The settings of [`Partial::open`].
pub(crate) struct Settings<'a> {
    /// The folder of the bits. Without one they are in memory alone.
    pub have_dir: Option<&'a Path>,
    /// Returns the access to a registry.
    pub access: &'a dyn Fn(&Reference) -> Access,
    pub budget: Arc<Budget>,
    pub progress: Arc<dyn Progress>,
}

/// An image of which parts are missing.
pub(crate) struct Partial {
    pub(crate) digest: Digest,
    pub(crate) cache: Cache,
    pub(crate) map: Map,
    pub(crate) members: Members,
    pub(crate) stamp: Stamp,
    /// Notified when members are wanted, and by those who change something that `fill` waits for.
    pub(crate) changed: Notify,
    pub(super) path: PathBuf,
    pub(super) file: File,
    have_path: Option<PathBuf>,
    pub(super) registry: Registry,
    pub(super) budget: Arc<Budget>,
    pub(super) progress: Arc<dyn Progress>,
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) have: Have,
    /// The ones that wait for each member that is queued or being fetched. Each is told once
    /// whether the member is there; `false`: it cannot be fetched now.
    pub(super) waiters: HashMap<u32, Vec<Waiter>>,
    /// Wanted members. One that is being fetched already, or that nobody waits for any more, is
    /// skipped when it is taken.
    pub(super) queue: VecDeque<u32>,
    /// Members that a request has.
    pub(super) flying: HashSet<u32>,
    ahead: Ahead,
    /// The bytes of each layer's blob that are no longer needed.
    pub(super) done: Vec<u64>,
    /// Set if nothing will be fetched any more.
    closed: bool,
}

/// One that waits for members, which share the channel.
pub(super) type Waiter = mpsc::UnboundedSender<bool>;

/// The position of the members that are fetched ahead.
#[derive(Clone, Copy)]
struct Ahead {
    next: u32,
    /// Set while only members of the layers' prefetch parts are taken.
    prefetch: bool,
}

impl Ahead {
    const BEGIN: Self = Self { next: 0, prefetch: true };
}

/// The folder of the bits below a run directory.
pub(crate) fn have_dir(run_dir: &Path) -> PathBuf {
    run_dir.join("lazy")
}

/// The file of an image's bits.
pub(crate) fn have_path(dir: &Path, digest: &Digest) -> PathBuf {
    dir.join(format!("{}.have", digest.hex()))
}

impl Partial {
    /// Opens an image that is marked lazy. Blocks while files are read.
    ///
    /// # Errors
    /// A file is missing, cannot be read or is damaged.
    pub(crate) fn open(cache: &Cache, image: &Image, settings: Settings<'_>) -> Result<Self> {
        let (digest, path) = (image.digest, image.erofs_path.clone());
        let map_path = cache.map_path(&digest);
        let map = Map::read(&map_path, cache.limits())?;
        let bad = |reason: &str| {
            let next = format!("{reason}: remove image {} and pull it again", digest.short());
            Error::bad_document(map_path.display(), next)
        };
        let members = Members::of(&map).map_err(|reason| bad(&reason))?;
        let unreadable = |e| Error::io("open", &path, e);
        let file = File::options().read(true).write(true).open(&path).map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        if meta.len() != map.bytes {
            return Err(bad("the image's file has another length"));
        }
        let stamp = Stamp::with(&meta, &map_path).map_err(unreadable)?;
        let have_path = settings.have_dir.map(|dir| have_path(dir, &digest));
        let have = match &have_path {
            Some(path) => {
                let open = || Have::open(path, &stamp.identity(&map_path)?, map.spans.len());
                open().map_err(|e| Error::io("open", path, e))?
            }
            None => Have::in_memory(map.spans.len()),
        };
        let mut access = (settings.access)(&map.reference);
        access.plain_http |= map.plain_http;
        let registry = Registry::new(&map.reference, &access, cache.limits())?;
        let partial = Self {
            digest,
            cache: cache.clone(),
            members,
            stamp,
            changed: Notify::new(),
            path,
            file,
            have_path,
            registry,
            budget: settings.budget,
            progress: settings.progress,
            state: Mutex::new(State {
                have,
                waiters: HashMap::new(),
                queue: VecDeque::new(),
                flying: HashSet::new(),
                ahead: Ahead::BEGIN,
                done: vec![0; map.layers.len()],
                closed: false,
            }),
            map,
        };
        partial.count_done();
        Ok(partial)
    }

    /// Counts the bytes of the layers that an earlier process has fetched.
    fn count_done(&self) {
        let mut done = vec![0; self.map.layers.len()];
        for number in 0..self.members.len() {
            if self.is_there(&self.lock(), number) {
                let member = self.members.get(number);
                done[member.layer as usize] += member.bytes;
            }
        }
        self.lock().done = done;
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // No code that may panic leaves a half-made change under this lock.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn span(&self, number: u32) -> &Span {
        &self.map.spans[number as usize]
    }

    /// Returns whether the file has all spans of a member.
    pub(super) fn is_there(&self, state: &State, member: u32) -> bool {
        self.members.spans(member).iter().all(|span| state.have.has(*span as usize))
    }

    /// Returns the number of missing spans.
    pub(crate) fn missing(&self) -> usize {
        self.lock().have.missing()
    }

    /// Returns whether the file has everything.
    pub(crate) fn is_complete(&self) -> bool {
        self.missing() == 0
    }

    /// Returns whether somebody waits for a member.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.lock().waiters.is_empty()
    }

    /// Returns the bytes of each layer that are fetched so far.
    pub(crate) fn done(&self) -> Vec<u64> {
        self.lock().done.clone()
    }

    /// Returns the numbers of the spans that overlap a range of the image.
    pub(crate) fn overlapping(&self, extent: Extent) -> std::ops::Range<usize> {
        let spans = &self.map.spans;
        let first = spans.partition_point(|span| span.image + span.bytes <= extent.offset);
        let end = spans.partition_point(|span| span.image < extent.end());
        first..end.max(first)
    }

    /// Waits until the file has these bytes. Returns a range with them, all of which is there.
    /// Returns `None` if they cannot be fetched now.
    ///
    /// Somebody must fetch what is wanted meanwhile. A future that is dropped wants nothing any
    /// more.
    pub(crate) async fn want(&self, extent: Extent) -> Option<Extent> {
        let (mut told, members) = self.ask(extent);
        for _ in 0..members {
            if told.recv().await != Some(true) {
                return None;
            }
        }
        Some(self.around(extent))
    }

    /// Queues the missing members of a range. Returns their number, and a receiver that is told
    /// once for each of them whether it is there.
    fn ask(&self, extent: Extent) -> (mpsc::UnboundedReceiver<bool>, usize) {
        let mut state = self.lock();
        let spans = self.overlapping(extent).filter(|span| !state.have.has(*span));
        let mut wanted: Vec<u32> = spans.map(|span| self.members.of_span(span)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let (sender, receiver) = mpsc::unbounded_channel();
        let count = wanted.len();
        let State { waiters, queue, flying, closed, .. } = &mut *state;
        if *closed {
            // Without a sender, the receiver is told that nothing comes.
            return (receiver, count);
        }
        for member in wanted {
            let others = waiters.entry(member).or_default();
            if others.is_empty() && !flying.contains(&member) {
                queue.push_back(member);
            }
            others.push(sender.clone());
        }
        drop(state);
        self.changed.notify_one();
        (receiver, count)
    }

    /// Returns the longest range around `extent`, which is there, that has no missing span. What
    /// belongs to no span is always there.
    fn around(&self, extent: Extent) -> Extent {
        let spans = self.overlapping(extent);
        let state = self.lock();
        let before = state.have.missing_before(spans.start).map(|span| &self.map.spans[span]);
        let after = state.have.missing_from(spans.end).map(|span| &self.map.spans[span]);
        let begin = before.map_or(0, |span| span.image + span.bytes).min(extent.offset);
        let end = after.map_or(self.map.bytes, |span| span.image).max(extent.end());
        Extent { offset: begin, bytes: end - begin }
    }

    /// Takes the members of the next request for what is wanted. Returns `None` if nothing is, or a
    /// request has it already.
    pub(crate) fn next_wanted(&self) -> Option<Vec<u32>> {
        let mut state = self.lock();
        loop {
            let first = state.queue.pop_front()?;
            let State { waiters, flying, .. } = &mut *state;
            let is_wanted = |member: u32| {
                let waits = |all: &Vec<Waiter>| all.iter().any(|one| !one.is_closed());
                !flying.contains(&member) && waiters.get(&member).is_some_and(waits)
            };
            if !is_wanted(first) {
                if !flying.contains(&first) {
                    waiters.remove(&first);
                }
                continue;
            }
            let batch = self.members.batch(first, MOST_RANGE, is_wanted);
            flying.extend(&batch);
            return Some(batch);
        }
    }

    /// Takes the members of the next request for what nobody waits for: first those that the
    /// layers' makers marked, then all, in the order of the layers. Returns `None` at the end,
    /// where it begins again.
    pub(crate) fn next_ahead(&self) -> Option<Vec<u32>> {
        let mut state = self.lock();
        loop {
            let Ahead { next, prefetch } = state.ahead;
            if next == self.members.len() {
                state.ahead =
                    if prefetch { Ahead { next: 0, prefetch: false } } else { Ahead::BEGIN };
                match prefetch {
                    true => continue,
                    false => return None,
                }
            }
            let fits = |member: u32| {
                !state.flying.contains(&member)
                    && !state.waiters.contains_key(&member)
                    && !self.is_there(&state, member)
                    && (!prefetch || self.is_first(member))
            };
            if !fits(next) {
                state.ahead.next += 1;
                continue;
            }
            let batch = self.members.batch(next, MOST_AHEAD, fits);
            state.ahead.next += batch.len() as u32;
            state.flying.extend(&batch);
            return Some(batch);
        }
    }

    /// Returns whether a member is in the part of its layer that is to be fetched first.
    fn is_first(&self, member: u32) -> bool {
        let member = self.members.get(member);
        member.stream < self.map.layers[member.layer as usize].prefetch
    }

    /// Takes these members, which a caller fetches by itself, in requests.
    pub(crate) fn batches(&self, members: &[u32]) -> Vec<Vec<u32>> {
        let mut state = self.lock();
        let mut batches = Vec::new();
        for first in members {
            let State { flying, have, .. } = &mut *state;
            let fits = |member: u32| {
                let mut spans = self.members.spans(member).iter();
                members.binary_search(&member).is_ok()
                    && !flying.contains(&member)
                    && spans.any(|span| !have.has(*span as usize))
            };
            if fits(*first) {
                let batch = self.members.batch(*first, MOST_RANGE, fits);
                flying.extend(&batch);
                batches.push(batch);
            }
        }
        batches
    }

    /// Ends all waiting: nothing is fetched any more.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        for waiter in state.waiters.drain().flat_map(|(_, waiters)| waiters) {
            // The receiver may have gone.
            let _ = waiter.send(false);
        }
        state.queue.clear();
    }

    /// Returns whether nothing is fetched any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Marks everything as missing, after the disk failed: the kernel tells of data that it could
    /// not write only once.
    pub(crate) fn forget(&self) {
        if let Some(path) = &self.have_path
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::error!(path = %path.display(), %error, "cannot remove a file: remove it");
        }
        self.lock().have = Have::in_memory(self.map.spans.len());
    }

    /// Makes a complete image an ordinary one.
    ///
    /// # Errors
    /// The disk failed, the image was removed, or parts of it are missing.
    pub(crate) async fn finish(self: &Arc<Self>) -> Result<()> {
        if !self.is_complete() {
            let next = format!("parts of image {} are missing: pull it again", self.digest.short());
            return Err(Error::bad_document(self.path.display(), next));
        }
        let partial = Arc::clone(self);
        blocking(move || {
            let path = &partial.path;
            if let Err(e) = partial.file.sync_all() {
                partial.forget();
                return Err(Error::io("write", path, e));
            }
            partial.cache.become_whole(&partial.digest, &partial.file)?;
            if let Some(path) = &partial.have_path {
                // A file that stays is of no image.
                let _ = std::fs::remove_file(path);
            }
            Ok(())
        })
        .await
    }
}
