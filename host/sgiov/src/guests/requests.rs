//! Requests to guests to accept a connection, and the time that a guest may take to answer one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::pairs::Pairs;

/// The time that a guest may take. It is shorter than a program waits for its engine, so that a
/// guest that does not answer, for example since it is stopped, does not look like the engine's
/// end.
const PATIENCE: Duration = Duration::from_secs(5);

/// The requests to guests, the oldest first. Each is noted by its time and its pair. A request that
/// was answered is dropped when it is the oldest.
#[derive(Default)]
pub struct Requests(VecDeque<(Instant, u32)>);

/// The oldest request to a guest that was not answered.
pub enum Oldest {
    /// The guest has this much time left.
    Waits(Duration),
    /// The guest's time is over. [`Requests`] has forgotten the request.
    Overdue { guest: u32, pair: u32 },
}

impl Requests {
    /// Adds the request for a pair that waits since `since`, the latest time so far.
    pub fn add(&mut self, since: Instant, pair: u32) {
        self.0.push_back((since, pair));
    }

    /// Looks at the oldest request that was not answered. Returns `None` if there is none.
    pub fn oldest(&mut self, pairs: &Pairs) -> Option<Oldest> {
        while let Some((since, pair)) = self.0.front().copied() {
            // The number may have been reused for another pair.
            let guest = pairs.get(pair).and_then(|pair| pair.guest_asked_at(since));
            let left = PATIENCE.saturating_sub(since.elapsed());
            if guest.is_some() && !left.is_zero() {
                return Some(Oldest::Waits(left));
            }
            self.0.pop_front();
            if let Some(guest) = guest {
                return Some(Oldest::Overdue { guest, pair });
            }
        }
        None
    }
}
