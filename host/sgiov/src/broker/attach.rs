//! The beginning of families, their growth by fork, and their end.

use std::collections::HashMap;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use slipway_sgiov_spec::control::{Reply, VERSION};

use super::family::{self, Family};
use super::links::Party;
use super::{Broker, Client, Errno, Outcome, lack};
use crate::accounts::Resource;
use crate::remote::StreamCarrier;
use crate::table::{ENTRIES, LINKS};

/// The number of a child's entries whose memory in the engine counts as one descriptor.
const ENTRIES_A_PAGE: u64 = 256;

impl Broker {
    pub(super) fn attach(&mut self, number: u32, version: u32) -> Result<Outcome, Errno> {
        if version != VERSION {
            self.log.line(
                "version",
                format_args!(
                    "a process speaks version {version} of the socket protocol, this engine \
                     {VERSION}"
                ),
            );
            return Err(Errno::PROTONOSUPPORT);
        }
        let client = self.clients.get_mut(number).ok_or(Errno::INVAL)?;
        let (peer, account) = (client.peer.clone(), client.account.clone());
        // Steps that may fail come first.
        let held = [
            account.hold(Resource::Descriptors, family::DESCRIPTORS)?,
            account.hold(Resource::Mappings, 1)?,
        ];
        let mut family = Family::new(peer.clone(), account, held).map_err(lack)?;
        if let Some(greeting) = client.greeting.take() {
            self.greetings.done(greeting);
        }
        family.namespace = self.namespaces.enter(&peer, &self.policy);
        family.members.insert(number);
        let files = vec![family.table.file.clone(), family.bell.clone()];
        let (table, bell) = (family.table.memory(), family.bell.clone());
        let signals = slipway_family::Family::new(table, ENTRIES as usize, LINKS.into(), bell);
        let tenant = self.namespaces.get(family.namespace).map(|space| space.name());
        let number = self.families.insert(family);
        client.family = Some(number);
        if let Some((remote, signals)) = self.remote.as_mut().zip(signals) {
            remote.family(number, signals.of_tenant(&tenant.unwrap_or_default()));
        }
        let reply = Reply::Attached { entries: ENTRIES.into(), links: LINKS.into() };
        Ok(Outcome::Answer(reply, files))
    }

    pub(super) fn fork(&mut self, parent: u32, family: u32) -> Result<Outcome, Errno> {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).map_err(lack)?;
        let client = self.clients.get(parent).ok_or(Errno::INVAL)?;
        // The engine's memory of a child's entries is counted in pages, each as a descriptor.
        let remembers = client.entries.len() as u64 / ENTRIES_A_PAGE;
        let connection = client.account.hold(Resource::Descriptors, 1 + remembers)?;
        crate::wire::bound_replies(std::os::fd::AsFd::as_fd(&ours));
        let child = Client {
            peer: client.peer.clone(),
            account: client.account.clone(),
            _connection: connection,
            administers: false,
            greeting: None,
            family: Some(family),
            entries: client.entries.clone(),
            listeners: client.listeners.clone(),
            given: client.given.clone(),
            ticket: None,
            shares: client.shares,
            groups: HashMap::new(),
            proves: None,
        };
        for entry in &child.entries {
            if let Some(end) = self.end_of(family, *entry) {
                end.holders += 1;
            }
        }
        for listener in &child.listeners {
            self.listeners.add_holder(*listener);
        }
        let client = self.clients.insert(child);
        if let Some(family) = self.families.get_mut(family) {
            family.members.insert(client);
        }
        Ok(Outcome::Forked { client, ours, theirs: std::sync::Arc::new(theirs) })
    }

    /// Ends a family whose last process has gone. All that its processes held is finished already.
    pub(super) fn end_family(&mut self, number: u32) {
        if let Some(remote) = &mut self.remote {
            remote.family_ended(number);
        }
        // The next family may have the number before anybody asks who could not be woken.
        self.unheard.remove(&number);
        for link in self.links.part(Party::Family(number)) {
            self.end_link(link);
        }
        if let Some(family) = self.families.remove(number) {
            let (sent, received) = family.totals();
            if let Some(space) = self.namespaces.get_mut(family.namespace) {
                space.past.0 = space.past.0.wrapping_add(sent);
                space.past.1 = space.past.1.wrapping_add(received);
            }
            self.namespaces.leave(family.namespace);
            // The table's memory is freed with it, which takes time.
            family.account.clone().bin.discard_value(family);
        }
    }

    /// Ends a link that has no streams: its parties forget it.
    pub(super) fn end_link(&mut self, number: u32) {
        let Some(link) = self.links.remove(number) else { return };
        link.cleaning.end();
        let ends = link.ends;
        match &mut self.remote {
            Some(remote) if link.supplied => remote.arena_gone(&link.arena),
            _ => link.punch(),
        }
        for end in ends {
            let Party::Family(family) = end.party else { continue };
            let Some(family) = self.families.get_mut(family) else { continue };
            family.set_link(end.number, None);
            for member in &family.members {
                if let Some(client) = self.clients.get_mut(*member) {
                    client.given.remove(&end.number);
                    client.groups.remove(&number);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::broker::connect::tests::{attach, listening};

    /// A program that cannot be woken ends, and another one attaches, before the engine disconnects
    /// those that cannot be woken.
    #[test]
    fn a_family_that_could_not_be_woken_takes_no_later_one_with_it() {
        let (mut broker, client, _) = listening();
        let ended = broker.clients.get(client).unwrap().family;
        broker.unheard.extend(ended);
        assert_eq!(broker.unheard(), Some(client));
        broker.leave(client);
        let next = attach(&mut broker);
        assert_eq!(broker.clients.get(next).unwrap().family, ended);
        assert_eq!(broker.unheard(), None);
    }
}
