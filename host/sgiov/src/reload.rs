//! Another policy, and other links, for an engine that serves.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::event::{EventfdFlags, eventfd};

use crate::policy::Policy;

/// What was read anew, all of it in order.
pub struct Renewal {
    /// The policy.
    pub policy: Policy,
    /// For who carries streams to other nodes, if somebody does.
    #[cfg(feature = "links")]
    pub links: Option<slipway_link::Renewal>,
}

/// Gives an engine another policy, from another thread.
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

    /// What was read goes for everything that connects or listens from now on; what is connected stays so. Or why
    /// nothing changes, for reports.
    pub fn renew(&self, renewal: Result<Renewal, String>) {
        if self.renewals.send(renewal).is_ok() {
            slipway_family::wake(&self.wake);
        }
    }
}
