//! Fetches what is wanted of an image, and ahead of that the rest of it.
//!
//! [`Filling::fill`] is the task of one image: it has requests for what disks wait for
//! ([`Urgency::Wanted`]) and fewer for the rest ([`Urgency::Ahead`], [`Filling::step_ahead`]) in
//! flight until the image is whole, and pauses after failures of the latter. An [`ImageUse`] is a
//! connection that needs the image.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::Instant;

use super::budget::Urgency;
use super::partial::Partial;
use super::stamp::Stamp;
use crate::source::blocking;
use crate::{Error, Result};

/// The most requests of one image at once.
const MOST_REQUESTS: usize = 8;
/// The most requests of one image at once for what nobody waits for.
const MOST_AHEAD_REQUESTS: usize = 2;
/// The first and the longest pause after such a request has failed.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// An image that is being filled.
pub(crate) struct Filling {
    pub(crate) partial: Arc<Partial>,
    /// Set once the file has everything, durably.
    whole: watch::Sender<bool>,
    /// The number of connections that use the image.
    connections: AtomicUsize,
    /// The room for the image's chunks.
    _chunks: OwnedSemaphorePermit,
}

/// A connection's use of an image. While there is one, failed requests are repeated.
pub(crate) struct ImageUse(Arc<Filling>);

impl ImageUse {
    /// Returns a receiver of whether the file has everything.
    pub(crate) fn whole(&self) -> watch::Receiver<bool> {
        self.0.whole.subscribe()
    }

    pub(crate) fn partial(&self) -> &Arc<Partial> {
        &self.0.partial
    }
}

impl Drop for ImageUse {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::SeqCst);
        self.0.partial.changed.notify_one();
    }
}

/// The part of [`Filling::fill`] that counts as work of the process.
struct Busy<'a>(&'a watch::Sender<usize>);

