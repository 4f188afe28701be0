//! Attaching to a port: the two messages over the socket, and the descriptors of the second.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use slipway_peer::{Bin, Foreign, Peer};
use slipway_ring::{Hello, Link, PROTOCOL, Takes, Welcome};

use crate::Error;

/// The longest time for the daemon's answer.
const ANSWER: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// A client's resources of a port.
pub struct Attached {
    pub socket: OwnedFd,
    pub link: Link,
    /// Eventfd that this side raises when the switch sleeps.
    pub tell: OwnedFd,
    /// Eventfd that the switch raises when this side sleeps.
    pub told: OwnedFd,
    /// The port's address; zeros if it has none.
    pub mac: [u8; 6],
}

/// Attaches to the port whose socket is at `path`.
pub fn attach(path: &Path) -> Result<Attached, Error> {
    let socket =
        connect(path).map_err(|source| Error::Connect { path: path.to_owned(), source })?;
    know(&socket)?;
    let hello = Hello { takes: Takes::default() }.encode();
    rustix::net::send(&socket, &hello, SendFlags::NOSIGNAL)?;
    let mut wait = [PollFd::new(&socket, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut wait, Some(&ANSWER)))?;
    if ready == 0 {
        return Err(Error::Protocol("the daemon does not answer"));
    }
    let (welcome, files) = receive(&socket)?;
    match welcome.status {
        0 if welcome.version == PROTOCOL => {}
        0 | Welcome::VERSION => return Err(Error::Version(welcome.version)),
        Welcome::BUSY => return Err(Error::Busy(path.to_owned())),
        other => {
            let number = i32::try_from(other).unwrap_or(i32::MAX);
            return Err(Error::Refused(std::io::Error::from_raw_os_error(number)));
        }
    }
    let files = <[Foreign; 3]>::try_from(files);
    let files = files.map_err(|_| Error::Protocol("there are not three descriptors"))?;
    let [memory, tell, told] = checked(files)?;
    let link = Link::open(memory).map_err(|_| Error::Protocol("its memory has no packet rings"))?;
    Ok(Attached { socket, link, tell, told, mac: welcome.mac })
}

fn connect(path: &Path) -> std::io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(socket)
}

/// Checks that the server of the socket is root or this process's own user.
fn know(socket: &OwnedFd) -> Result<(), Error> {
    let found = Peer::of(socket)?;
    let known = found.uid == 0 || found.uid == rustix::process::geteuid().as_raw();
    if known { Ok(()) } else { Err(Error::Stranger(found.uid)) }
}

/// Checks that the descriptors are memory and two eventfds, which any thread may close.
fn checked([memory, tell, told]: [Foreign; 3]) -> Result<[OwnedFd; 3], Error> {
    let known = slipway_peer::is_memory_file(&memory)
        && [&tell, &told].into_iter().all(slipway_peer::is_eventfd);
    match known {
        true => Ok([memory, tell, told].map(Foreign::into_owned)),
        false => Err(Error::Protocol("its descriptors are not memory and two eventfds")),
    }
}

fn receive(socket: &OwnedFd) -> Result<(Welcome, Vec<Foreign>), Error> {
    let mut bytes = [0; Welcome::LEN + 1];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = slipway_peer::receive(socket, &mut parts, &Bin::new(), RecvFlags::DONTWAIT);
    let message = match received {
        Ok(message) => message,
        Err(Errno::CONNRESET) => return Err(Error::Gone),
        Err(error) => return Err(error.into()),
    };
    if message.bytes == 0 {
        return Err(Error::Gone);
    }
    let welcome = Welcome::decode(bytes.get(..message.bytes).unwrap_or_default());
    Ok((welcome.ok_or(Error::Protocol("it answers something else"))?, message.files))
}

/// Converts a duration for poll(2); a longer one than it can represent is waited for in parts.
pub fn timespec(duration: Duration) -> Timespec {
    let tv_sec = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: duration.subsec_nanos().into() }
}
