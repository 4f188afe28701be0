//! The listening socket of an endpoint.

use std::time::Instant;

use slipway_peer::Bin;
use slipway_reactor::{Context, Interest};

use super::ready::LISTENER;
use crate::keeping::Keeping;
use crate::listener::Listener;
use crate::{Config, kept, slots};

/// The listening socket, with the times at which it is watched.
pub struct Entrance {
    pub listener: Listener,
    /// The socket listens, and the reactor was told of it.
    pub is_open: bool,
    /// The socket is watched, as far as the reactor was told.
    pub watched: bool,
    /// The time at which to accept again after an error.
    pub retry_at: Option<Instant>,
}

impl Entrance {
    /// Begins to watch the socket. The socket must listen by now: epoll(7) would report any other
    /// socket as hung up all the time.
    ///
    /// # Errors
    /// No memory or no watch is left.
    pub fn open(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        context.watch(self.listener.file(), Interest::Read, LISTENER)?;
        (self.is_open, self.watched) = (true, true);
        Ok(())
    }

    /// Ends the pause after an error when its time has come.
    pub fn pause_ends(&mut self, now: Instant) {
        self.retry_at = self.retry_at.filter(|at| *at > now);
    }

    /// Watches the socket if clients are accepted, now that `open` says whether the endpoint's
    /// state admits it.
    pub fn watch(&mut self, open: bool, context: &mut Context<'_>) {
        let accepts = open && self.retry_at.is_none();
        if accepts != self.watched {
            self.watched = accepts;
            let wanted = if accepts { Interest::Read } else { Interest::None };
            // It was watched before, so changing the interest does not fail.
            let _ = context.rewatch(LISTENER, wanted);
        }
    }
}

/// The parts that a predecessor left, and the state for a successor.
pub type KeptParts = (Box<kept::Parts>, Keeping);

/// Listens, on a predecessor's socket if there is one.
pub fn listen(
    config: &Config,
    kept: Option<KeptParts>,
    bin: &Bin,
) -> std::io::Result<(Listener, Option<KeptParts>)> {
    let Some((mut parts, keeping)) = kept else { return Ok((Listener::bind(config, bin)?, None)) };
    let listener = match parts.found.remove(&slots::LISTENER) {
        Some(socket) => Listener::resume(socket, config, bin)?,
        None => {
            let listener = Listener::bind(config, bin)?;
            parts.shelf.put(slots::LISTENER, listener.file())?;
            listener
        }
    };
    Ok((listener, Some((parts, keeping))))
}
