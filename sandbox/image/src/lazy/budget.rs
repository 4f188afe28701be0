//! Memory for requests and for maps.
//!
//! The requests of all images of a process have up to 72 MiB in memory for what is wanted, and 72
//! MiB for what is fetched ahead: blobs, and for each request one uncompressed chunk, which is
//! checked before it is written. A registry that answers slowly holds what its requests have taken.
//! So the requests to one registry share half of this, and each image has a quarter: the requests
//! of others go on. A request that needs more than an image's share takes none of it: of such
//! requests there are two at a time, one to a registry.
//!
//! Beside these, an image takes about 150 bytes for each chunk of its files while it is fetched.
//! All images have room for 8,388,608 chunks together. One image has half of them at most: others
//! are not pulled lazily, and one with more that an older version pulled counts as one with half.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::members::MOST_STREAM;

/// The bytes of the requests to one registry, for each urgency.
const REGISTRY: u64 = MOST_STREAM / 2;
/// The bytes of an image's requests, for each urgency.
const IMAGE: u64 = MOST_STREAM / 4;
/// The most chunks of all images that are in memory.
const MOST_CHUNKS: u64 = 8 << 20;
/// The most chunks of one image.
pub(super) const MOST_CHUNKS_OF_IMAGE: u64 = MOST_CHUNKS / 2;
/// The most requests at once that need more than an image's share, and those to one registry.
const LARGE: usize = 2;
const LARGE_OF_REGISTRY: usize = 1;

/// Memory that the images of a process share.
pub(crate) struct Budget {
    whole: Lanes,
    /// The room of each registry that an image has a share of.
    registries: Mutex<HashMap<String, Weak<Lanes>>>,
    /// The bytes of the requests to a registry, and of those of an image.
    shares: [u64; 2],
    /// A permit for each chunk.
    chunks: Arc<Semaphore>,
    most_chunks_of_image: u64,
}

impl Budget {
    /// Makes the budget of a process that fetches any number of images.
    pub(crate) fn new() -> Arc<Self> {
        Self::with([REGISTRY, IMAGE], MOST_CHUNKS_OF_IMAGE)
    }

    /// Makes the budget of a process that fetches one image, which has all of it.
    pub(crate) fn of_one() -> Arc<Self> {
        Self::with([MOST_STREAM; 2], MOST_CHUNKS_OF_IMAGE)
    }

    /// Makes a budget in which an image may have `chunks` chunks, and all images twice as many.
    #[cfg(test)]
    pub(crate) fn of_chunks(chunks: u64) -> Arc<Self> {
        Self::with([REGISTRY, IMAGE], chunks)
    }

    fn with(shares: [u64; 2], most_chunks_of_image: u64) -> Arc<Self> {
        Arc::new(Self {
            whole: Lanes::new(MOST_STREAM, LARGE),
            registries: Mutex::default(),
            shares,
            chunks: Arc::new(Semaphore::new(2 * most_chunks_of_image as usize)),
            most_chunks_of_image,
        })
    }

    /// Makes the share of an image that can be had from these registries. Their numbers are those
    /// of [`Room::of_registry`].
    pub(crate) fn share(self: &Arc<Self>, registries: &[impl AsRef<str>]) -> Share {
        let [of_registry, of_image] = self.shares;
        let mut known = self.registries.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, lanes| lanes.strong_count() > 0);
        let mut lanes_of = |registry: &str| {
            let lanes = known.get(registry).and_then(Weak::upgrade);
            lanes.unwrap_or_else(|| {
                let lanes = Arc::new(Lanes::new(of_registry, LARGE_OF_REGISTRY));
                known.insert(registry.to_owned(), Arc::downgrade(&lanes));
                lanes
            })
        };
        let registries = registries.iter().map(|registry| lanes_of(registry.as_ref())).collect();
        let image = Lanes::new(of_image, LARGE);
        Share { budget: Arc::clone(self), registries, image, most: of_image }
    }

    /// Takes room for the chunks of an image, which the permit holds. Returns `None` if there is
    /// none now.
    pub(crate) fn try_chunks(&self, chunks: u64) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.chunks).try_acquire_many_owned(self.of_image(chunks)).ok()
    }

    /// Waits for room for the chunks of an image.
    pub(crate) async fn chunks(&self, chunks: u64) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(&self.chunks).acquire_many_owned(self.of_image(chunks)).await.ok()
    }

    fn of_image(&self, chunks: u64) -> u32 {
        u32::try_from(chunks.min(self.most_chunks_of_image)).unwrap_or(u32::MAX)
    }
}

/// Room for requests: so many bytes for each urgency, and so many large requests.
struct Lanes {
    wanted: Semaphore,
    ahead: Semaphore,
    large: Semaphore,
}

impl Lanes {
    fn new(bytes: u64, large: usize) -> Self {
        let permits = || Semaphore::new(units(bytes) as usize);
        Self { wanted: permits(), ahead: permits(), large: Semaphore::new(large) }
    }

    fn of(&self, urgency: Urgency) -> &Semaphore {
        match urgency {
            Urgency::Wanted => &self.wanted,
            Urgency::Ahead => &self.ahead,
        }
    }
}

/// Returns the permits for `bytes` bytes, one for each KiB.
fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

/// An image's part of a budget.
pub(crate) struct Share {
    budget: Arc<Budget>,
    /// The room of each registry that has the image.
    registries: Vec<Arc<Lanes>>,
    image: Lanes,
    /// The bytes of `image`, for each urgency.
    most: u64,
}

