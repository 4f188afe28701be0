//! The wake descriptors of a function's backends.

use std::os::fd::{AsFd, OwnedFd};

use slipway_reactor::{Context, Interest};

use super::ready::FIRST_WAKE;

/// Duplicates of the backends' wake descriptors. A poll of the function clears them.
pub struct Wakes {
    files: Vec<OwnedFd>,
    /// The reactor watches the descriptors: it does while the function is polled.
    watched: bool,
}

impl Wakes {
    pub fn new(files: Vec<OwnedFd>) -> Self {
        Self { files, watched: false }
    }

    /// Watches the descriptors on the reactor that the endpoint has come to.
    ///
    /// # Errors
    /// No memory, descriptor or watch is left.
    pub fn arrive(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        for (token, wake) in (FIRST_WAKE..).zip(&self.files) {
            context.watch(wake.as_fd(), Interest::Read, token)?;
        }
        self.watched = true;
        Ok(())
    }

    /// Watches the descriptors while the function is polled, or becomes quiet (`runs`), and not at
    /// other times: a descriptor that stays readable would keep the thread busy.
    pub fn watch(&mut self, runs: bool, context: &mut Context<'_>) {
        if runs != self.watched {
            self.watched = runs;
            let wanted = if runs { Interest::Read } else { Interest::None };
            for (token, _) in (FIRST_WAKE..).zip(&self.files) {
                // It was watched before, so changing the interest does not fail.
                let _ = context.rewatch(token, wanted);
            }
        }
    }
}
