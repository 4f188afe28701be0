//! Pulls of images: each image is asked for once, however many of its layers are wanted.
//!
//! Calls for one image share one pull. Its result is known for a minute: the layers of an image
//! come one after the other, and a registry that is not there need not be asked for each of them.
//!
//! All pulls have memory for the names and attributes of six images of usual size, four that are
//! pulled lazily and two whole ones, and of a large one. An image that turns out to be large is
//! pulled anew in that one's place, so that many large images do not take the memory of all of
//! them, nor keep others waiting.
//!
//! Registries are hostile, and one that keeps its pulls at work must not keep others from theirs. A
//! registry has half of the places, a pull has its place until it ends, even if nobody waits for it
//! any more, and a pull waits for a place for a minute: what is not pulled then is unpacked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slipway_image::Reference;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use crate::holds::{Hold, Holds, Removal};
use crate::images::{Images, NotPulled, Pulled, Size};

/// The most images of usual size that are pulled lazily at once. Others wait.
pub(crate) const LAZILY: usize = 4;
/// The most images of usual size that are pulled whole at once, which may take hours.
pub(crate) const WHOLE: usize = 2;
/// The most large images that are pulled at once, lazily or whole.
pub(crate) const LARGE: usize = 1;
/// The longest wait for a place.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time for which a pull's result is known.
const KNOWN: Duration = Duration::from_secs(60);

type Outcome = Result<Option<Pulled>, String>;

/// A pull that is at work or was done.
#[derive(Clone, Default)]
struct Pull {
    /// The result, with the time at which it came.
    outcome: Arc<OnceCell<(Outcome, Instant)>>,
}

impl Pull {
    /// Returns whether another call may have this one's result.
    fn is_known(&self, now: Instant) -> bool {
        match self.outcome.get() {
            Some((_, done)) => now.saturating_duration_since(*done) < KNOWN,
            // A task works on it, or has ended a moment ago.
            None => Arc::strong_count(&self.outcome) > 1,
        }
    }
}

/// The places of pulls of one kind, or of other work with images.
pub(crate) struct PullLimits {
    all: Arc<Semaphore>,
    /// The most places of one registry.
    of_registry: usize,
    /// The free places of each registry that has pulls.
    registries: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// A place of one pull, and of its registry.
pub(crate) type PullPermit = [OwnedSemaphorePermit; 2];

impl PullLimits {
    pub(crate) fn new(all: usize) -> Self {
        let of_registry = all.div_ceil(2);
        Self { all: Arc::new(Semaphore::new(all)), of_registry, registries: Mutex::default() }
    }

    /// Takes a place for a pull from `registry`.
    ///
    /// # Errors
    /// Others have had all places for a minute.
    pub(crate) async fn take(&self, registry: &str) -> Result<PullPermit, NotPulled> {
        let place = tokio::time::timeout(PATIENCE, self.wait(registry)).await;
        place.ok().flatten().ok_or_else(|| {
            let patience = PATIENCE.as_secs();
            NotPulled::Failed(format!("pulls of other images have not ended within {patience} s"))
        })
    }

    async fn wait(&self, registry: &str) -> Option<PullPermit> {
        let own = {
            let mut registries = lock(&self.registries);
            registries.retain(|_, own| Arc::strong_count(own) > 1);
            let new = || Arc::new(Semaphore::new(self.of_registry));
            Arc::clone(registries.entry(registry.to_owned()).or_insert_with(new))
        };
        // While a pull waits for others of its registry, it has no place that others need. The
        // semaphores are never closed.
        let own = own.acquire_owned().await.ok()?;
        let of_all = Arc::clone(&self.all).acquire_owned().await.ok()?;
        Some([own, of_all])
    }
}

/// The memory of all pulls.
struct Memory {
    lazily: PullLimits,
    whole: PullLimits,
    large: PullLimits,
}

impl Memory {
    fn new() -> Self {
        let [lazily, whole, large] = [LAZILY, WHOLE, LARGE].map(PullLimits::new);
        Self { lazily, whole, large }
    }

    /// Pulls an image as soon as there is memory for it.
    async fn pull(
        &self,
        images: &dyn Images,
        reference: &Reference,
        whole: bool,
    ) -> Result<Option<Pulled>, NotPulled> {
        let usual = {
            let places = if whole { &self.whole } else { &self.lazily };
            let _place = places.take(reference.registry()).await?;
            images.pull(reference, whole, Size::Usual).await
        };
        match usual {
            Err(NotPulled::TooLarge(_)) => {
                let _place = self.large.take(reference.registry()).await?;
                images.pull(reference, whole, Size::Large).await
            }
            pulled => pulled,
        }
    }
}

/// Pulls of images into the node's cache.
pub struct Pulls {
    images: Arc<dyn Images>,
    memory: Arc<Memory>,
    holds: Holds,
    /// By the image's reference, and whether it is pulled whole.
    pulls: Mutex<HashMap<(Reference, bool), Pull>>,
}

impl Pulls {
    /// Makes pulls into `images`.
    pub fn new(images: Arc<dyn Images>) -> Self {
        let (memory, holds) = (Arc::new(Memory::new()), Holds::default());
        Self { images, memory, holds, pulls: Mutex::default() }
    }

    /// Has an image in the cache, as [`Images::pull`] does.
    ///
    /// # Errors
    /// The errors of [`Images::pull`]; other pulls have had all places for a minute.
    pub async fn pull(&self, reference: &Reference, whole: bool) -> Outcome {
        let hold = self.hold(reference).await;
        let pull = {
            let now = Instant::now();
            let mut pulls = lock(&self.pulls);
            pulls.retain(|_, pull| pull.is_known(now));
            pulls.entry((reference.clone(), whole)).or_default().clone()
        };
        let (images, memory) = (Arc::clone(&self.images), Arc::clone(&self.memory));
        let reference = reference.clone();
        // In a task of its own: if this call is dropped, the pull goes on, and keeps its place.
        let task = tokio::spawn(async move {
            let _until_it_ends = hold;
            let work = || async {
                let pulled = memory.pull(&*images, &reference, whole).await;
                (pulled.map_err(NotPulled::reason), Instant::now())
            };
            pull.outcome.get_or_init(work).await.0.clone()
        });
        task.await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Keeps an image from being removed as long as the result lives. A pull at work holds its
    /// image too. Waits for the image's removal if that is at work.
    pub async fn hold(&self, reference: &Reference) -> Hold {
        self.holds.hold(reference).await
    }

    /// Begins the removal of an image. Returns `None` if it must not be removed, or is already.
    pub fn remove(&self, reference: &Reference) -> Option<Removal> {
        self.holds.remove(reference)
    }

    /// Forgets the results of an image's pulls.
    pub fn forget(&self, reference: &Reference) {
        lock(&self.pulls).retain(|(known, _), _| known != reference);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
