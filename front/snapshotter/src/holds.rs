//! Images that must not be removed now, as they are being pulled, or a snapshot's record is about
//! to have them; and those that are being removed, and cannot be held until that has ended.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slipway_image::Reference;
use tokio::sync::Notify;

/// The images, by their references.
#[derive(Clone, Default)]
pub struct Holds {
    images: Arc<Mutex<Held>>,
    /// Notified when a removal has ended.
    ended: Arc<Notify>,
}

#[derive(Default)]
struct Held {
    /// The number of holds of each image.
    counts: HashMap<Reference, usize>,
    /// The images that are being removed. None of them is held.
    removed: HashSet<Reference>,
}

/// A hold of an image, until it is dropped.
pub struct Hold {
    holds: Holds,
    reference: Reference,
}

/// The removal of an image, until it is dropped.
pub struct Removal {
    holds: Holds,
    reference: Reference,
}

impl Holds {
    /// Holds an image. Waits for its removal if that is at work.
    pub async fn hold(&self, reference: &Reference) -> Hold {
        loop {
            // Before the look, so that no end is missed.
            let ended = self.ended.notified();
            if let Some(hold) = self.try_hold(reference) {
                return hold;
            }
            ended.await;
        }
    }

    fn try_hold(&self, reference: &Reference) -> Option<Hold> {
        let mut images = self.lock();
        if images.removed.contains(reference) {
            return None;
        }
        *images.counts.entry(reference.clone()).or_default() += 1;
        Some(Hold { holds: self.clone(), reference: reference.clone() })
    }

    /// Begins the removal of an image. Returns `None` if it is held, or is being removed.
    pub fn remove(&self, reference: &Reference) -> Option<Removal> {
        let mut images = self.lock();
        if images.counts.contains_key(reference) || !images.removed.insert(reference.clone()) {
            return None;
        }
        Some(Removal { holds: self.clone(), reference: reference.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut images = self.holds.lock();
        if let Some(count) = images.counts.get_mut(&self.reference) {
            *count -= 1;
            if *count == 0 {
                images.counts.remove(&self.reference);
            }
        }
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        self.holds.lock().removed.remove(&self.reference);
        self.holds.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images() -> [Reference; 2] {
        ["registry.test/app:1", "registry.test/other:1"].map(|name| name.parse().unwrap())
    }

    #[tokio::test]
    async fn an_image_is_held_until_its_last_hold_is_dropped() {
        let holds = Holds::default();
        let [app, other] = images();
        let (one, two) = (holds.hold(&app).await, holds.hold(&app).await);
        drop(one);
        assert!(holds.remove(&app).is_none() && holds.remove(&other).is_some());
        drop(two);
        assert!(holds.lock().counts.is_empty());
        assert!(holds.remove(&app).is_some());
    }

    #[tokio::test]
    async fn an_image_that_is_being_removed_is_held_afterwards() {
        let holds = Holds::default();
        let [app, other] = images();
        let removal = holds.remove(&app).unwrap();
        assert!(holds.remove(&app).is_none(), "one removal at a time");
        drop(holds.hold(&other).await);
        let (waiting, image) = (holds.clone(), app.clone());
        let hold = tokio::spawn(async move { waiting.hold(&image).await });
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        assert!(!hold.is_finished());
        drop(removal);
        drop(hold.await.unwrap());
        assert!(holds.lock().removed.is_empty());
    }
}
