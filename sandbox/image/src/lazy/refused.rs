//! Refusals of disks, each of which is logged once.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Digest;

/// The most images whose refusal is remembered.
const MOST_REFUSED: usize = 1024;

/// The images that were refused and not opened since: their disks connect again and again.
#[derive(Default)]
pub(super) struct Refused(Mutex<HashSet<Digest>>);

impl Refused {
    fn lock(&self) -> MutexGuard<'_, HashSet<Digest>> {
        // Every change under this lock is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a refusal. Returns whether it is the first one of the image.
    pub fn is_first(&self, digest: Digest) -> bool {
        let mut images = self.lock();
        if images.len() >= MOST_REFUSED && !images.contains(&digest) {
            images.clear();
        }
        images.insert(digest)
    }

    /// Forgets the refusals of an image that was opened.
    pub fn forget(&self, digest: Digest) {
        self.lock().remove(&digest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_refused_for_the_first_time_until_it_is_opened() {
        let refused = Refused::default();
        let digest = |number: usize| Digest::of(&number.to_le_bytes());
        assert!(refused.is_first(digest(0)) && !refused.is_first(digest(0)));
        assert!(refused.is_first(digest(1)) && !refused.is_first(digest(0)));
        refused.forget(digest(0));
        assert!(refused.is_first(digest(0)) && !refused.is_first(digest(1)));
        for number in 0..10 * MOST_REFUSED {
            refused.is_first(digest(number));
            assert!(refused.lock().len() <= MOST_REFUSED);
        }
    }
}
