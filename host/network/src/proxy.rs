//! Published ports on the host itself.
//!
//! A published port is a socket of the daemon: so the port is known to be free before a sandbox
//! starts, and no other program gets it. Packets from outside, and those to the host's own
//! addresses, never reach the socket: the packet filter redirects them to the sandbox. Connections
//! that do reach it came over the loopback interface or by a gateway's address, and are proxied to
//! the sandbox. (The alternative, routing 127.0.0.1, would open every service that trusts that
//! address.)

mod tcp;
mod udp;

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

use crate::publish::{Protocol, Published};
use crate::shares::Shares;
use crate::sockets::{self, SocketKind};
use crate::{Error, Result};

/// The most connections, or pairs of UDP peers, at one time through one port; see [`Shares`].
const FLOWS: usize = 1024;
/// The most connections at one time through all ports, which sandboxes share; see [`Shares`]. Each
/// has two descriptors of the daemon.
const CONNECTIONS: usize = 16_384;
/// Attempts to find a port that is free for both IPv4 and IPv6.
const TRIES: u32 = 16;

/// Ports that are held for a sandbox, and not served yet.
pub struct Claimed {
    /// The published ports, with the host ports that were chosen.
    pub published: Vec<Published>,
    sockets: Vec<(Published, OwnedFd)>,
}

/// Binds the ports of `wanted`, all or none. A port of the host that is listed twice is one port;
/// each 0 is a port of its own.
///
/// # Errors
/// [`Error::PortInUse`]; [`Error::Host`] for an address that the host does not have.
pub fn claim(wanted: &[Published]) -> Result<Claimed> {
    let mut claimed = Claimed { published: Vec::new(), sockets: Vec::new() };
    for one in wanted {
        if claimed.published.contains(one) {
            continue;
        }
        let sockets = claim_one(*one)?;
        let port = sockets.first().map(sockets::port).transpose();
        let port = port.map_err(no_port(*one))?.unwrap_or(one.host);
        let one = Published { host: port, ..*one };
        claimed.published.push(one);
        claimed.sockets.extend(sockets.into_iter().map(|socket| (one, socket)));
    }
    Ok(claimed)
}

fn claim_one(one: Published) -> Result<Vec<OwnedFd>> {
    let mut tries = 0;
    loop {
        match bind_all(one) {
            // The port is free for one address family and not for the other.
            Err(Error::PortInUse { .. }) if one.host == 0 && tries < TRIES => tries += 1,
            bound => return bound,
        }
    }
}

fn bind_all(one: Published) -> Result<Vec<OwnedFd>> {
    let kind = match one.protocol {
        Protocol::Tcp => SocketKind::Stream,
        Protocol::Udp => SocketKind::Datagram,
    };
    let mut bound: Vec<OwnedFd> = Vec::new();
    let mut port = one.host;
    for address in one.listens_on() {
        match sockets::bind(SocketAddr::new(address, port), kind) {
            Ok(socket) => {
                port = sockets::port(&socket).map_err(no_port(one))?;
                bound.push(socket);
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                return Err(Error::PortInUse { address, port, protocol: one.protocol.as_str() });
            }
            Err(error) if !bound.is_empty() && address.is_ipv6() && lacks_ipv6(&error) => {}
            Err(error) => {
                let what = format!("cannot publish on {}", SocketAddr::new(address, port));
                return Err(Error::host(what)(error));
            }
        }
    }
    Ok(bound)
}

/// Returns a closure for `map_err` that says which socket's port the kernel does not tell.
fn no_port(one: Published) -> impl FnOnce(io::Error) -> Error {
    Error::host(format!("cannot tell the host's port of {one}"))
}

/// Returns whether binding a socket to an IPv6 address failed because the host has no IPv6. Any
/// other error must not leave a port published on IPv4 alone.
fn lacks_ipv6(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}

/// The means by which all published ports of a node are served.
pub struct Relay {
    /// The runtime on which they are served.
    on: tokio::runtime::Handle,
    /// The connections that there may be, by the address of their sandbox.
    connections: Arc<Shares>,
}

impl Relay {
    /// Returns the means to serve ports on the runtime `on`.
    pub fn new(on: tokio::runtime::Handle) -> Self {
        Self { on, connections: Shares::new(CONNECTIONS) }
    }
}

/// The tasks that serve published ports. Dropping it ends them.
pub struct Proxy {
    _tasks: JoinSet<()>,
}

