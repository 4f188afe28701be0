//! Sockets of the socket plane for programs on tokio: [`SocketListener`] and [`SocketStream`]
//! correspond to `TcpListener` and `TcpStream`, without libslipway in between.
//!
//! ```no_run
//! # async fn example() -> std::io::Result<()> {
//! use slipway_socket_tokio::{SocketListener, SocketStream};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! let listener = SocketListener::bind("127.0.0.1:7000").await?;
//! let mut client = SocketStream::connect("127.0.0.1:7000").await?;
//! let (mut server, _from) = listener.accept().await?;
//! client.write_all(b"hello").await?;
//! server.read_exact(&mut [0; 5]).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Device or kernel
//! A stream is a socket device if the engine knows who listens at the address and lets this program
//! reach it. It is a TCP socket of the kernel ([`SocketStream::is_device`]) if there is no engine,
//! or if the engine says that the address is not its own. Any other answer is an error as
//! connect(2) has it, such as `ECONNREFUSED` from another node: such an address is never tried in
//! the clear by the kernel's sockets. A listener has both queues, the kernel's and the engine's, so
//! that peers without an engine reach it too. If the engine refuses it, it is the kernel's alone
//! ([`SocketListener::is_device`]).
//!
//! # Waiting
//! Nothing blocks a thread of the runtime: connecting and accepting, which ask the engine, run in
//! `spawn_blocking`. Requests of one [`Engine`] are one after the other, and one to another node
//! lasts as long as that node takes to answer. Reading and writing copy into and out of shared
//! memory. A task that finds nothing to read, or no room, polls again after every turn of the
//! runtime for up to 100 microseconds, if that was worth it lately, and then waits for the
//! endpoint's eventfd. A reader that does not read stops its writer when the FIFO is full (1 MiB).
//!
//! # Cancellation
//! A read or a write whose future is dropped before it is ready has moved nothing. A dropped
//! `accept` loses no connection: the next `accept` returns it. A dropped `connect` closes the
//! connection that it made.
//!
//! # Ends
//! `shutdown` (or dropping the [`OwnedWriteHalf`]) ends the sending direction: the peer reads the
//! rest and then the end, and can still send. Dropping a stream closes it: the peer reads the bytes
//! that were sent, and then the end, or `ECONNRESET` if bytes were left unread here. When the
//! engine dies, streams end with `ECONNRESET`, once, and then with the end; a listener is the
//! kernel's alone from then on; new streams try the engine again.
//!
//! # Not supported
//! fork(2): a child must not use what its parent opened. Other runtimes. Options that have no
//! meaning without the kernel, such as `TCP_INFO`. A kernel without membarrier(2)'s
//! `GLOBAL_EXPEDITED` (before 4.16), where sleepers may be missed: all sockets are the kernel's
//! there.
//!
//! Dependencies: `tokio`, the runtime of the program; `rustix` for poll(2) and socket options.
#![allow(unsafe_code)] // tokio's word for a descriptor that stays open

mod device;
mod engine;
mod listener;
mod split;
mod stream;
mod waiters;

pub use engine::Engine;
pub use listener::SocketListener;
pub use split::{OwnedReadHalf, OwnedWriteHalf};
pub use stream::SocketStream;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use std::os::fd::OwnedFd;

use slipway_socket::Address;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

fn address(from: SocketAddr) -> Address {
    match from.ip() {
        IpAddr::V4(ip) => Address::v4(ip.octets(), from.port()),
        IpAddr::V6(ip) => Address { ip: ip.octets(), port: from.port() },
    }
}

fn socket_address(from: Address) -> SocketAddr {
    let ip = match from.as_v4() {
        Some(ip) => IpAddr::V4(Ipv4Addr::from(ip)),
        None => IpAddr::V6(Ipv6Addr::from(from.ip)),
    };
    SocketAddr::new(ip, from.port)
}

/// Registers an eventfd to wait for; must be called within a runtime.
fn readable(eventfd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is the same descriptor until it is dropped, which is after the reactor
    // released it.
    Ok(unsafe { AsyncFd::register_with_interest(eventfd, Interest::READABLE) }?)
}
