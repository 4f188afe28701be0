//! The connection of an endpoint's client.

use std::time::Instant;

use slipway_reactor::{Context, Interest};

use super::ready::CLIENT;
use crate::server::Session;

/// The connection of the client.
pub struct Connection {
    pub session: Box<Session>,
    pub since: Instant,
    /// The interest with which the connection is watched.
    interest: Interest,
    /// The last turn left messages unread.
    pub more: bool,
    /// The client has a thread of its own.
    pub private: bool,
}

impl Connection {
    pub fn new(session: Session, since: Instant) -> Self {
        let (session, interest) = (Box::new(session), Interest::Read);
        Self { session, since, interest, more: true, private: false }
    }

    /// Watches the connection on the reactor that the endpoint has come to.
    pub fn arrive(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        self.interest = Interest::Read;
        self.session.channel.with(|wire| context.watch(wire.file(), Interest::Read, CLIENT))
    }

    /// Watches the connection for what the session waits for.
    pub fn watch(&mut self, context: &mut Context<'_>) {
        let wanted = match (self.session.is_pending(), self.session.has_output()) {
            (false, false) => Interest::Read,
            (false, true) => Interest::Both,
            (true, false) => Interest::None,
            (true, true) => Interest::Write,
        };
        if wanted != self.interest {
            self.interest = wanted;
            // It was watched before, so changing the interest does not fail.
            let _ = context.rewatch(CLIENT, wanted);
        }
    }
}