impl Claimed {
    /// Serves the ports for a sandbox with these addresses.
    ///
    /// # Errors
    /// [`Error::Host`]: no descriptors are left.
    pub fn serve(self, ipv4: Ipv4Addr, ipv6: Ipv6Addr, relay: &Relay) -> Result<Proxy> {
        let Relay { on, connections } = relay;
        let _entered = on.enter();
        let mut tasks = JoinSet::new();
        for (one, socket) in self.sockets {
            let failed = || Error::host(format!("cannot publish {one}"));
            let own: SocketAddr = rustix::net::getsockname(&socket)
                .and_then(SocketAddr::try_from)
                .map_err(|error| failed()(error.into()))?;
            // A program in the sandbox may listen on IPv4 only: so all connections go there, unless
            // the port was published on an IPv6 address.
            let to: IpAddr = match one.address {
                Some(IpAddr::V6(_)) => ipv6.into(),
                _ => ipv4.into(),
            };
            let to = SocketAddr::new(to, one.container);
            tracing::debug!(%own, %to, "published");
            match one.protocol {
                Protocol::Tcp => {
                    let listener = TcpListener::from_std(socket.into()).map_err(failed())?;
                    let room = (Shares::new(FLOWS), connections.clone());
                    tasks.spawn_on(tcp::serve(listener, to, room), on);
                }
                Protocol::Udp => {
                    let socket = UdpSocket::from_std(socket.into()).map_err(failed())?;
                    tasks.spawn_on(udp::Flows::new(socket, to, Shares::new(FLOWS)).serve(), on);
                }
            }
        }
        Ok(Proxy { _tasks: tasks })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    fn on_loopback(text: &str) -> Vec<Published> {
        Published::parse(text).unwrap()
    }

    #[tokio::test]
    async fn streams_are_carried_both_ways_with_their_ends() {
        let inside = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let port = inside.local_addr().unwrap().port();
        let claimed = claim(&on_loopback(&format!("127.0.0.1::{port}"))).unwrap();
        let outside = claimed.published[0].host;
        assert_ne!(outside, 0);
        let here = Relay::new(tokio::runtime::Handle::current());
        let proxy =
            claimed.serve("127.0.0.2".parse().unwrap(), Ipv6Addr::LOCALHOST, &here).unwrap();
        let mut client = TcpStream::connect(("127.0.0.1", outside)).await.unwrap();
        client.write_all(b"question").await.unwrap();
        client.shutdown().await.unwrap();
        let (mut server, _) = inside.accept().await.unwrap();
        let mut asked = String::new();
        server.read_to_string(&mut asked).await.unwrap();
        assert_eq!(asked, "question");
        server.write_all(b"answer").await.unwrap();
        drop(server);
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "answer");
        // The port is taken while it is published, and free afterwards.
        let again = on_loopback(&format!("127.0.0.1:{outside}:{port}"));
        let error = claim(&again).err().unwrap();
        assert!(error.to_string().contains(&format!("port {outside}/tcp of 127.0.0.1 is in use")));
        drop(proxy);
        while claim(&again).is_err() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn datagrams_are_carried_both_ways() {
        let inside = UdpSocket::bind("127.0.0.2:0").await.unwrap();
        let port = inside.local_addr().unwrap().port();
        let claimed = claim(&on_loopback(&format!("127.0.0.1::{port}/udp"))).unwrap();
        let outside = claimed.published[0].host;
        let here = Relay::new(tokio::runtime::Handle::current());
        let _proxy =
            claimed.serve("127.0.0.2".parse().unwrap(), Ipv6Addr::LOCALHOST, &here).unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        client.connect(("127.0.0.1", outside)).await.unwrap();
        client.send(b"question").await.unwrap();
        let mut buffer = [0; 16];
        let (length, from) = inside.recv_from(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..length], b"question");
        inside.send_to(b"answer", from).await.unwrap();
        let length = client.recv(&mut buffer).await.unwrap();
        assert_eq!(&buffer[..length], b"answer");
    }

    #[test]
    fn a_port_is_on_ipv4_alone_only_where_the_host_has_no_ipv6() {
        let of = |errno: Errno| lacks_ipv6(&io::Error::from(errno));
        assert!(of(Errno::AFNOSUPPORT) && of(Errno::ADDRNOTAVAIL));
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::ACCESS] {
            assert!(!of(errno), "{errno}");
        }
    }

    #[test]
    fn all_of_them_or_none() {
        let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let taken = held.local_addr().unwrap().port();
        let mut wanted = on_loopback("127.0.0.1::80");
        wanted.extend(on_loopback(&format!("127.0.0.1:{taken}:81")));
        assert!(matches!(claim(&wanted), Err(Error::PortInUse { .. })));
        let elsewhere = claim(&on_loopback("192.0.2.1:0080:80")).err().unwrap();
        assert!(matches!(elsewhere, Error::Host(_)), "{elsewhere}");
    }

    #[test]
    fn a_port_that_is_listed_twice_is_one_port() {
        // A free one is another port each time. Nothing else in the tests is at this address.
        let twice = claim(&on_loopback("127.0.0.9::80").repeat(2)).unwrap().published;
        let [first, second] = twice[..] else { panic!("{twice:?}") };
        assert_ne!(first.host, second.host);
        let fixed = on_loopback(&format!("127.0.0.9:{}:80", first.host));
        assert_eq!(claim(&fixed.repeat(2)).unwrap().published, [first]);
    }
}
