//! Requests to the repositories that have a lazily pulled image. After one that fails, the next
//! repository is asked.
//!
//! Anybody can add repositories to an image, which may send nothing. So the one that gave right
//! data last is asked again after each other one that fails, and no repository is looked for while
//! it gives some.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cache::origins;
use crate::source::registry::{Origin, Registry};
use crate::{Access, Digest, Limits, Reference, Result};

/// The least and the longest time for a request while there is another repository to ask.
const PATIENCE: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(120)];
/// The most often that the least time is doubled.
const MOST_DOUBLED: u32 = 5;

/// The time without right data after which further repositories are looked for.
const WORKS: Duration = Duration::from_secs(60);

/// A repository that gave right data of an image.
pub(crate) struct GoodOrigin {
    place: String,
    at: Instant,
}

/// Clients of an image's repositories.
pub(crate) struct Origins {
    /// The repositories of the list when it was read.
    listed: Vec<Origin>,
    registries: Vec<Registry>,
    state: Mutex<CurrentOrigin>,
}

/// The repository that is asked now.
#[derive(Debug, Default)]
struct CurrentOrigin {
    current: usize,
    /// The repository that gave right data last, and when.
    good: Option<(usize, Instant)>,
    /// The repository beside that one whose turn came last.
    other: usize,
    /// The repositories that have failed since the last success.
    failures: usize,
    /// The times that all of them have failed, one after the other.
    rounds: u32,
}

impl CurrentOrigin {
    fn patience(&self) -> Duration {
        let doubled = 1 << self.rounds.min(MOST_DOUBLED);
        (PATIENCE[0] * doubled).min(PATIENCE[1])
    }

    /// Goes on to the next of `count` repositories, unless another request has done so.
    fn fail(&mut self, number: usize, count: usize) {
        if number != self.current {
            return;
        }
        let good = self.good.map(|(good, _)| good);
        self.current = good.filter(|good| *good != number).unwrap_or_else(|| {
            let after = |number: usize| (number + 1) % count;
            self.other = after(self.other);
            if good == Some(self.other) {
                self.other = after(self.other);
            }
            self.other
        });
        self.failures += 1;
        if self.failures == count {
            (self.failures, self.rounds) = (0, self.rounds.saturating_add(1));
        }
    }
}

impl Origins {
    /// Makes clients of the repositories in the list at `path`, newest first, and of `first`, which
    /// a map has. `access` returns the access to a registry.
    ///
    /// # Errors
    /// There is no client for any of them.
    pub(crate) fn open(
        path: &Path,
        first: Origin,
        access: &dyn Fn(&Reference) -> Access,
        limits: &Limits,
    ) -> Result<Self> {
        let listed = origins::read(path);
        let mut all: Vec<_> = listed.iter().rev().cloned().collect();
        if !all.iter().any(|known| known.place() == first.place()) {
            all.push(first);
        }
        let client = |origin: &Origin| {
            let mut access = access(&origin.reference);
            access.plain_http |= origin.plain_http;
            Registry::new(&origin.reference, &access, limits)
        };
        let (mut registries, mut failure) = (Vec::new(), None);
        for origin in &all {
            match client(origin) {
                Ok(registry) => registries.push(registry),
                Err(error) => failure = Some(error),
            }
        }
        match (registries.is_empty(), failure) {
            (true, Some(error)) => Err(error),
            _ => Ok(Self { listed, registries, state: Mutex::default() }),
        }
    }

    /// Returns whether these are the repositories in the list at `path`.
    pub(crate) fn are_in(&self, path: &Path) -> bool {
        origins::read(path) == self.listed
    }

    /// Returns whether one of them gives right data.
    pub(crate) fn work(&self) -> bool {
        self.lock().good.is_some_and(|(_, at)| at.elapsed() < WORKS)
    }

    /// Notes that the repository with this number has given right data.
    pub(crate) fn worked(&self, number: usize) {
        let mut state = self.lock();
        (state.good, state.failures) = (Some((number, Instant::now())), 0);
    }

