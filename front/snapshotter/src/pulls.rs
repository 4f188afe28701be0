//! Pulls of images: each image is asked for once, however many of its layers are wanted.
//!
//! Calls for one image share one pull. Its result is known for a minute: the layers of an image
//! come one after the other, and a registry that is not there need not be asked for each of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use slipway_image::Reference;
use tokio::sync::{OnceCell, Semaphore};

use crate::images::{Images, Pulled};

/// The most images that are pulled at once. Others wait.
const AT_ONCE: usize = 4;
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
            // Somebody waits for it, or has stopped waiting a moment ago.
            None => Arc::strong_count(&self.outcome) > 1,
        }
    }
}

/// Pulls of images into the node's cache.
pub struct Pulls {
    images: Arc<dyn Images>,
    places: Semaphore,
    /// By the image's reference, and whether it is pulled whole.
    pulls: Mutex<HashMap<(Reference, bool), Pull>>,
}

impl Pulls {
    /// Makes pulls into `images`.
    pub fn new(images: Arc<dyn Images>) -> Self {
        Self { images, places: Semaphore::new(AT_ONCE), pulls: Mutex::default() }
    }

    /// Has an image in the cache, as [`Images::pull`] does.
    ///
    /// # Errors
    /// The errors of [`Images::pull`].
    pub async fn pull(&self, reference: &Reference, whole: bool) -> Outcome {
        let pull = {
            let now = Instant::now();
            let mut pulls = self.lock();
            pulls.retain(|_, pull| pull.is_known(now));
            pulls.entry((reference.clone(), whole)).or_default().clone()
        };
        let work = || async {
            // A semaphore that is never closed.
            let _place = self.places.acquire().await;
            (self.images.pull(reference, whole).await, Instant::now())
        };
        // If this call is dropped, another one that waits for the same image goes on with it.
        pull.outcome.get_or_init(work).await.0.clone()
    }

    /// Forgets the results of an image's pulls.
    pub fn forget(&self, reference: &Reference) {
        self.lock().retain(|(known, _), _| known != reference);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(Reference, bool), Pull>> {
        self.pulls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
