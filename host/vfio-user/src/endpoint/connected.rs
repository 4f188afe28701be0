//! The state "connected": a client is served.

use std::borrow::Cow;
use std::time::Instant;

use slipway_reactor::{Context, Interest, Step};

use super::facts::Facts;
use super::ready::{CLIENT, Ready};
use crate::Config;
use crate::device::Device;
use crate::inspect::Stage;
use crate::keeping::Keeping;
use crate::server::{Session, SessionTurn};
use slipway_vfio_user_wire::End;

/// The connection of the client.
pub struct Connection {
    session: Box<Session>,
    since: Instant,
    /// The interest with which the connection is watched.
    interest: Interest,
    /// The last turn left messages unread.
    more: bool,
}

/// The outcome of a step of the connection.
pub enum Outcome {
    /// The client stays connected.
    Stays,
    /// The client needs a thread of its own; [`Connection::settle`] goes on there.
    Moves,
    /// The client is to be disconnected, for this reason.
    Ends(Cow<'static, str>),
}

impl Connection {
    pub fn new(session: Session, since: Instant) -> Self {
        let (session, interest) = (Box::new(session), Interest::Read);
        Self { session, since, interest, more: true }
    }

    /// Watches the connection on the reactor that the endpoint has come to.
    pub fn arrive(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        (self.interest, self.more) = (Interest::Read, true);
        self.session.channel.with(|wire| context.watch(wire.file(), Interest::Read, CLIENT))
    }

    /// Serves the client, if there is anything to do for it.
    pub fn step(
        &mut self,
        device: &mut Device,
        config: &Config,
        (ready, now): (Ready, Instant),
    ) -> Outcome {
        let session = &mut self.session;
        if session.is_pending() && ready.client {
            // The socket is not watched for input now, so this is a hang-up or an error.
            return Outcome::Ends("the client hung up while a request waited".into());
        }
        let late = now.duration_since(self.since) >= config.handshake_deadline;
        if late && !session.is_negotiated() {
            return Outcome::Ends("the client did not negotiate in time".into());
        }
        let has_kept = session.has_kept();
        if !(ready.client || ready.output || self.more || has_kept || session.is_pending()) {
            return Outcome::Stays;
        }
        match session.turn(device, now) {
            Ok(SessionTurn::Move) => Outcome::Moves,
            Ok(turn) => {
                self.more = turn == SessionTurn::More;
                Outcome::Stays
            }
            Err(end) => Outcome::Ends(end.to_string().into()),
        }
    }

    /// Answers the client that needs a thread of its own: this is that thread if `moved`, or it
    /// could not be started.
    ///
    /// # Errors
    /// The reason for which the client is to be disconnected.
    pub fn settle(&mut self, device: &mut Device, moved: bool) -> Result<(), End> {
        self.more = true;
        self.session.settle_on_thread(device, moved)
    }

    /// Shuts the connection down. Returns the state for a successor, if the session has it.
    pub fn end(&mut self) -> Option<Box<Keeping>> {
        self.session.channel.hang_up();
        self.session.kept.take().or_else(|| self.session.released.take())
    }

    /// Gives a held function up if the client does not resume it. The state for a successor is
    /// cleared first: a successor would hold a function whose own state is gone. That state becomes
    /// the endpoint's (`kept`) if the session has it.
    pub fn give_up(&mut self, device: &mut Device, kept: &mut Option<Box<Keeping>>) {
        if !self.session.gives_up || !device.is_held() {
            return;
        }
        if let Some(released) = self.session.released.take() {
            *kept = Some(released);
        }
        if let Some(kept) = kept {
            kept.disconnect();
        }
        device.abandon();
    }

    /// Returns whether the client has hung up.
    pub fn is_hung_up(&self) -> bool {
        self.session.channel.with(|wire| wire.is_hung_up())
    }

    /// Returns whether a request is quiescing the function. A poll would end the quiescence.
    pub fn is_quiescing(&self) -> bool {
        self.session.is_quiescing()
    }

    /// Returns whether a message is to be read that no descriptor announces: it came while the
    /// function waited for the client's memory.
    pub fn has_kept(&self) -> bool {
        self.session.has_kept()
    }

    /// Returns what the endpoint does for the client.
    pub fn stage(&self, device: &Device) -> Stage {
        match &self.session {
            session if !session.is_negotiated() => Stage::Negotiating,
            session if session.is_quiescing() => Stage::Quiescing,
            _ if !device.runs() => Stage::Stopped,
            _ => Stage::Connected,
        }
    }

    /// Returns whether no message is to be read or answered, unless an event tells of one.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        let session = &self.session;
        !self.more
            && !session.is_private()
            && session.is_negotiated()
            && !session.is_pending()
            && !session.is_quiescing()
    }

    /// Adds what the client waits for to the facts that decide on the endpoint's next step.
    #[inline]
    pub fn add_to(&self, facts: &mut Facts) {
        facts.pending = self.session.is_pending();
        facts.quiescing |= self.session.is_quiescing();
        facts.more = self.more;
        facts.busy = self.session.is_accessing().then_some(Step::Busy);
    }

    /// Returns the time at which a client that has not negotiated is disconnected, or `None` if it
    /// has.
    pub fn handshake(&self, config: &Config) -> Option<Instant> {
        (!self.session.is_negotiated()).then(|| self.since + config.handshake_deadline)
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
