//! The report for people: `slipway socket ls` and `slipway socket top` show it.
//!
//! A new field is one of [`Report`] or of the structures in it, with `#[serde(default)]`, since an
//! engine of an earlier build does not send it; of a guest one of `GuestReport` (`guests/book.rs`).
//! [`Broker`] fills it in here, for an administrator alone in `add_for_administrator`: other
//! callers see their own user's families in their own network namespace. `ls --json` prints it
//! without further code. A column of the tables is in `front/cli`, `socket/show.rs` or `top.rs`.
//! Tests: `tests/engine.rs`, `guests_as_root.rs`, and `hostile_as_root.rs` for what others may not
//! see; `tests/e2e/55-sockets.sh`.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
#[cfg(feature = "links")]
use slipway_link::SharesView;
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::Reply;
use slipway_sgiov_spec::table::entry;

use super::connection::ConnectionEnd;
use super::family::Family;
use super::links::Party;
use super::{Broker, Errno, Outcome, lack};
use crate::address::{ip, show};
use crate::peer::NamespaceId;
#[cfg(feature = "links")]
use crate::remote::StreamCarrier;

/// The number of connections, and of listeners, that a report lists one by one. The rest is
/// counted.
const LISTED: usize = 10_000;
/// The number of addresses that a report has of a network namespace, which may have thousands: the
/// engine's thread, which serves all programs, writes them down.
const ADDRESSES_LISTED: usize = 64;

/// The programs, listeners and connections that the engine serves.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The tenants, by network namespace.
    pub tenants: Vec<TenantReport>,
    /// Families of processes.
    pub families: Vec<FamilyReport>,
    /// Listeners, up to 10,000 of them.
    pub listeners: Vec<ListenerReport>,
    /// Connections, up to 10,000 of them.
    pub connections: Vec<ConnectionReport>,
    /// The number of all connections.
    pub connections_in_all: usize,
    /// The number of arenas; for the administrator only.
    pub links: usize,
    /// The number of tickets that no process has used yet; for the administrator only.
    #[serde(default)]
    pub tickets: usize,
    /// Bytes that programs have sent past the kernel since the engine began, as their tables say,
    /// those in guests left out; for the administrator only.
    #[serde(default)]
    pub sent: u64,
    /// The bytes that they received, as `sent`.
    #[serde(default)]
    pub received: u64,
    /// The shares of the carrier of streams to other nodes, as of the last report; for the
    /// administrator only.
    #[cfg(feature = "links")]
    #[serde(default)]
    pub shares: Option<SharesView>,
    /// Guests that have a socket function.
    #[cfg(feature = "guests")]
    #[serde(default)]
    pub guests: Vec<crate::GuestReport>,
    /// Reloads of policy and links; for the administrator only.
    #[serde(default)]
    pub reloads: Reloads,
}

/// The number of reloads of policy and links, and the last error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloads {
    /// The number of attempts.
    pub tried: u64,
    /// The error of the last attempt, or `None` if it succeeded.
    pub error: Option<String>,
}

/// A network namespace, or a tenant of guests.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantReport {
    /// The policy's name of it, or the kernel's, as `net:[4026531840]`.
    pub name: String,
    /// The first 64 addresses other than loopback's, as the kernel told them last.
    pub addresses: Vec<String>,
    /// The number of its families, or of its guests.
    pub families: u32,
    /// The number of open endpoints.
    pub endpoints: u32,
    /// Bytes sent by its present families.
    pub sent: u64,
    /// Bytes received by its present families.
    pub received: u64,
}

/// A family: processes that descend from one process by fork.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FamilyReport {
    /// The id of the process that began it.
    pub pid: i32,
    /// The kernel's name of its program.
    pub program: String,
    /// The user id of the process that began it.
    pub uid: u32,
    /// Its tenant.
    pub tenant: String,
    /// The number of its processes.
    pub processes: usize,
    /// The number of open endpoints.
    pub endpoints: usize,
    /// Bytes that its endpoints sent.
    pub sent: u64,
    /// Bytes that its endpoints received.
    pub received: u64,
}

/// A listener.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerReport {
    /// The address at which it listens.
    pub address: String,
    /// The id of the process that began its family.
    pub pid: i32,
    /// Its tenant.
    pub tenant: String,
    /// The number of connections that wait.
    pub waiting: usize,
    /// The number of connections that may wait.
    pub backlog: u32,
}

/// A connection.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionReport {
    /// The connector's address.
    pub from: String,
    /// The id of the process that began the connector's family; 0 if that is on another node, or
    /// has ended.
    pub from_pid: i32,
    /// The acceptor's address.
    pub to: String,
    /// The id of the process that began the acceptor's family, as `from_pid`.
    pub to_pid: i32,
    /// Bytes that the connector sent.
    pub sent: u64,
    /// Bytes that the connector received.
    pub received: u64,
    /// Bytes that were sent and not received yet, both ways; `None` unless both ends are open here.
    #[serde(default)]
    pub in_flight: Option<u64>,
}

