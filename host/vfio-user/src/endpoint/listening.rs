//! The state "listening": the next client is connected.

use std::os::fd::AsFd;
use std::sync::Arc;

use slipway_peer::{Foreign, Peer};
use slipway_reactor::{Context, Interest};
use slipway_vfio_user_wire::Wire;

use super::connected::Connection;
use super::ready::CLIENT;
use super::turn::NO_INTERRUPTS;
use crate::Config;
use crate::channel::Channel;
use crate::device::Device;
use crate::keeping::Keeping;
use crate::server::Session;
use crate::stats::{ClientInfo, Live, add};

/// The parts of an endpoint that a new client's connection needs.
pub struct Acceptor<'a> {
    pub config: &'a Arc<Config>,
    pub device: &'a mut Device,
    /// The state for a successor, which goes to the session of a client that is kept.
    pub kept: &'a mut Option<Box<Keeping>>,
    pub live: &'a Arc<Live>,
}

impl Acceptor<'_> {
    /// Makes the connection of a client. Returns `None` if the client is refused.
    ///
    /// # Errors
    /// No descriptor is left to watch the connection, or the keeper does not take it. The client is
    /// then refused, and nothing of it is kept.
    pub fn connect(
        &mut self,
        (socket, peer): (Foreign, Peer),
        context: &mut Context<'_>,
    ) -> std::io::Result<Option<Connection>> {
        if !slipway_peer::eventfd::can_raise() {
            add(&self.live.refused, 1);
            self.live.disconnected(NO_INTERRUPTS);
            return Ok(None);
        }
        // The failure was that of an earlier client.
        let _ = self.device.sink.failure.take();
        // Before the keeper has the connection: it would stay open there if this failed.
        context.watch(socket.as_fd(), Interest::Read, CLIENT)?;
        if let Some(kept) = self.kept.as_mut().filter(|_| !self.device.is_held()) {
            kept.connect(&socket, peer).inspect_err(|_| context.unwatch(CLIENT))?;
        }
        let wire = Wire::new(socket, &self.device.bin, self.config.max_queued_bytes);
        let channel = Channel::new(wire, self.config.remote_deadline);
        let live = self.live.clone();
        live.connected(ClientInfo { pid: peer.pid, uid: peer.uid, private: false });
        let mut session = Session::new(channel, self.config.clone(), live);
        // An endpoint that has served a client returns home first, so this changes nothing.
        let _ = session.settle_on_thread(self.device, false);
        if self.device.is_held() {
            session.released = self.kept.take_if(|kept| kept.may_resume(peer.uid));
        } else {
            session.kept = self.kept.take();
        }
        Ok(Some(Connection::new(session, context.now())))
    }
}
