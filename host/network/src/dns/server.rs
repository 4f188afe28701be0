//! The sockets of a network's name server.
//!
//! The resources of a sandbox are limited: the number of queries in flight to the host's resolvers,
//! the number of connections, the time for each, and the sandbox's share of each number, which
//! leaves something for the others. The server drops queries and connections beyond that, as a busy
//! server would.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

use simple_dns::RCODE;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

use super::{Answer, MAX_UDP, Zone, answer, failure, upstream};
use crate::ledger::Lease;
use crate::shares::Shares;
use crate::sockets::{self, SocketKind};
use crate::{Error, Result};

/// The most queries in flight to the host's resolvers, for each network; see [`Shares`].
const UNDER_WAY: usize = 512;
/// The most connections, for each network; see [`Shares`].
const CONNECTIONS: usize = 128;
/// The longest time to wait for the next query of a connection, and for room for an answer.
const SILENCE: Duration = Duration::from_secs(10);

/// A network's name server. Dropping it ends all of its tasks.
pub struct Server {
    zone: Arc<RwLock<Zone>>,
    tasks: JoinSet<()>,
}

/// The parts of a server that all of its tasks have.
struct Shared {
    zone: Arc<RwLock<Zone>>,
    resolv_conf: PathBuf,
    /// Queries by UDP that wait for the host's resolvers.
    under_way: Arc<Shares>,
    connections: Arc<Shares>,
}

impl Server {
    /// Serves `zone` at these addresses, on the runtime `on`. The file `resolv_conf` names the
    /// resolvers that are asked for other names.
    ///
    /// # Errors
    /// [`Error::Host`]: the host does not have an address, or another program listens on it.
    pub fn start(
        addresses: &[SocketAddr],
        zone: Zone,
        resolv_conf: PathBuf,
        on: &tokio::runtime::Handle,
    ) -> Result<Self> {
        let _entered = on.enter();
        let zone = Arc::new(RwLock::new(zone));
        let shared = Arc::new(Shared {
            zone: Arc::clone(&zone),
            resolv_conf,
            under_way: Shares::new(UNDER_WAY),
            connections: Shares::new(CONNECTIONS),
        });
        let mut tasks = JoinSet::new();
        for address in addresses {
            let failed = || Error::host(format!("cannot answer names on {address}"));
            let udp = sockets::bind(*address, SocketKind::Datagram).map_err(failed())?;
            let udp = UdpSocket::from_std(udp.into()).map_err(failed())?;
            let tcp = sockets::bind(*address, SocketKind::Stream).map_err(failed())?;
            let tcp = TcpListener::from_std(tcp.into()).map_err(failed())?;
            tasks.spawn_on(datagrams(Arc::clone(&shared), Arc::new(udp)), on);
            tasks.spawn_on(streams(Arc::clone(&shared), tcp), on);
        }
        Ok(Self { zone, tasks })
    }

    /// Ends the server: on return its addresses are free.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
    }

    /// Replaces the zone.
    pub fn set(&self, zone: Zone) {
        *self.zone() = zone;
    }

    /// Adds the names of a new attachment's lease.
    pub fn add(&self, id: &str, lease: &Lease) {
        self.zone().add(id, lease);
    }

    /// Adds the names of a lease if no other lease has one of them. Returns whether it did.
    pub fn add_new(&self, id: &str, lease: &Lease) -> bool {
        self.zone().add_new(id, lease)
    }

    /// Removes the names of a lease that was added with the id.
    pub fn remove(&self, id: &str, lease: &Lease) {
        self.zone().remove(id, lease);
    }

    /// Locks the zone for a change.
    fn zone(&self) -> RwLockWriteGuard<'_, Zone> {
        self.zone.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Locks the zone for an answer.
    fn zone(&self) -> RwLockReadGuard<'_, Zone> {
        self.zone.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn serves(&self, client: IpAddr) -> bool {
        self.zone().serves(client)
    }

    fn answer(&self, query: &[u8]) -> Answer {
        answer(&self.zone(), query)
    }
}

/// Answers the queries that come by UDP. Queries for the host's resolvers have tasks of their own,
/// and are dropped if the client has its share of them already.
async fn datagrams(shared: Arc<Shared>, socket: Arc<UdpSocket>) {
    let mut buffer = vec![0; MAX_UDP];
    // These tasks end with this one.
    let mut questions = JoinSet::new();
    loop {
        while questions.try_join_next().is_some() {}
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else {
            // Either an error that the network reported about an earlier answer, or a permanent
            // one.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        if !shared.serves(client.ip()) {
            continue;
        }
        let query = &buffer[..length];
        match shared.answer(query) {
            Answer::Reply(reply) => drop(socket.try_send_to(&reply, client)),
            Answer::Nothing => {}
            Answer::Forward => {
                let Some(share) = shared.under_way.take(client.ip()) else { continue };
                let asking = forward(shared.resolv_conf.clone(), query.to_vec());
                // A weak reference: a query in flight must not keep the address from the next
                // server.
                let socket: Weak<UdpSocket> = Arc::downgrade(&socket);
                questions.spawn(async move {
                    let reply = asking.await;
                    if let Some(socket) = socket.upgrade() {
                        let _ = socket.try_send_to(&reply, client);
                    }
                    drop(share);
                });
            }
        }
    }
}

/// Returns the reply of the host's resolvers to a query that came by UDP.
async fn forward(resolv_conf: PathBuf, query: Vec<u8>) -> Vec<u8> {
    let servers = upstream::servers(&resolv_conf).await;
    let reply = upstream::ask(&servers, &query).await;
    reply.unwrap_or_else(|| failure(&query, RCODE::ServerFailure))
}

/// Accepts TCP connections, each of which has a task of its own.
async fn streams(shared: Arc<Shared>, listener: TcpListener) {
    // These tasks end with this one.
    let mut conversations = JoinSet::new();
    loop {
        while conversations.try_join_next().is_some() {}
        let Ok((stream, client)) = listener.accept().await else {
            // No descriptors are left, most likely.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        if !shared.serves(client.ip()) {
            continue;
        }
        let Some(share) = shared.connections.take(client.ip()) else { continue };
        let shared = Arc::clone(&shared);
        conversations.spawn(async move {
            // A client that breaks off gets no answer.
            let _ = converse(&shared, stream).await;
            drop(share);
        });
    }
}

/// Answers one query after the other, each with its length before it (RFC 1035, section 4.2.2).
async fn converse(shared: &Shared, mut stream: TcpStream) -> std::io::Result<()> {
    loop {
        let query = tokio::time::timeout(SILENCE, read(&mut stream)).await??;
        let decided = shared.answer(&query);
        let reply = match decided {
            Answer::Reply(reply) => reply,
            Answer::Nothing => return Ok(()),
            Answer::Forward => {
                let servers = upstream::servers(&shared.resolv_conf).await;
                let reply = upstream::ask_stream(&servers, &query).await;
                reply.unwrap_or_else(|| failure(&query, RCODE::ServerFailure))
            }
        };
        let length = u16::try_from(reply.len()).map_err(std::io::Error::other)?;
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend(reply);
        tokio::time::timeout(SILENCE, stream.write_all(&bytes)).await??;
    }
}

/// Reads a query with its length before it, at most [`MAX_UDP`] bytes.
async fn read(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let length = usize::from(stream.read_u16().await?);
    if length > MAX_UDP {
        return Err(std::io::Error::other("the query is too long"));
    }
    let mut query = vec![0; length];
    stream.read_exact(&mut query).await?;
    Ok(query)
}