/// The user and the network namespace whose families a report shows, or `None` for all of them.
#[derive(Clone, Copy)]
struct Scope(Option<(NamespaceId, u32)>);

impl Scope {
    fn has(self, family: &Family) -> bool {
        self.0.is_none_or(|own| own == (family.peer.namespace, family.peer.uid))
    }
}

impl Broker {
    pub(super) fn report_to(&mut self, client: u32) -> Result<Outcome, Errno> {
        let client = self.clients.get(client).ok_or(Errno::INVAL)?;
        let peer = &client.peer;
        let scope = Scope((!client.administers).then_some((peer.namespace, peer.uid)));
        let json = serde_json::to_vec(&self.report(scope)).map_err(lack)?;
        let file = crate::sealed::write("slipway-report", &json).map_err(lack)?;
        let reply = Reply::Report { bytes: json.len() as u64 };
        Ok(Outcome::Answer(reply, vec![Arc::new(file)]))
    }

    fn report(&mut self, scope: Scope) -> Report {
        let families = self.families.iter().filter(|(_, family)| scope.has(family));
        let families: Vec<(u32, FamilyReport)> =
            families.map(|(_, family)| (family.namespace, self.family_report(family))).collect();
        let listeners = self.listeners_in(scope);
        let (connections, connections_in_all) = self.connections_in(scope);
        let mut report = Report { listeners, connections, connections_in_all, ..Report::default() };
        if scope.0.is_none() {
            self.add_for_administrator(&mut report);
        }
        report.tenants.extend(self.tenants_of_families(scope, &families));
        report.tenants.sort_by(|a, b| a.name.cmp(&b.name));
        report.families = families.into_iter().map(|(_, family)| family).collect();
        report
    }

    /// Adds what only the administrator is told. The error of a reload quotes the policy.
    fn add_for_administrator(&mut self, report: &mut Report) {
        report.links = self.links.iter().count();
        report.tickets = self.clients.iter().filter(|(_, one)| one.ticket.is_some()).count();
        report.reloads = self.reloads.clone();
        (report.sent, report.received) = self.bytes_in_all();
        #[cfg(feature = "guests")]
        if let Some(guests) = self.remote.as_ref().and_then(|remote| remote.guests.as_ref()) {
            report.guests = guests.report();
            report.tenants = tenants_of(&report.guests);
        }
        #[cfg(feature = "links")]
        {
            report.shares = self.remote.as_mut().and_then(|remote| remote.shares());
        }
    }

    /// Returns the bytes that all families sent and received, also those that have ended.
    fn bytes_in_all(&self) -> (u64, u64) {
        self.families.iter().fold(self.namespaces.past(), |(sent, received), (_, family)| {
            let own = family.totals();
            (sent.wrapping_add(own.0), received.wrapping_add(own.1))
        })
    }

    fn family_report(&self, family: &Family) -> FamilyReport {
        let (sent, received) = family.totals();
        FamilyReport {
            pid: family.peer.pid,
            program: program(family.peer.pid),
            uid: family.peer.uid,
            tenant: self.tenant_name(family.namespace),
            processes: family.members.len(),
            endpoints: family.entries().count(),
            sent,
            received,
        }
    }

    /// Returns the listeners in `scope`, up to [`LISTED`] of them.
    fn listeners_in(&self, scope: Scope) -> Vec<ListenerReport> {
        let listeners = self.listeners.iter().filter_map(|(_, listener)| {
            let family = self.families.get(listener.family).filter(|family| scope.has(family))?;
            Some(ListenerReport {
                address: show(&listener.at),
                pid: family.peer.pid,
                tenant: self.tenant_name(listener.namespace),
                waiting: listener.queue.len(),
                backlog: listener.backlog,
            })
        });
        listeners.take(LISTED).collect()
    }

    /// Returns the connections in `scope`, up to [`LISTED`] of them, and the number of all.
    fn connections_in(&self, scope: Scope) -> (Vec<ConnectionReport>, usize) {
        let (mut listed, mut in_all) = (Vec::new(), 0);
        for number in self.numbers_in(scope) {
            let Some(connection) = self.connections.get(number) else { continue };
            let connector = connection.connector;
            let ends = [connector, connector.other()].map(|side| connection.end(side));
            let families = ends.map(|end| match end.party {
                Party::Family(number) if !end.closed => self.families.get(number),
                _ => None,
            });
            if !families.into_iter().flatten().any(|family| scope.has(family)) {
                continue;
            }
            in_all += 1;
            if listed.len() < LISTED {
                listed.push(connection_report(ends, families));
            }
        }
        (listed, in_all)
    }

    /// Returns the numbers of the connections of the families in `scope`. It does not look at all
    /// connections for a report of few families, since any program may ask often.
    fn numbers_in(&self, scope: Scope) -> BTreeSet<u32> {
        if scope.0.is_none() {
            return self.connections.iter().map(|(number, _)| number).collect();
        }
        let families = self.families.iter().filter(|(_, family)| scope.has(family));
        families.flat_map(|(_, family)| family.entries().map(|(_, number, _)| number)).collect()
    }

