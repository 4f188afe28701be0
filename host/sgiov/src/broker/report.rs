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

/// Connections that a report lists one by one, where the rest is counted, and listeners.
const LISTED: usize = 10_000;

/// The programs, listeners and connections that the engine serves.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// By network namespace.
    pub tenants: Vec<TenantReport>,
    /// Families of processes.
    pub families: Vec<FamilyReport>,
    /// Listeners, up to 10,000 of them.
    pub listeners: Vec<ListenerReport>,
    /// Connections, up to 10,000 of them.
    pub connections: Vec<ConnectionReport>,
    /// All connections.
    pub connections_in_all: usize,
    /// Arenas; for the administrator.
    pub links: usize,
    /// Shares of what carries streams to other nodes, as they were when somebody asked last; for
    /// the administrator.
    #[cfg(feature = "links")]
    #[serde(default)]
    pub shares: Option<SharesView>,
    /// Guests that have a socket function.
    #[cfg(feature = "guests")]
    #[serde(default)]
    pub guests: Vec<crate::GuestReport>,
    /// Reading policy and links anew; for the administrator.
    #[serde(default)]
    pub reloads: Reloads,
}

/// How often policy and links were read anew, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloads {
    /// How often it was tried.
    pub tried: u64,
    /// Why the last try changed nothing.
    pub error: Option<String>,
}

/// A network namespace, or a tenant of guests.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantReport {
    /// Its name of the policy, or its number, as `net:[4026531840]`.
    pub name: String,
    /// Addresses but loopback's.
    pub addresses: Vec<String>,
    /// Families in it, or guests.
    pub families: u32,
    /// Open endpoints.
    pub endpoints: u32,
    /// Bytes sent by families that are there.
    pub sent: u64,
    /// Bytes received by families that are there.
    pub received: u64,
}

/// Processes that come of each other by fork.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FamilyReport {
    /// Number of the process that began it.
    pub pid: i32,
    /// Name of its program, as the kernel has it.
    pub program: String,
    /// Its user.
    pub uid: u32,
    /// Its tenant.
    pub tenant: String,
    /// Processes.
    pub processes: usize,
    /// Open endpoints.
    pub endpoints: usize,
    /// Bytes that they sent.
    pub sent: u64,
    /// Bytes that they received.
    pub received: u64,
}

/// A listener.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerReport {
    /// Where.
    pub address: String,
    /// Number of the process that began its family.
    pub pid: i32,
    /// Its tenant.
    pub tenant: String,
    /// Connections that wait.
    pub waiting: usize,
    /// How many may.
    pub backlog: u32,
}

/// A connection; of an end whose family has ended the number is 0.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionReport {
    /// The connector's address.
    pub from: String,
    /// Number of the process that began its family; 0: on another node, or gone.
    pub from_pid: i32,
    /// The acceptor's address.
    pub to: String,
    /// As `from_pid`.
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

    /// All of it for the administrator, or what families of one tenant and user have.
    fn report(&mut self, only: Option<(crate::peer::NamespaceId, u32)>) -> Report {
        let shown = |family: &super::Family| {
            only.is_none_or(|(space, uid)| family.peer.namespace == space && family.peer.uid == uid)
        };
        let mut report = Report {
            links: if only.is_none() { self.links.iter().count() } else { 0 },
            // An error names what stands in the policy.
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
            // Of an end that is closed the other one knows as much.
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

    /// The connections of families that are shown: not all of them where few are, since anybody may
    /// ask often.
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

/// Guests, by tenant.
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