    /// Returns the repository that gave right data last, and when.
    pub(crate) fn good(&self) -> Option<GoodOrigin> {
        let (number, at) = self.lock().good?;
        Some(GoodOrigin { place: self.registries[number].origin().place(), at })
    }

    /// Begins with the repository that gave right data of the image before, if it is one of these.
    pub(crate) fn go_on(&self, GoodOrigin { place, at }: &GoodOrigin) {
        let mut all = self.registries.iter();
        if let Some(number) = all.position(|registry| registry.origin().place() == *place) {
            *self.lock() = CurrentOrigin {
                current: number,
                good: Some((number, *at)),
                ..CurrentOrigin::default()
            };
        }
    }

    /// Returns the registries of the repositories, in the order of their numbers.
    pub(crate) fn registries(&self) -> Vec<String> {
        let name = |registry: &Registry| registry.origin().reference.registry().to_owned();
        self.registries.iter().map(name).collect()
    }

    /// Returns the number of the repository that is asked next, and the longest time that is waited
    /// for it if there is another one.
    pub(crate) fn turn(&self) -> (usize, Option<Duration>) {
        let state = self.lock();
        (state.current, (self.registries.len() > 1).then(|| state.patience()))
    }

    /// Returns a part of a blob from the repository with this number, as [`Registry::blob_range`]
    /// does. The next request goes to another one if this one fails.
    ///
    /// # Errors
    /// As there; the repository does not answer soon, and there is another one.
    pub(crate) async fn blob_range(
        &self,
        number: usize,
        digest: &Digest,
        from: u64,
        bytes: u64,
    ) -> Result<Vec<u8>> {
        let registry = &self.registries[number];
        let part = registry.blob_range(digest, from, bytes);
        let part = match self.turn() {
            (_, None) => part.await,
            (_, Some(patience)) => {
                let late = |_| Err(registry.late());
                tokio::time::timeout(patience, part).await.unwrap_or_else(late)
            }
        };
        if part.is_err() {
            self.failed(number);
        }
        part
    }

    /// Notes that a repository's answer is bad, or that it cannot be asked.
    pub(crate) fn failed(&self, number: usize) {
        self.lock().fail(number, self.registries.len());
    }

    fn lock(&self) -> MutexGuard<'_, CurrentOrigin> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_request_is_followed_by_one_to_the_next_repository() {
        let mut state = CurrentOrigin::default();
        state.fail(0, 2);
        // Requests that went to the first one at the same time.
        state.fail(0, 2);
        assert_eq!((state.current, state.patience()), (1, PATIENCE[0]));
        state.fail(1, 2);
        assert_eq!((state.current, state.patience()), (0, 2 * PATIENCE[0]));
        for _ in 0..100 {
            state.fail(state.current, 2);
        }
        assert_eq!(state.patience(), PATIENCE[1]);
        let mut alone = CurrentOrigin::default();
        alone.fail(0, 1);
        assert_eq!(alone.current, 0);
    }

    #[test]
    fn a_repository_that_gave_right_data_is_asked_every_other_time() {
        for good in 0..4 {
            let good_at = Some((good, Instant::now()));
            let mut state =
                CurrentOrigin { current: good, good: good_at, ..CurrentOrigin::default() };
            let mut asked = Vec::new();
            for _ in 0..6 {
                state.fail(state.current, 4);
                asked.push(state.current);
            }
            assert_eq!([asked[1], asked[3], asked[5]], [good; 3]);
            let mut others = [asked[0], asked[2], asked[4], good];
            others.sort_unstable();
            assert_eq!(others, [0, 1, 2, 3]);
        }
        let mut alone =
            CurrentOrigin { good: Some((0, Instant::now())), ..CurrentOrigin::default() };
        alone.fail(0, 1);
        assert_eq!(alone.current, 0);
    }
}
