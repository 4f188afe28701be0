//! Who is at the other end of a control connection: the kernel's word, never a message's.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Since Linux 6.5: a descriptor of the process that connected, whatever became of its number.
const SO_PEERPIDFD: libc::c_int = 77;
/// A namespace of a process: since Linux 6.11 by an ioctl of its pidfd (`linux/pidfd.h`), else by a file.
struct Kind(libc::c_ulong, &'static str);
const NET: Kind = Kind(0xff04, "net");
const MOUNT: Kind = Kind(0xff03, "mnt");

/// What tells namespaces apart: device and inode of their file, for as long as somebody has it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub u64, pub u64);

impl NamespaceId {
    /// Of an open file of a namespace.
    pub fn of(file: impl AsFd) -> std::io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self(stat.st_dev, stat.st_ino))
    }
}

/// The process that began a connection.
#[derive(Clone)]
pub struct Peer {
    /// Its user, as of then.
    pub uid: u32,
    /// Its number, for people to read.
    pub pid: i32,
    /// Its network namespace, as of then.
    pub namespace: NamespaceId,
    /// Holds the namespace, so that no other gets its number.
    pub file: Arc<OwnedFd>,
    /// Its mount namespace, as of then: root in a container has the user id of root outside, and not this.
    pub mounts: NamespaceId,
}

impl Peer {
    /// Whether both are of one tenant, one user, and one container, so that neither has a reason to fear the other.
    pub fn is_as(&self, other: &Self) -> bool {
        let who = |peer: &Self| (peer.namespace, peer.uid, peer.mounts);
        who(self) == who(other)
    }
}

/// Who is at the other end of `socket`.
///
/// # Errors
/// The process has ended, or is in a namespace of processes that cannot be seen from here.
pub fn peer(socket: BorrowedFd<'_>) -> std::io::Result<Peer> {
    let found = slipway_peer::Peer::of(socket)?;
    let number = found.pid.cast_signed();
    let pidfd = match peer_pidfd(socket) {
        Ok(pidfd) => pidfd,
        Err(_) => {
            let pid = Pid::from_raw(number).ok_or(ErrorKind::NotFound)?;
            pidfd_open(pid, PidfdFlags::empty())?
        }
    };
    let file = namespace(pidfd.as_fd(), number, NET)?;
    let mounts = NamespaceId::of(namespace(pidfd.as_fd(), number, MOUNT)?)?;
    let id = NamespaceId::of(&file)?;
    Ok(Peer { uid: found.uid, pid: number, namespace: id, file: Arc::new(file), mounts })
}

/// A namespace of a process. By its number only if the process was still there afterwards.
fn namespace(
    pidfd: BorrowedFd<'_>,
    pid: i32,
    Kind(request, name): Kind,
) -> std::io::Result<OwnedFd> {
    // SAFETY: an ioctl without argument; it gives a new descriptor or an error.
    let file = unsafe { libc::ioctl(pidfd.as_raw_fd(), request, 0) };
    if file >= 0 {
        // SAFETY: the kernel gave it to us just now.
        return Ok(unsafe { OwnedFd::from_raw_fd(file) });
    }
    let file = File::open(format!("/proc/{pid}/ns/{name}"))?;
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut waits = [PollFd::new(&pidfd, PollFlags::IN)];
    // Readable: it has ended, and its number may have been another's already.
    if poll(&mut waits, Some(&at_once))? > 0 {
        return Err(ErrorKind::NotFound.into());
    }
    Ok(file.into())
}

fn peer_pidfd(socket: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let mut file: libc::c_int = -1;
    option(socket, SO_PEERPIDFD, &mut file)?;
    if file < 0 {
        return Err(ErrorKind::NotFound.into());
    }
    // SAFETY: the kernel gave it to us just now.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// An option of a socket that is a plain structure of integers.
fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int, into: &mut T) -> std::io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to a value of that size, which may be any bytes.
    let outcome = unsafe {
        let into = std::ptr::from_mut(into).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, into, &mut len)
    };
    if outcome == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// `SO_PASSRIGHTS` (Linux 6.16): whether a socket takes descriptors.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Has `socket` take descriptors, which its listener refused until it was known whom they count against.
pub fn accept_descriptors(socket: BorrowedFd<'_>) {
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is borrowed for the call, and the kernel reads the bytes of `on`. A kernel that does not know the
    // option has refused nothing.
    unsafe {
        let (len, on) = (size_of_val(&on) as libc::socklen_t, (&raw const on).cast());
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, on, len);
    }
}

/// The address that a kernel's listening TCP socket has, in `namespace`. None: it is no such socket.
pub fn listens_at(socket: BorrowedFd<'_>, namespace: &Peer) -> Option<slipway_sgiov_spec::Address> {
    let mut listens: libc::c_int = 0;
    option(socket, libc::SO_ACCEPTCONN, &mut listens).ok()?;
    let mut protocol: libc::c_int = 0;
    option(socket, libc::SO_PROTOCOL, &mut protocol).ok()?;
    if listens != 1 || protocol != libc::IPPROTO_TCP || !is_in(socket, namespace) {
        return None;
    }
    let address = rustix::net::getsockname(socket).ok()?;
    std::net::SocketAddr::try_from(address).ok().map(crate::address::of)
}

/// Whether a socket is of that network namespace; one that cannot be told is not.
fn is_in(socket: BorrowedFd<'_>, peer: &Peer) -> bool {
    /// `SIOCGSKNS` of linux/sockios.h: the network namespace of a socket.
    const SIOCGSKNS: libc::c_ulong = 0x894c;
    // SAFETY: an ioctl without argument; it gives a new descriptor or an error.
    let file = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGSKNS, 0) };
    if file < 0 {
        // Without the right to ask for another namespace it can be our own only: who has a socket of
        // another one needs that right himself.
        return std::fs::File::open("/proc/self/ns/net")
            .and_then(NamespaceId::of)
            .is_ok_and(|own| own == peer.namespace);
    }
    // SAFETY: the kernel gave it to us just now.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    NamespaceId::of(file).is_ok_and(|id| id == peer.namespace)
}