/// Room for a request, which is free again when this is dropped.
///
/// A request has room in its image's part first, then in that of the registry that it goes to, and
/// then in the whole. While a request waits for one of these, it holds no room in those that
/// follow.
pub(crate) struct Room<'a> {
    share: &'a Share,
    urgency: Urgency,
    /// The permits of each part. `None` if the request is large.
    units: Option<u32>,
    /// Those that it has. The semaphores are never closed.
    permits: Vec<SemaphorePermit<'a>>,
}

impl Share {
    /// Waits for room for `bytes` bytes in the image's part.
    pub(crate) async fn room(&self, bytes: u64, urgency: Urgency) -> Room<'_> {
        let units = (bytes <= self.most).then(|| units(bytes));
        let mut room = Room { share: self, urgency, units, permits: Vec::new() };
        room.of_part(&self.image).await;
        room
    }
}

impl<'a> Room<'a> {
    /// Waits for room in the part of the registry with this number.
    pub(crate) async fn of_registry(&mut self, number: usize) {
        let share = self.share;
        if let Some(lanes) = share.registries.get(number) {
            self.of_part(lanes).await;
        }
    }

    /// Waits for room in the whole.
    pub(crate) async fn of_whole(&mut self) {
        let share = self.share;
        self.of_part(&share.budget.whole).await;
    }

    async fn of_part(&mut self, part: &'a Lanes) {
        let permit = match self.units {
            Some(units) => part.of(self.urgency).acquire_many(units).await,
            None => part.large.acquire().await,
        };
        self.permits.extend(permit.ok());
    }
}

/// The reason for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Somebody waits for the members. A failed request is repeated, then they are told.
    Wanted,
    /// Nobody waited when the request began. It is made once.
    Ahead,
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    /// Waits for all room for a request to the first registry.
    async fn room(share: &Share, bytes: u64, urgency: Urgency) -> Room<'_> {
        let mut room = share.room(bytes, urgency).await;
        room.of_registry(0).await;
        room.of_whole().await;
        room
    }

    /// Takes room for requests of `bytes` bytes until there is none. Returns what was taken.
    fn fill(share: &Share, bytes: u64, urgency: Urgency) -> Vec<Room<'_>> {
        std::iter::from_fn(|| room(share, bytes, urgency).now_or_never()).take(1000).collect()
    }

    /// Takes room for a request that needs more than an image's share, if there is some.
    fn large(share: &Share) -> Option<Room<'_>> {
        room(share, IMAGE + 1, Urgency::Wanted).now_or_never()
    }

    // Outside a runtime: in one, a task's calls end as if there was no room after 128 of them.
    #[test]
    fn images_of_a_slow_registry_leave_room_to_those_of_others() {
        const REQUEST: u64 = 1 << 20;
        let budget = Budget::new();
        let slow: Vec<Share> = (0..5).map(|_| budget.share(&["slow.example"])).collect();
        let held: Vec<_> = slow.iter().map(|one| fill(one, REQUEST, Urgency::Wanted)).collect();
        let counts: Vec<u64> = held.iter().map(|held| held.len() as u64).collect();
        assert_eq!(counts, [IMAGE / REQUEST, IMAGE / REQUEST, 0, 0, 0]);
        let other = budget.share(&["quick.example"]);
        let found = fill(&other, REQUEST, Urgency::Wanted);
        assert_eq!(found.len() as u64, IMAGE / REQUEST);
        assert!(!fill(&slow[2], REQUEST, Urgency::Ahead).is_empty(), "the urgencies are apart");
        drop(held);
        assert_eq!(fill(&slow[4], REQUEST, Urgency::Wanted).len() as u64, IMAGE / REQUEST);
        // A registry without images has no room of its own any more.
        drop(found);
        drop((slow, other));
        let _share = budget.share(&["another.example"]);
        assert_eq!(budget.registries.lock().unwrap().len(), 1);
    }

    #[test]
    fn all_requests_together_have_the_whole() {
        const REQUEST: u64 = IMAGE;
        let budget = Budget::new();
        let shares: Vec<Share> = (0..9).map(|n| budget.share(&[format!("r{n}.example")])).collect();
        let held: Vec<_> = shares.iter().map(|one| fill(one, REQUEST, Urgency::Wanted)).collect();
        assert_eq!(held.iter().flatten().count() as u64, MOST_STREAM / REQUEST);
        // A large request waits for none of them, and for the end of other large ones: of one to
        // its registry, and of two in all.
        let first = large(&shares[0]);
        assert!(first.is_some());
        let same = budget.share(&["r0.example"]);
        assert!(large(&same).is_none());
        let second = large(&shares[1]);
        assert!(second.is_some() && large(&shares[2]).is_none());
        drop(first);
        assert!(large(&same).is_some());
    }

    #[test]
    fn the_only_image_of_a_process_has_the_whole() {
        let share = Budget::of_one().share(&["example"]);
        assert_eq!(fill(&share, MOST_STREAM / 6, Urgency::Wanted).len(), 6);
    }

    #[test]
    fn chunks_of_all_images_are_counted() {
        let budget = Budget::of_chunks(10);
        let held = [budget.try_chunks(u64::MAX), budget.try_chunks(9)];
        assert!(held.iter().all(Option::is_some), "one image counts as 10 at most");
        assert!(budget.try_chunks(2).is_none() && budget.try_chunks(1).is_some());
        assert!(budget.chunks(2).now_or_never().is_none());
        drop(held);
        assert!(budget.chunks(10).now_or_never().flatten().is_some());
    }
}
