//! Reloads: another policy, and other links, for a running engine.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::{EventfdFlags, eventfd};

use crate::policy::Policy;

/// Newly read configuration, all of it valid.
pub struct Renewal {
    /// The new policy.
    pub policy: Policy,
    /// Settings for the carrier of streams to other nodes, if there is one.
    #[cfg(feature = "links")]
    pub links: Option<slipway_link::Renewal>,
}

/// Gives a running engine another policy and other links, from another thread.
#[derive(Clone)]
pub struct Reload {
    renewals: Sender<Result<Renewal, String>>,
    wake: Arc<OwnedFd>,
}

impl Reload {
    pub(crate) fn new() -> rustix::io::Result<(Self, Receiver<Result<Renewal, String>>)> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (renewals, theirs) = channel();
        Ok((Self { renewals, wake }, theirs))
    }

    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Sends the engine the new configuration, or, for its reports, the reason why there is none.
    /// The new configuration holds for everything that connects or listens from then on; existing
    /// connections stay.
    pub fn renew(&self, renewal: Result<Renewal, String>) {
        if self.renewals.send(renewal).is_ok() {
            slipway_family::wake(&self.wake);
        }
    }
}
