//! execve(2): a ticket holds the endpoints that survive it until the new image resumes them.
//!
//! A ticket is a connection that holds everything the process held. The new image sends
//! [`Request::Resume`] over it, and continues over a new connection that no other process can have:
//! copies of the ticket that other programs inherited are worthless then. A ticket that is not
//! resumed, since the new image does not have the library, ends after [`PATIENCE`], and with it
//! everything that no other process holds.
//!
//! [`Request::Resume`]: slipway_sgiov_spec::control::Request::Resume

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use slipway_sgiov_spec::control::Reply;

use super::{Broker, Errno, Outcome, lack};
use crate::table::{ENTRIES, LINKS};

/// The time for which a ticket is valid.
const PATIENCE: Duration = Duration::from_secs(10);

impl Broker {
    pub(super) fn exec(&mut self, parent: u32, family: u32) -> Result<Outcome, Errno> {
        let outcome = self.fork(parent, family)?;
        if let Outcome::Forked { client, .. } = outcome
            && let Some(ticket) = self.clients.get_mut(client)
        {
            let until = Instant::now() + PATIENCE;
            ticket.ticket = Some(until);
            self.tickets.push_back((until, client));
        }
        Ok(outcome)
    }

    pub(super) fn resume(&mut self, number: u32, family: u32) -> Result<Outcome, Errno> {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).map_err(lack)?;
        crate::wire::bound_replies(std::os::fd::AsFd::as_fd(&ours));
        let there = self.families.get(family).ok_or(Errno::INVAL)?;
        let client = self.clients.get_mut(number).ok_or(Errno::INVAL)?;
        client.ticket = None;
        // The new image says whether it shares eventfds.
        client.shares = false;
        client.given.clear();
        let reply = Reply::Attached { entries: ENTRIES.into(), links: LINKS.into() };
        let files = vec![there.table.file.clone(), there.bell.clone(), Arc::new(theirs)];
        Ok(Outcome::Moved { reply, files, ours })
    }

    pub(super) fn held(&mut self, number: u32, family: u32, from: u64) -> Result<Outcome, Errno> {
        let client = self.clients.get(number).ok_or(Errno::INVAL)?;
        let from = u32::try_from(from).map_err(|_| Errno::NOENT)?;
        let entry = *client.entries.range(from..).next().ok_or(Errno::NOENT)?;
        let there = self.families.get(family).ok_or(Errno::INVAL)?;
        let (connection, side) = there.entry(entry).ok_or(Errno::NOENT)?;
        self.introduce(number, family, connection, side)
    }

    pub(super) fn held_listener(&mut self, number: u32, from: u64) -> Result<Outcome, Errno> {
        let client = self.clients.get(number).ok_or(Errno::INVAL)?;
        let from = u32::try_from(from).map_err(|_| Errno::NOENT)?;
        let listener = *client.listeners.range(from..).next().ok_or(Errno::NOENT)?;
        let there = self.listeners.get(listener).ok_or(Errno::NOENT)?;
        let reply = Reply::Listening { listener: listener.into(), at: there.at };
        Ok(Outcome::Answer(reply, vec![there.eventfd.clone()]))
    }

    /// Returns the time at which the oldest ticket ends.
    pub fn next_ticket(&self) -> Option<Instant> {
        self.tickets.front().map(|(until, _)| *until)
    }

    /// Returns a client whose ticket was not resumed in time, and which is to be disconnected.
    pub fn expired_ticket(&mut self) -> Option<u32> {
        while let Some((until, client)) = self.tickets.front().copied() {
            if until > Instant::now() {
                return None;
            }
            self.tickets.pop_front();
            if self.clients.get(client).is_some_and(|client| client.ticket == Some(until)) {
                return Some(client);
            }
        }
        None
    }
}
