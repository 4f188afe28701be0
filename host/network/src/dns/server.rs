//! The sockets of a network's name server.
//!
//! What a sandbox may use is bounded: so many questions under way to the host's resolvers, so many
//! connections, so long for each. What is more is dropped, as a busy server would.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use simple_dns::RCODE;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::{Answer, MAX_UDP, Zone, answer, failure, upstream};
use crate::sockets::{self, Kind};
use crate::{Error, Result};

/// Questions under way to the host's resolvers, for each network.
const UNDER_WAY: usize = 256;
/// Connections, for each network.
const CONNECTIONS: usize = 64;
/// How long a connection may say nothing.
const SILENCE: Duration = Duration::from_secs(10);

/// A network's name server. It ends when it is dropped.
pub struct Server {
    zone: Arc<ArcSwap<Zone>>,
    _tasks: JoinSet<()>,
}

struct Shared {
    zone: Arc<ArcSwap<Zone>>,
    resolv_conf: PathBuf,
    under_way: Arc<Semaphore>,
    connections: Arc<Semaphore>,
}

impl Server {
    /// Serves `zone` at these addresses, on the runtime `on`; `resolv_conf` names who is asked for
    /// other names.
    ///
    /// # Errors
    /// [`Error::Host`]: an address is not there, or somebody else listens on it.
    pub fn start(
        addresses: &[SocketAddr],
        zone: Zone,
        resolv_conf: PathBuf,
        on: &tokio::runtime::Handle,
    ) -> Result<Self> {
        let _entered = on.enter();
        let zone = Arc::new(ArcSwap::from_pointee(zone));
        let shared = Arc::new(Shared {
            zone: Arc::clone(&zone),
            resolv_conf,
            under_way: Arc::new(Semaphore::new(UNDER_WAY)),
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
        });
        let mut tasks = JoinSet::new();
        for address in addresses {
            let failed = || Error::host(format!("cannot answer names on {address}"));
            let udp = sockets::bind(*address, Kind::Datagram).map_err(failed())?;
            let udp = UdpSocket::from_std(udp.into()).map_err(failed())?;
            let tcp = sockets::bind(*address, Kind::Stream).map_err(failed())?;
            let tcp = TcpListener::from_std(tcp.into()).map_err(failed())?;
            tasks.spawn_on(datagrams(Arc::clone(&shared), Arc::new(udp)), on);
            tasks.spawn_on(streams(Arc::clone(&shared), tcp), on);
        }
        Ok(Self { zone, _tasks: tasks })
    }

    /// From now on these are the names.
    pub fn set(&self, zone: Zone) {
        self.zone.store(Arc::new(zone));
    }
}

impl Shared {
    fn serves(&self, client: IpAddr) -> bool {
        self.zone.load().serves(client)
    }
}

async fn datagrams(shared: Arc<Shared>, socket: Arc<UdpSocket>) {
    let mut buffer = vec![0; MAX_UDP];
    loop {
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else {
            // An error that the network reported of an earlier answer; or none that goes away.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        if !shared.serves(client.ip()) {
            continue;
        }
        let query = &buffer[..length];
        match answer(&shared.zone.load(), query) {
            Answer::Reply(reply) => drop(socket.try_send_to(&reply, client)),
            Answer::Nothing => {}
            Answer::Forward => {
                let Ok(permit) = Arc::clone(&shared.under_way).try_acquire_owned() else {
                    continue;
                };
                let (socket, query) = (Arc::clone(&socket), query.to_vec());
                let path = shared.resolv_conf.clone();
                tokio::spawn(async move {
                    let servers = upstream::servers(&path).await;
                    let reply = upstream::ask(&servers, &query).await;
                    let reply = reply.unwrap_or_else(|| failure(&query, RCODE::ServerFailure));
                    let _ = socket.send_to(&reply, client).await;
                    drop(permit);
                });
            }
        }
    }
}

async fn streams(shared: Arc<Shared>, listener: TcpListener) {
    loop {
        let Ok((stream, client)) = listener.accept().await else {
            // No descriptors left, most likely.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        if !shared.serves(client.ip()) {
            continue;
        }
        let Ok(permit) = Arc::clone(&shared.connections).try_acquire_owned() else { continue };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            // Who breaks off has no answer to get.
            let _ = converse(&shared, stream).await;
            drop(permit);
        });
    }
}

/// One query after the other, each behind its length (RFC 1035, section 4.2.2).
async fn converse(shared: &Shared, mut stream: TcpStream) -> std::io::Result<()> {
    loop {
        let query = tokio::time::timeout(SILENCE, read(&mut stream)).await??;
        let decided = answer(&shared.zone.load(), &query);
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

async fn read(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let length = usize::from(stream.read_u16().await?);
    if length > MAX_UDP {
        return Err(std::io::Error::other("a question of that length"));
    }
    let mut query = vec![0; length];
    stream.read_exact(&mut query).await?;
    Ok(query)
}
