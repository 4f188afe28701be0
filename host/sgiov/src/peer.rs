//! The process at the other end of a control connection, as the kernel reports it, and never
//! as a message claims.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A socket option since Linux 6.5: a pidfd of the process that connected, valid whatever process
/// has that one's number by now.
const SO_PEERPIDFD: libc::c_int = 77;
/// A kind of namespace: the ioctl of a process's pidfd that opens it (since Linux 6.11,
/// `linux/pidfd.h`), and the name of its file in `/proc`, for older kernels.
struct NamespaceKind(libc::c_ulong, &'static str);
const NET: NamespaceKind = NamespaceKind(0xff04, "net");
const MOUNT: NamespaceKind = NamespaceKind(0xff03, "mnt");

/// The identity of a namespace: device and inode of its file. It is unique while somebody has the
/// file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub u64, pub u64);

impl NamespaceId {
    /// Returns the identity of the namespace whose file is open as `file`.
    pub fn of(file: impl AsFd) -> std::io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self(stat.st_dev, stat.st_ino))
    }
}

/// The process that began a connection.
#[derive(Clone)]
pub struct Peer {
    /// The process's user when it connected.
    pub uid: u32,
    /// The process's number, for people to read.
    pub pid: i32,
    /// The process's network namespace when it connected.
    pub namespace: NamespaceId,
    /// The network namespace, held open so that no other one gets its inode number.
    pub file: Arc<OwnedFd>,
    /// The process's mount namespace when it connected. Root in a container may have the user id of
    /// root outside, but has another mount namespace.
    pub mounts: NamespaceId,
}

impl Peer {
    /// Returns whether both processes are of one tenant, one user and one container, so that
    /// neither has a reason to fear the other.
    pub fn is_as(&self, other: &Self) -> bool {
        let who = |peer: &Self| (peer.namespace, peer.uid, peer.mounts);
        who(self) == who(other)
    }
}

/// Returns the process at the other end of `socket`.
///
/// # Errors
/// The process has ended, or is in a PID namespace that cannot be seen from here.
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

/// Opens a namespace of a process. On kernels without the ioctl it is found by `pid`, and used only
/// if the process was still there afterwards.
fn namespace(
    pidfd: BorrowedFd<'_>,
    pid: i32,
    NamespaceKind(request, name): NamespaceKind,
) -> std::io::Result<OwnedFd> {
    if let Ok(file) = opened(pidfd, request) {
        return Ok(file);
    }
    let file = File::open(format!("/proc/{pid}/ns/{name}"))?;
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut waits = [PollFd::new(&pidfd, PollFlags::IN)];
    // A readable pidfd: the process has ended, and its number may have been reused already.
    if poll(&mut waits, Some(&at_once))? > 0 {
        return Err(ErrorKind::NotFound.into());
    }
    Ok(file.into())
}

/// Returns the descriptor that an ioctl without argument opens. `request` must be such an ioctl of
/// the kind of file that `file` is; other files refuse it.
///
/// # Errors
/// The kernel's error.
fn opened(file: BorrowedFd<'_>, request: libc::c_ulong) -> std::io::Result<OwnedFd> {
    // SAFETY: an ioctl without argument; it returns a new descriptor or an error.
    let new = unsafe { libc::ioctl(file.as_raw_fd(), request, 0) };
    if new < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the kernel has just returned the descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// The maker of a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// Root: the namespace is in the engine's own user namespace, as the host's and those of most
    /// containers are.
    Root,
    /// The owner of the namespace's user namespace or, if user namespaces lie in each other, of the
    /// outermost one below the engine's own. The users within it are that user's.
    User(u32),
}

/// Returns the maker of a network namespace, whose file is `file`. Returns `None` if the namespace
/// belongs to no user namespace that the engine may see, `file` is no namespace's, or no descriptor
/// is left.
pub fn maker(file: BorrowedFd<'_>) -> Option<Maker> {
    /// Of `linux/nsfs.h` (ioctl_nsfs(2)).
    const NS_GET_USERNS: libc::c_ulong = 0xb701;
    const NS_GET_PARENT: libc::c_ulong = 0xb702;
    let (mut space, mut made) = (opened(file, NS_GET_USERNS).ok()?, Maker::Root);
    // User namespaces lie in each other up to 33 deep (user_namespaces(7)).
    loop {
        match opened(space.as_fd(), NS_GET_PARENT) {
            Ok(parent) => {
                made = Maker::User(owner(space.as_fd())?);
                space = parent;
            }
            // The kernel does not tell the parent of the engine's own user namespace.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return Some(made),
            Err(_) => return None,
        }
    }
}