impl<'a> Busy<'a> {
    fn new(count: &'a watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// The outcome of a look at the image's files while it is being filled.
enum FillCheck {
    /// They are the ones that are being filled.
    Same,
    /// Another process has made the image whole.
    Whole,
    /// The image was removed.
    Gone,
}

/// The next step for what nobody waits for.
enum AheadStep {
    /// These members are fetched.
    Fetch(Vec<u32>),
    /// There is nothing to fetch from here to the end of the layers.
    Nothing,
    /// The image's files could not be looked at; a pause has begun.
    Failed,
    /// The image is whole, or was removed: nothing is fetched any more.
    Over,
}

/// The state of requests for what nobody waits for.
struct AheadRequests {
    requests: usize,
    /// The last pause; zero after a success.
    pause: Duration,
    /// The end of the pause.
    until: Option<Instant>,
}

impl AheadRequests {
    fn goes_on(&mut self) {
        (self.pause, self.until) = (Duration::ZERO, None);
    }
}

impl Filling {
    pub(crate) fn new(partial: Partial, chunks: OwnedSemaphorePermit) -> Arc<Self> {
        let (partial, connections) = (Arc::new(partial), AtomicUsize::new(0));
        let (whole, _) = watch::channel(false);
        Arc::new(Self { partial, whole, connections, _chunks: chunks })
    }

    /// Counts a connection.
    pub(crate) fn connect(self: &Arc<Self>) -> ImageUse {
        self.connections.fetch_add(1, Ordering::SeqCst);
        self.partial.changed.notify_one();
        ImageUse(Arc::clone(self))
    }

    /// Returns whether there is a connection.
    pub(crate) fn is_used(&self) -> bool {
        self.connections.load(Ordering::SeqCst) > 0
    }

    /// Returns whether the file has everything, durably.
    pub(crate) fn is_whole(&self) -> bool {
        *self.whole.borrow()
    }

    /// Returns whether the image's files are still the ones that are being filled. Blocks.
    ///
    /// # Errors
    /// The index or the files cannot be read now.
    pub(crate) fn is_same(&self) -> Result<bool> {
        let partial = &self.partial;
        let Some(image) = partial.cache.get(&partial.digest.to_string())? else { return Ok(false) };
        let map_path = partial.cache.map_path(&partial.digest);
        match Stamp::of(&image.erofs_path, &map_path) {
            // A repository that was added is one more to ask if those before give no data: the
            // image is opened again.
            Ok(stamp) => Ok(stamp == partial.stamp && partial.has_origins()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(Error::io("read", &map_path, e)),
        }
    }

    async fn look(self: &Arc<Self>) -> Result<FillCheck> {
        let filling = Arc::clone(self);
        blocking(move || {
            if filling.is_same()? {
                return Ok(FillCheck::Same);
            }
            let partial = &filling.partial;
            let image = partial.cache.get(&partial.digest.to_string())?;
            // Disks read the file that was being filled.
            let is_ours = |path: &Path| {
                std::fs::metadata(path).is_ok_and(|m| partial.stamp.is_of(Stamp::file(&m)))
            };
            let is_whole = image.is_some_and(|image| !image.lazy && is_ours(&image.erofs_path));
            Ok(if is_whole { FillCheck::Whole } else { FillCheck::Gone })
        })
        .await
    }

    /// Fetches until the image is whole or removed. `busy` counts the images of the process that
    /// are being fetched: one whose requests ahead fail is not counted until the next success.
    pub(crate) async fn fill(self: Arc<Self>, busy: Arc<watch::Sender<usize>>) {
        let mut counted = Some(Busy::new(&busy));
        let mut ahead = AheadRequests { requests: 0, pause: Duration::ZERO, until: None };
        let mut flights = FuturesUnordered::new();
        while !self.partial.is_complete() {
            while flights.len() < MOST_REQUESTS
                && let Some(members) = self.partial.next_wanted()
            {
                flights.push(self.flight(members, Urgency::Wanted));
            }
            if self.starts_ahead(&ahead) && flights.len() < MOST_REQUESTS {
                match self.step_ahead(&mut ahead).await {
                    AheadStep::Fetch(members) => {
                        flights.push(self.flight(members, Urgency::Ahead));
                        continue;
                    }
                    // At the end of the layers, what was left out is looked for from the beginning.
                    AheadStep::Nothing if flights.is_empty() => {
                        tokio::task::yield_now().await;
                        continue;
                    }
                    AheadStep::Nothing => {}
                    AheadStep::Failed => continue,
                    AheadStep::Over => return,
                }
            }
            match ahead.pause.is_zero() {
                true if counted.is_none() => counted = Some(Busy::new(&busy)),
                true => {}
                false => counted = None,
            }
            let until = ahead.until.filter(|_| self.is_used());
            tokio::select! {
                Some((urgency, outcome)) = flights.next() => {
                    self.landed(&mut ahead, urgency, outcome);
                }
                () = self.partial.changed.notified() => {}
                () = tokio::time::sleep_until(until.unwrap_or_else(Instant::now)),
                    if until.is_some() => ahead.until = None,
            }
        }
        match self.partial.finish().await {
            Ok(()) => self.tell_whole(),
            Err(error) => {
                self.fail(&error);
                // Disks connect again, and the image is opened again.
                self.partial.close();
            }
        }
    }

    /// Finds out what of the rest is fetched next, and counts that as a request.
    async fn step_ahead(self: &Arc<Self>, ahead: &mut AheadRequests) -> AheadStep {
        match self.look().await {
            Ok(FillCheck::Same) => {}
            Ok(FillCheck::Whole) => {
                self.tell_whole();
                return AheadStep::Over;
            }
            Ok(FillCheck::Gone) => {
                self.partial.close();
                return AheadStep::Over;
            }
            Err(error) => {
                self.ahead_failed(ahead, &error);
                return AheadStep::Failed;
            }
        }
        let Some(members) = self.partial.next_ahead() else { return AheadStep::Nothing };
        ahead.requests += 1;
        AheadStep::Fetch(members)
    }

    async fn flight(&self, members: Vec<u32>, urgency: Urgency) -> (Urgency, Result<()>) {
        (urgency, Arc::clone(&self.partial).fetch(members, urgency).await)
    }

    /// Returns whether a request for what nobody waits for may begin.
    fn starts_ahead(&self, ahead: &AheadRequests) -> bool {
        ahead.requests < MOST_AHEAD_REQUESTS && ahead.until.is_none() && !self.partial.is_wanted()
    }

    fn landed(&self, ahead: &mut AheadRequests, urgency: Urgency, outcome: Result<()>) {
        ahead.requests -= usize::from(urgency == Urgency::Ahead);
        match (urgency, outcome) {
            // The registry answers again.
            (_, Ok(())) => ahead.goes_on(),
            (Urgency::Wanted, Err(error)) => self.fail(&error),
            (Urgency::Ahead, Err(error)) => self.ahead_failed(ahead, &error),
        }
    }

    /// Begins a pause. Of failures without a success between them, the first is logged.
    fn ahead_failed(&self, ahead: &mut AheadRequests, error: &Error) {
        if ahead.pause.is_zero() {
            let image = self.partial.digest.short();
            tracing::warn!(%image, %error, "the rest of an image is fetched later");
        }
        ahead.pause = (ahead.pause * 2).clamp(PAUSES[0], PAUSES[1]);
        ahead.until = Some(Instant::now() + ahead.pause);
    }

    fn tell_whole(&self) {
        self.whole.send_replace(true);
    }

    fn fail(&self, error: &Error) {
        let image = self.partial.digest.short();
        tracing::error!(%image, %error, "cannot fetch a part of an image");
    }
}
