//! The report for people.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
#[cfg(feature = "links")]
use slipway_link::SharesView;
use slipway_sgiov_spec::control::Reply;
use slipway_sgiov_spec::table::entry;

use super::links::Party;
use super::{Broker, Errno, Outcome, lack};
use crate::address::{ip, show};
#[cfg(feature = "links")]
use crate::remote::Remote;

/// The number of connections, and of listeners, that a report lists one by one. The rest is
/// counted.
const LISTED: usize = 10_000;

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
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantReport {
    /// The policy's name of it, or the kernel's, as `net:[4026531840]`.
    pub name: String,
    /// Addresses other than loopback's.
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
}

impl Broker {
    pub(super) fn report_to(&mut self, client: u32) -> Result<Outcome, Errno> {
        let client = self.clients.get(client).ok_or(Errno::INVAL)?;
        let peer = &client.peer;
        let only = (!client.administers).then_some((peer.namespace, peer.uid));
        let json = serde_json::to_vec(&self.report(only)).map_err(lack)?;
        let file = crate::sealed::write("slipway-report", &json).map_err(lack)?;
        let reply = Reply::Report { bytes: json.len() as u64 };
        Ok(Outcome::Answer(reply, vec![Arc::new(file)]))
    }

    /// Makes the report: all of it for the administrator, or the part of one tenant and user.
    fn report(&mut self, only: Option<(crate::peer::NamespaceId, u32)>) -> Report {
        let shown = |family: &super::Family| {
            only.is_none_or(|(space, uid)| family.peer.namespace == space && family.peer.uid == uid)
        };
        let mut report = Report {
            links: if only.is_none() { self.links.iter().count() } else { 0 },
            // An error quotes the policy.
            reloads: if only.is_none() { self.reloads.clone() } else { Reloads::default() },
            ..Report::default()
        };
        #[cfg(feature = "guests")]
        if only.is_none()
            && let Some(guests) = self.remote.as_ref().and_then(|ways| ways.guests.as_ref())
        {
            report.guests = guests.report();
            report.tenants = tenants_of(&report.guests);
        }
        let mut totals = std::collections::HashMap::<u32, (u64, u64)>::new();
        for (_, family) in self.families.iter().filter(|(_, family)| shown(family)) {
            let (sent, received) = family.totals();
            let total = totals.entry(family.namespace).or_default();
            *total = (total.0.wrapping_add(sent), total.1.wrapping_add(received));
            report.families.push(FamilyReport {
                pid: family.peer.pid,
                program: program(family.peer.pid),
                uid: family.peer.uid,
                tenant: self.tenant_name(family.namespace),
                processes: family.members.len(),
                endpoints: family.entries().count(),
                sent,
                received,
            });
        }
        for (_, listener) in self.listeners.iter() {
            let Some(family) = self.families.get(listener.family).filter(|family| shown(family))
            else {
                continue;
            };
            if report.listeners.len() >= LISTED {
                break;
            }
            report.listeners.push(ListenerReport {
                address: show(&listener.at),
                pid: family.peer.pid,
                tenant: self.tenant_name(listener.namespace),
                waiting: listener.queue.len(),
                backlog: listener.backlog,
            });
        }
        for number in self.of(only) {
            let Some(connection) = self.connections.get(number) else { continue };
            let ends = [
                connection.end(connection.connector),
                connection.end(connection.connector.other()),
            ];
            let family = |party: Party| match party {
                Party::Family(number) => self.families.get(number),
                Party::Engine | Party::Gone => None,
            };
            let [from, to] = ends.map(|end| family(end.party).filter(|_| !end.closed));
            if ![from, to].into_iter().flatten().any(shown) {
                continue;
            }
            report.connections_in_all += 1;
            if report.connections.len() >= LISTED {
                continue;
            }
            // The counters of a closed end are taken from the other end.
            let word = |mine: usize, theirs: usize| match (from, to) {
                (Some(family), _) => family.table.word(ends[0].entry, mine),
                (None, Some(family)) => family.table.word(ends[1].entry, theirs),
                (None, None) => 0,
            };
            report.connections.push(ConnectionReport {
                from: show(&ends[0].local),
                from_pid: from.map_or(0, |family| family.peer.pid),
                to: show(&ends[1].local),
                to_pid: to.map_or(0, |family| family.peer.pid),
                sent: word(entry::SENT, entry::RECEIVED),
                received: word(entry::RECEIVED, entry::SENT),
            });
        }
        for (number, (sent, received)) in totals {
            let name = self.tenant_name(number);
            let Some(space) = self.namespaces.get_mut(number) else { continue };
            let addresses = space.addresses();
            let text =
                |own: &[u8; 16]| ip(&slipway_sgiov_spec::Address { ip: *own, port: 0 }).to_string();
            report.tenants.push(TenantReport {
                name,
                addresses: addresses.iter().map(text).collect(),
                families: space.families,
                endpoints: space.endpoints,
                sent: sent.wrapping_add(if only.is_none() { space.past.0 } else { 0 }),
                received: received.wrapping_add(if only.is_none() { space.past.1 } else { 0 }),
            });
        }
        #[cfg(feature = "links")]
        if only.is_none() {
            report.shares = self.remote.as_mut().and_then(|remote| remote.shares());
        }
        report.tenants.sort_by(|a, b| a.name.cmp(&b.name));
        report
    }

    /// Returns the connections of the families in a report. It does not look at all connections for
    /// a report of few families, since any program may ask often.
    fn of(&self, only: Option<(crate::peer::NamespaceId, u32)>) -> BTreeSet<u32> {
        let Some((space, uid)) = only else {
            return self.connections.iter().map(|(number, _)| number).collect();
        };
        let shown =
            |family: &&super::Family| family.peer.namespace == space && family.peer.uid == uid;
        let families = self.families.iter().map(|(_, family)| family).filter(shown);
        families.flat_map(|family| family.entries().map(|(_, number, _)| number)).collect()
    }

    fn tenant_name(&self, namespace: u32) -> String {
        self.namespaces.get(namespace).map_or_else(String::new, crate::namespace::Namespace::name)
    }
}

/// Returns guests by tenant.
#[cfg(feature = "guests")]
fn tenants_of(guests: &[crate::GuestReport]) -> Vec<TenantReport> {
    let mut tenants = std::collections::BTreeMap::<&str, TenantReport>::new();
    for guest in guests {
        let tenant = tenants.entry(&guest.tenant).or_insert_with(|| TenantReport {
            name: guest.tenant.clone(),
            addresses: Vec::new(),
            families: 0,
            endpoints: 0,
            sent: 0,
            received: 0,
        });
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