/// Returns the owner of a user namespace: the user who made it.
fn owner(space: BorrowedFd<'_>) -> Option<u32> {
    /// Of `linux/nsfs.h` (ioctl_nsfs(2)).
    const NS_GET_OWNER_UID: libc::c_ulong = 0xb704;
    let mut uid: libc::uid_t = 0;
    // SAFETY: the descriptor is borrowed for the call, and the kernel writes a user id to `uid`.
    let outcome = unsafe { libc::ioctl(space.as_raw_fd(), NS_GET_OWNER_UID, &raw mut uid) };
    (outcome == 0).then_some(uid)
}

fn peer_pidfd(socket: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let mut file: libc::c_int = -1;
    option(socket, SO_PEERPIDFD, &mut file)?;
    if file < 0 {
        return Err(ErrorKind::NotFound.into());
    }
    // SAFETY: the kernel has just returned the descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Reads a socket option whose value is a plain structure of integers.
fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int, into: &mut T) -> std::io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to a value of that size, which may be any
    // bytes.
    let outcome = unsafe {
        let into = std::ptr::from_mut(into).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, into, &mut len)
    };
    if outcome == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// `SO_PASSRIGHTS` (Linux 6.16): whether a socket takes descriptors.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Has `socket` take descriptors. Its listener refused them until the account was known that they
/// count against.
pub fn accept_descriptors(socket: BorrowedFd<'_>) {
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is borrowed for the call, and the kernel reads the bytes of `on`. A
    // kernel that does not know the option has refused no descriptors.
    unsafe {
        let (len, on) = (size_of_val(&on) as libc::socklen_t, (&raw const on).cast());
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, on, len);
    }
}

/// Returns the address of a listening TCP socket of the kernel's. Returns `None` if `socket` is no
/// such socket, or is not in the network namespace of `namespace`.
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

/// Returns whether a socket is known to be in the peer's network namespace.
fn is_in(socket: BorrowedFd<'_>, peer: &Peer) -> bool {
    /// `SIOCGSKNS` of linux/sockios.h: the network namespace of a socket.
    const SIOCGSKNS: libc::c_ulong = 0x894c;
    match opened(socket, SIOCGSKNS) {
        Ok(file) => NamespaceId::of(file).is_ok_and(|id| id == peer.namespace),
        Err(_) => is_in_own(socket, peer),
    }
}

/// Returns whether a socket and the peer are in the engine's own network namespace. An engine
/// without CAP_NET_ADMIN may not ask which namespace a socket is in, but may compare cookies. (A
/// process can make a namespace in which it has that right, and hand over a socket of it.)
fn is_in_own(socket: BorrowedFd<'_>, peer: &Peer) -> bool {
    let own = || File::open("/proc/self/ns/net").and_then(NamespaceId::of);
    let here = || UnixDatagram::unbound().and_then(|here| namespace_cookie(here.as_fd()));
    own().is_ok_and(|own| own == peer.namespace)
        && here().is_ok_and(|here| namespace_cookie(socket).is_ok_and(|there| there == here))
}

/// Returns the cookie of a socket's network namespace, which no other namespace has had since boot.
///
/// # Errors
/// The kernel is older than Linux 5.14.
fn namespace_cookie(socket: BorrowedFd<'_>) -> std::io::Result<u64> {
    /// `SO_NETNS_COOKIE` of asm-generic/socket.h.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0_u64;
    option(socket, SO_NETNS_COOKIE, &mut cookie)?;
    Ok(cookie)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Makes a listener in a network namespace of its own, as any user can in a user namespace.
    fn foreign_listener() -> TcpListener {
        let made = std::thread::spawn(|| {
            // SAFETY: a call without pointers; it moves this thread alone to a new namespace.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
            TcpListener::bind("0.0.0.0:4080").unwrap()
        });
        made.join().unwrap()
    }

    #[test]
    fn a_listener_of_another_namespace_proves_nothing_as_root() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!(
                "SKIPPED: a_listener_of_another_namespace_proves_nothing_as_root: needs root to \
                 make a network namespace"
            );
        }
        let (here, _there) = UnixStream::pair().unwrap();
        let this = peer(here.as_fd()).unwrap();
        let (foreign, own) = (foreign_listener(), TcpListener::bind("127.0.0.1:0").unwrap());
        assert!(listens_at(foreign.as_fd(), &this).is_none());
        assert!(listens_at(own.as_fd(), &this).is_some());
        // Without CAP_NET_ADMIN.
        assert!(!is_in_own(foreign.as_fd(), &this));
        assert!(is_in_own(own.as_fd(), &this));
    }
}
