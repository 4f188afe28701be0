//! Images that must not be removed now: they are being pulled, or a snapshot's record is about to
//! have them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slipway_image::Reference;

/// The images, by their references.
#[derive(Clone, Default)]
pub struct Holds {
    /// The number of holds of each of them.
    counts: Arc<Mutex<HashMap<Reference, usize>>>,
}

/// A hold of an image, until it is dropped.
pub struct Hold {
    holds: Holds,
    reference: Reference,
}

impl Holds {
    /// Holds an image.
    pub fn hold(&self, reference: &Reference) -> Hold {
        *self.lock().entry(reference.clone()).or_default() += 1;
        Hold { holds: self.clone(), reference: reference.clone() }
    }

    /// Returns whether an image is held.
    pub fn has(&self, reference: &Reference) -> bool {
        self.lock().contains_key(reference)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Reference, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut counts = self.holds.lock();
        if let Some(count) = counts.get_mut(&self.reference) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.reference);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_held_until_its_last_hold_is_dropped() {
        let holds = Holds::default();
        let [app, other] = ["registry.test/app:1", "registry.test/other:1"]
            .map(|name| name.parse::<Reference>().unwrap());
        let (one, two) = (holds.hold(&app), holds.hold(&app));
        drop(one);
        assert!(holds.has(&app) && !holds.has(&other));
        drop(two);
        assert!(!holds.has(&app) && holds.lock().is_empty());
    }
}
