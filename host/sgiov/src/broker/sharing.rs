//! Endpoints of one process that sleep on one eventfd.
//!
//! An eventfd costs the kernel half a KiB, more than the rest of an idle socket. A process with
//! very many connections that waits for all of them in one place only needs to know that one of a
//! few connections has an event, and looks at those few itself ([`Request::Share`]). So up to
//! [`SHARERS`] of its endpoints share one eventfd. The eventfd belongs to one link: only the family
//! that all its endpoints are connected to can raise it or spoil it.
//!
//! The process that will accept a connection is not known when the connection begins. If the
//! process that accepted last shares eventfds, the connector gets no eventfd at first, and asks for
//! it when it needs one ([`Request::Peer`]): no acceptor can be asleep before that.
//!
//! [`Request::Share`]: slipway_sgiov_spec::control::Request::Share
//! [`Request::Peer`]: slipway_sgiov_spec::control::Request::Peer

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use slipway_ring::cross::Side;
use slipway_sgiov_spec::control::{Reply, SHARERS};

use super::links::Party;
use super::{Broker, Errno, Outcome, lack};
use crate::accounts::{Account, Resource, ResourceHold};

/// The eventfd that an end of a connection sleeps on.
#[derive(Clone)]
pub struct Bell {
    pub eventfd: Arc<OwnedFd>,
    /// The number of the group that sleeps on it, or 0 if it is one end's own.
    pub group: u32,
    /// The account's share for it.
    pub held: Arc<ResourceHold>,
}

impl Bell {
    /// Makes an eventfd for one end.
    pub fn own(account: &Arc<Account>) -> Result<Self, Errno> {
        let held = Arc::new(account.hold(Resource::Descriptors, 1)?);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self { eventfd: Arc::new(eventfd(0, flags).map_err(lack)?), group: 0, held })
    }
}

/// The eventfd that the next endpoints of a process on one link get.
pub struct Group(Bell);

impl Group {
    fn has_room(&self) -> bool {
        // One reference is the group's own.
        Arc::strong_count(&self.0.eventfd) <= SHARERS
    }
}

impl Broker {
    /// Returns the eventfd for a new endpoint of `client` on `link`.
    pub(super) fn bell_for(&mut self, client: u32, link: u32) -> Result<Bell, Errno> {
        let client = self.clients.get_mut(client).ok_or(Errno::INVAL)?;
        if !client.shares {
            return Bell::own(&client.account);
        }
        if let Some(Group(bell)) = client.groups.get(&link).filter(|group| group.has_room()) {
            return Ok(bell.clone());
        }
        // No other thread keeps a shared eventfd (`eventfds`), so a client with many descriptors
        // gets eventfds of its own.
        if client.account.is_large(Resource::Descriptors) {
            return Bell::own(&client.account);
        }
        self.last_group = self.last_group.wrapping_add(1).max(1);
        let bell = Bell { group: self.last_group, ..Bell::own(&client.account)? };
        client.groups.insert(link, Group(bell.clone()));
        Ok(bell)
    }

    pub(super) fn share(&mut self, client: u32, on: bool) -> Outcome {
        if let Some(client) = self.clients.get_mut(client) {
            client.shares = on;
        }
        Outcome::Nothing
    }

    /// Answers with the eventfd that the other side of an endpoint sleeps on. The asking process is
    /// about to raise the eventfd and may not be able to, so it is raised here.
    pub(super) fn peer(&mut self, client: u32, family: u32, entry: u64) -> Result<Outcome, Errno> {
        let entry = u32::try_from(entry).map_err(|_| Errno::BADF)?;
        let client = self.clients.get(client).ok_or(Errno::INVAL)?;
        client.entries.contains(&entry).then_some(()).ok_or(Errno::BADF)?;
        let there = self.families.get(family).and_then(|family| family.entry(entry));
        let (connection, side) = there.ok_or(Errno::BADF)?;
        let there = self.connections.get_mut(connection).ok_or(Errno::BADF)?;
        let Some(bell) = there.bell(side.other()).cloned() else {
            if let Some(kept) = there.bells.kept {
                self.eventfd_threads.raise(kept, side.other());
            }
            return Err(Errno::AGAIN);
        };
        there.bells.later = false;
        let party = there.end(side.other()).party;
        self.tell(&bell.eventfd, party);
        self.keep(connection);
        Ok(Outcome::Answer(Reply::Done, vec![bell.eventfd]))
    }

    /// Hands the eventfds of a connection whose ends have both been introduced to another thread
    /// (`eventfds`), if the engine has many descriptors.
    pub(super) fn keep(&mut self, connection: u32) {
        let Some(there) = self.connections.get_mut(connection) else { return };
        let is_remote = there.ends.iter().any(|end| end.party == Party::Engine);
        let (Some(first), Some(second)) = (there.bell(Side::Zero), there.bell(Side::One)) else {
            return;
        };
        // The connector may still ask for the acceptor's eventfd, which stays here if it is shared.
        let is_asked_for = there.bells.later
            && there.bell(there.connector.other()).is_some_and(|bell| bell.group == 0);
        let is_large = |bell: &Bell| bell.held.account().is_large(Resource::Descriptors);
        let is_needed = is_large(first) || is_large(second);
        if !is_needed || is_remote || is_asked_for || there.bells.own() == 0 {
            return;
        }
        let pair = [first.eventfd.as_fd(), second.eventfd.as_fd()];
        if let Some(kept) = self.eventfd_threads.keep(pair) {
            there.bells.kept = Some(kept);
            for bell in &mut there.bells.here {
                bell.take_if(|bell| bell.group == 0);
            }
        }
    }
}