    /// Returns the tenants of `families`, each of which has the number of its namespace with it.
    fn tenants_of_families(
        &mut self,
        scope: Scope,
        families: &[(u32, FamilyReport)],
    ) -> Vec<TenantReport> {
        let mut totals = HashMap::<u32, (u64, u64)>::new();
        for (namespace, family) in families {
            let (sent, received) = totals.entry(*namespace).or_default();
            *sent = sent.wrapping_add(family.sent);
            *received = received.wrapping_add(family.received);
        }
        let text = |own: &[u8; 16]| ip(&Address { ip: *own, port: 0 }).to_string();
        let tenant = |(namespace, (sent, received)): (u32, (u64, u64))| {
            let space = self.namespaces.get_mut(namespace)?;
            let past = if scope.0.is_none() { space.past } else { (0, 0) };
            Some(TenantReport {
                name: space.name(),
                addresses: space.addresses().take(ADDRESSES_LISTED).map(text).collect(),
                families: space.families,
                endpoints: space.endpoints,
                sent: sent.wrapping_add(past.0),
                received: received.wrapping_add(past.1),
            })
        };
        totals.into_iter().filter_map(tenant).collect()
    }

    fn tenant_name(&self, namespace: u32) -> String {
        self.namespaces.get(namespace).map_or_else(String::new, crate::namespace::Namespace::name)
    }
}

/// Reports a connection of which each end is open in one of `families`, or is not here.
fn connection_report(
    [from, to]: [&ConnectionEnd; 2],
    families: [Option<&Family>; 2],
) -> ConnectionReport {
    // The counters of a closed end are taken from the other end.
    let word = |mine: usize, theirs: usize| match families {
        [Some(family), _] => family.table.word(from.entry, mine),
        [None, Some(family)] => family.table.word(to.entry, theirs),
        [None, None] => 0,
    };
    let in_flight = match families {
        [Some(connector), Some(acceptor)] => {
            let [there, back] = [(connector, from, acceptor, to), (acceptor, to, connector, from)]
                .map(|(sender, sends, receiver, receives)| {
                    // The counters are the processes' own, and may say anything.
                    let sent = sender.table.word(sends.entry, entry::SENT);
                    sent.saturating_sub(receiver.table.word(receives.entry, entry::RECEIVED))
                });
            Some(there.saturating_add(back))
        }
        _ => None,
    };
    let [from_pid, to_pid] = families.map(|family| family.map_or(0, |family| family.peer.pid));
    ConnectionReport {
        from: show(&from.local),
        from_pid,
        to: show(&to.local),
        to_pid,
        sent: word(entry::SENT, entry::RECEIVED),
        received: word(entry::RECEIVED, entry::SENT),
        in_flight,
    }
}

/// Returns guests by tenant.
#[cfg(feature = "guests")]
fn tenants_of(guests: &[crate::GuestReport]) -> Vec<TenantReport> {
    let mut tenants = std::collections::BTreeMap::<&str, TenantReport>::new();
    for guest in guests {
        let new = || TenantReport { name: guest.tenant.clone(), ..TenantReport::default() };
        let tenant = tenants.entry(&guest.tenant).or_insert_with(new);
        tenant.addresses.extend_from_slice(&guest.addresses);
        tenant.families += 1;
        tenant.endpoints += u32::try_from(guest.streams).unwrap_or(u32::MAX);
        tenant.sent = tenant.sent.wrapping_add(guest.sent);
        tenant.received = tenant.received.wrapping_add(guest.received);
    }
    tenants.into_values().collect()
}

/// Returns the kernel's name of a process, which is empty if the process has ended.
fn program(pid: i32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().chars().filter(|letter| !letter.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use slipway_sgiov_spec::control::{Request, VERSION};

    use super::*;
    use crate::policy::Policy;

    /// A namespace may have thousands of addresses, which its own programs choose.
    #[test]
    fn a_report_has_a_bounded_number_of_addresses_of_a_namespace() {
        let (here, _there) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = crate::peer::peer(here.as_fd()).unwrap();
        let mut broker = Broker::new(Policy::default(), None);
        let (client, _) = broker.join(peer, false).unwrap();
        broker.request(client, Request::Attach { version: VERSION }, Vec::new());
        let address = |number: u16| {
            let [high, low] = number.to_be_bytes();
            Address::v4([10, 0, high, low], 0).ip
        };
        for (count, listed) in [(3, 3), (16_000, ADDRESSES_LISTED)] {
            let all: Vec<_> = (1..=count).map(address).collect();
            broker.namespaces.get_mut(0).unwrap().set_addresses(&all);
            let report = broker.report(Scope(None));
            let [tenant] = &report.tenants[..] else { panic!("one namespace has a family") };
            assert_eq!(tenant.addresses.len(), listed);
            assert_eq!(tenant.addresses[0], "10.0.0.1");
        }
    }
}
