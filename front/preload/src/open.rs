//! Connections and listeners begin and end: connect(2), listen(2), accept(2), shutdown(2).

use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_long, socklen_t};
use slipway_socket::hidden::{self, Hidden};
use slipway_socket::{Address, Deadline, Errno, NotConnected, Opened, option};

use crate::address::{self, Name};
use crate::copies::fresh;
use crate::fds::{self, DescriptorKind, Ref, Stream};
use crate::listener::Listener;
use crate::real::{self, sys};
use crate::signals::{interrupted, restarts};
use crate::taken::Taken;
use crate::time::{after_timeout, timespec_of};
use crate::{attach, dissolve, epoll, session};

/// Returns the local address of a kernel socket.
pub fn own_address(fd: c_int) -> Option<Address> {
    let mut bytes = [0u8; 32];
    let mut length: socklen_t = 32;
    let got = sys!(SYS_getsockname, fd, bytes.as_mut_ptr(), &raw mut length);
    if got == 0 { address::read(bytes.get(..length as usize)?) } else { None }
}

/// Connects the socket `fd` through the engine, if `to` is an address with a listener that the
/// engine knows, beside the family in which the program wrote the address. Returns `false` if the
/// socket is left to the kernel, which refuses an address of another family than the socket's.
///
/// # Errors
/// The errors of connect(2): `EINPROGRESS` if the socket is connected now and non-blocking, as
/// programs expect.
pub fn connect(fd: c_int, to: Option<(c_int, Address)>) -> Result<bool, Errno> {
    let Some((family, to)) = to.filter(|(_, to)| to.port != 0) else { return Ok(false) };
    let domain = real::tcp_domain(fd).filter(|domain| *domain == family);
    let Some(domain) = domain else { return Ok(false) };
    match try_connect(fd, to, domain) {
        Ok(true) => Err(Errno::INPROGRESS),
        Ok(false) => Ok(true),
        Err(NotConnected::NotOurs) => Ok(false),
        Err(NotConnected::Failed(errno)) => Err(errno),
    }
}

/// Carries out connect(2) for a connection of ours: the first one after that which returned
/// `EINPROGRESS` succeeds, as the kernel's does. Returns 0, which is the call's result.
///
/// # Errors
/// `EISCONN` for all others.
pub fn connect_again(object: &Ref) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    if stream.endpoint.set(option::CONNECTING, false) { Ok(0) } else { Err(Errno::ISCONN) }
}

/// Connects through the engine. Returns whether the socket is non-blocking; the program then
/// expects `EINPROGRESS`.
fn try_connect(fd: c_int, to: Address, domain: c_int) -> Result<bool, NotConnected> {
    if real::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) != Some(0) || is_connected(fd) {
        return Err(NotConnected::NotOurs);
    }
    let family = attach::family().ok_or(NotConnected::NotOurs)?;
    if !has_room(fd) {
        // The kernel's connect(2) needs no number.
        return Err(NotConnected::NotOurs);
    }
    let to = if to.is_unspecified() { loopback(domain, to.port) } else { to };
    let from = own_address(fd).filter(|from| from.port != 0);
    let Opened { endpoint, eventfd } = family.connect(to, from.unwrap_or(Address::ANY))?;
    let flags = sys!(SYS_fcntl, fd, libc::F_GETFL, 0) as c_int;
    let cloexec = sys!(SYS_fcntl, fd, libc::F_GETFD, 0) as c_int & libc::FD_CLOEXEC != 0;
    let nonblock = flags & libc::O_NONBLOCK != 0;
    endpoint.set(option::NONBLOCK, nonblock);
    endpoint.set(option::CONNECTING, nonblock);
    endpoint.set(option::SIX, domain == libc::AF_INET6);
    Taken::of(fd).give(&endpoint);
    let how = if cloexec { libc::O_CLOEXEC } else { 0 };
    let mut stream = Stream::new(endpoint, domain);
    let waiting = fds::get(fd).map(|plain| std::mem::take(&mut *plain.sets.hold()));
    let waiting = waiting.unwrap_or_default();
    if from.is_some() {
        stream.bound = keep(fd, &waiting);
    }
    let moved = sys!(SYS_dup3, eventfd.as_raw_fd(), fd, how);
    hidden::close(eventfd);
    let object = fds::make(DescriptorKind::Stream(stream));
    if moved < 0 {
        return Err(NotConnected::Failed(Errno::BADF));
    }
    fds::put(fd, &object);
    for (set, number) in waiting {
        epoll::became_ours(set, number, &object);
    }
    Ok(nonblock)
}

/// Returns the address that connect(2) takes for an unspecified one of this domain.
fn loopback(domain: c_int, port: u16) -> Address {
    if domain == libc::AF_INET {
        return Address::v4([127, 0, 0, 1], port);
    }
    let mut ip = [0; 16];
    ip[15] = 1;
    Address { ip, port }
}

/// Keeps the kernel's socket `fd`, whose number a connection takes over, and takes it out of the
/// sets that it waits in. Returns `None` if no descriptors are left: the port is free then.
fn keep(fd: c_int, waiting: &[(c_int, c_int)]) -> Option<Hidden> {
    let kept = rustix::io::fcntl_dupfd_cloexec(real::borrowed(fd), 0).ok()?;
    let kept = Hidden::new(kept).ok()?;
    for (set, number) in waiting {
        // The kernel forgets a socket by itself only with its last descriptor.
        sys!(SYS_epoll_ctl, *set, libc::EPOLL_CTL_DEL, *number, 0);
    }
    Some(kept)
}

/// Returns whether a kernel socket has a peer.
fn is_connected(fd: c_int) -> bool {
    let mut bytes = [0u64; 4];
    let mut length: socklen_t = 32;
    sys!(SYS_getpeername, fd, bytes.as_mut_ptr(), &raw mut length) == 0
}

/// Gives the kernel's listener `fd`, for which the program called listen(2), a second queue at the
/// engine, if there is one.
pub fn listen(fd: c_int, backlog: c_int) {
    if !fds::get(fd).is_some_and(|object| matches!(object.kind(), DescriptorKind::Listener(_)))
        && let Some(domain) = real::tcp_domain(fd)
    {
        try_listen(fd, backlog, domain);
    }
}

fn try_listen(fd: c_int, backlog: c_int, domain: c_int) {
    let flags = sys!(SYS_fcntl, fd, libc::F_GETFL, 0) as c_int;
    let nonblock = flags & libc::O_NONBLOCK != 0;
    let Some(listener) = register(fd, backlog, domain, nonblock) else { return };
    sys!(SYS_fcntl, fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
    let object = fds::make(DescriptorKind::Listener(listener));
    let waiting = fds::get(fd).map(|plain| std::mem::take(&mut *plain.sets.hold()));
    fds::put(fd, &object);
    for (set, number) in waiting.into_iter().flatten() {
        epoll::became_listener(set, number, &object);
    }
}

/// Milliseconds between two attempts to register a listener again.
const PAUSE: u64 = 200;

/// Registers a listener again whose engine has gone. Called when a connection arrives through the
/// kernel, as all do until then.
#[cold]
fn register_again(fd: c_int, before: &Ref) {
    let DescriptorKind::Listener(old) = before.kind() else { return };
    let now = Deadline::now() / 1_000_000;
    if now < old.not_before.load(Ordering::Relaxed) {
        return;
    }
    old.not_before.store(now + PAUSE, Ordering::Relaxed);
    let nonblock = old.nonblock.load(Ordering::Relaxed);
    let Some(new) = register(fd, old.backlog, old.domain, nonblock) else { return };
    let object = fds::make(DescriptorKind::Listener(new));
    let waiting = std::mem::take(&mut *before.sets.hold());
    for (number, known) in fds::all(0, c_int::MAX - 1) {
        if std::ptr::eq(known.object(), before.object()) {
            fds::put(number, &object);
        }
    }
    for (set, number) in waiting {
        epoll::became_listener(set, number, &object);
    }
}

/// Registers a listening kernel socket with the engine.
fn register(fd: c_int, backlog: c_int, domain: c_int, nonblock: bool) -> Option<Listener> {
    let family = attach::family()?;
    let at = own_address(fd)?;
    let option = |level, name| real::option(fd, level, name).unwrap_or(0);
    let shared = option(libc::SOL_SOCKET, libc::SO_REUSEPORT) != 0;
    let v6_only = domain == libc::AF_INET6 && option(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) != 0;
    let proof = real::borrowed(fd);
    let waiting = u32::try_from(backlog).unwrap_or(4096);
    let listening = match family.listen(at, waiting, shared, v6_only, Some(proof)) {
        Ok(listening) => listening,
        Err(error) => {
            session::log(format_args!("port {} is the kernel's alone: {error}", at.port));
            return None;
        }
    };
    let eventfd = Hidden::new(listening.eventfd).ok()?;
    let number = listening.listener;
    let (not_before, nonblocking) = (AtomicU64::new(0), nonblock.into());
    let listener = Listener {
        family,
        number,
        eventfd,
        domain,
        backlog,
        not_before,
        nonblock: nonblocking,
        options: Taken::of(fd),
        has_ended: false.into(),
    };
    listener.set_nonblock(nonblock);
    Some(listener)
}

/// A connection that accept(2) returns.
pub struct Accepted {
    pub fd: c_int,
    /// The peer's name, or `None` if `kernel` of [`accept`] wrote it.
    pub name: Option<Name>,
}

/// Accepts a connection from either queue of a listener. `kernel` calls the kernel's accept4(2),
/// and `flags` are that call's. The object of `fd` is `object`, which has `listener`.
///
/// # Errors
/// The errors of accept4(2). As in the kernel, a connection for which no number is free stays in
/// the queue.
pub fn accept(
    fd: c_int,
    object: &Ref,
    listener: &Listener,
    flags: c_int,
    mut kernel: impl FnMut() -> c_long,
) -> Result<Accepted, Errno> {
    if flags & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) != 0 {
        return Err(Errno::INVAL);
    }
    let until = after_timeout(listener.options.receive_timeout());
    loop {
        if let Some(new) = take_ours(listener, flags)? {
            let object = fds::get(new).ok_or(Errno::BADF)?;
            let name =
                object.stream().map(|stream| Name::new(stream.endpoint.remote(), stream.domain));
            return Ok(Accepted { fd: new, name });
        }
        let new = kernel() as c_int;
        if new >= 0 {
            fresh(new);
            if listener.family.look() && !fds::in_vfork_child() {
                register_again(fd, object);
            }
            return Ok(Accepted { fd: new, name: None });
        }
        let errno = real::last_error();
        if errno == Errno::INVAL {
            // Another process may have stopped it.
            dissolve::follow(fd, object);
        }
        if errno != Errno::AGAIN || listener.nonblock.load(Ordering::Relaxed) {
            return Err(errno);
        }
        wait_for_either(fd, listener, until)?;
    }
}

fn wait_for_either(fd: c_int, listener: &Listener, until: Deadline) -> Result<(), Errno> {
    let ask = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut both = [ask(fd), ask(listener.eventfd.as_raw_fd())];
    let timeout = until.left().map(timespec_of);
    let at = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let ready = sys!(SYS_ppoll, both.as_mut_ptr(), 2, at, 0, 8);
    if ready > 0 {
        Ok(())
    } else if ready == 0 {
        Err(Errno::AGAIN)
    } else if interrupted() && until == Deadline::NEVER && restarts() {
        Ok(())
    } else {
        Err(real::last_error())
    }
}

/// Takes the next connection from the engine's queue, as a descriptor of ours. Returns `None` if
/// the queue is empty.
///
/// # Errors
/// `EMFILE` if no numbers are free for a connection, which stays in the queue; the engine's errors.
fn take_ours(listener: &Listener, flags: c_int) -> Result<Option<c_int>, Errno> {
    if !take_one(&listener.eventfd) {
        return Ok(None);
    }
    if !has_room(listener.eventfd.as_raw_fd()) {
        put_back(&listener.eventfd, 1);
        return Err(Errno::MFILE);
    }
    let opened = match listener.family.accept(listener.number) {
        Ok(opened) => opened,
        Err(Errno::AGAIN) => return Ok(None),
        Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS)) => {
            // The engine may not have been asked: the connection is still there.
            put_back(&listener.eventfd, 1);
            return Err(errno);
        }
        // The engine is gone, or no longer knows the listener: only the kernel's queue remains.
        Err(_) => return Ok(None),
    };
    Ok(Some(admit(opened, listener, flags)))
}

/// Takes one from the eventfd's count of waiting connections. Returns whether there was one.
fn take_one(eventfd: &Hidden) -> bool {
    let current = u64::MAX;
    let mut count = [0; 8];
    let into = &mut [std::io::IoSliceMut::new(&mut count)];
    let taken = rustix::io::preadv2(eventfd, into, current, rustix::io::ReadWriteFlags::NOWAIT);
    if taken.is_err() {
        return false;
    }
    // A non-semaphore eventfd returns its whole count; write the surplus back.
    let rest = u64::from_ne_bytes(count).saturating_sub(1);
    if rest > 0 {
        put_back(eventfd, rest);
    }
    true
}

/// Adds to the eventfd's count of waiting connections what was taken from it.
fn put_back(eventfd: &Hidden, count: u64) {
    // Fails only if another holder of the eventfd filled its counter, which harms that holder's own
    // listener.
    let _ = rustix::io::write(eventfd, &count.to_ne_bytes());
}

/// The most descriptors that come with a connection, each with a number below the limit: its
/// eventfd, the peer's, and memory that the two programs share. The kernel discards those of a
/// message for which no number is free.
const COME_WITH_ONE: usize = 3;

/// Returns whether numbers are free for the descriptors that come with a connection. `fd` is any
/// open descriptor.
fn has_room(fd: c_int) -> bool {
    let copy = |()| sys!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, 0) as c_int;
    let copies = [(); COME_WITH_ONE].map(copy);
    for copy in copies.into_iter().filter(|copy| *copy >= 0) {
        real::close(copy);
    }
    copies.iter().all(|copy| *copy >= 0)
}

fn admit(opened: Opened, listener: &Listener, flags: c_int) -> c_int {
    let Opened { endpoint, eventfd } = opened;
    endpoint.set(option::NONBLOCK, flags & libc::SOCK_NONBLOCK != 0);
    endpoint.set(option::SIX, listener.domain == libc::AF_INET6);
    listener.options.give(&endpoint);
    let fd = eventfd.into_raw_fd();
    if flags & libc::SOCK_CLOEXEC == 0 {
        sys!(SYS_fcntl, fd, libc::F_SETFD, 0);
    }
    let stream = Stream::new(endpoint, listener.domain);
    fds::put(fd, &fds::make(DescriptorKind::Stream(stream)));
    fd
}

/// Carries out shutdown(2) for the connection `fd`, which has `object`. Threads that wait for it in
/// any call look at it again. Returns 0, which is the call's result.
///
/// # Errors
/// `EINVAL` if `how` is none of the three, `ENOTCONN` if the connection is over.
pub fn shutdown(fd: c_int, object: &Ref, how: c_int) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    if ![libc::SHUT_RD, libc::SHUT_WR, libc::SHUT_RDWR].contains(&how) {
        return Err(Errno::INVAL);
    }
    if stream.endpoint.is_over() {
        return Err(Errno::NOTCONN);
    }
    if how != libc::SHUT_RD {
        stream.endpoint.finish();
    }
    if how != libc::SHUT_WR {
        stream.endpoint.want_no_more();
    }
    epoll::touch(object);
    stream.endpoint.wake(real::borrowed(fd));
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_the_loopback_of_its_domain() {
        assert_eq!(loopback(libc::AF_INET, 80), Address::v4([127, 0, 0, 1], 80));
        let v6 = loopback(libc::AF_INET6, 80);
        assert_eq!((v6.ip[15], v6.ip[..15].iter().sum::<u8>(), v6.port), (1, 0, 80));
        assert!(!v6.is_unspecified());
    }

    #[test]
    fn what_is_no_tcp_socket_or_has_no_address_is_the_kernels() {
        assert_eq!(connect(-1, None), Ok(false));
        for port in [0, 80] {
            let to = Some((libc::AF_INET, Address::v4([127, 0, 0, 1], port)));
            assert_eq!(connect(-1, to), Ok(false));
        }
        assert_eq!((own_address(-1), is_connected(-1)), (None, false));
    }

    #[test]
    fn an_eventfd_counts_the_connections_that_wait() {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let eventfd = Hidden::new(rustix::event::eventfd(2, flags).unwrap()).unwrap();
        assert!(take_one(&eventfd) && take_one(&eventfd));
        assert!(!take_one(&eventfd), "it is empty, and this does not wait");
    }

    #[test]
    fn what_is_put_back_waits_again() {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let eventfd = Hidden::new(rustix::event::eventfd(1, flags).unwrap()).unwrap();
        assert!(take_one(&eventfd));
        put_back(&eventfd, 1);
        assert!(take_one(&eventfd) && !take_one(&eventfd));
    }

    #[test]
    fn there_is_room_if_the_kernel_has_numbers() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(has_room(reader.as_raw_fd()));
        assert!(!has_room(-1));
    }

    #[test]
    fn a_sockets_own_address_is_the_kernels() {
        let socket = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        assert_eq!(own_address(socket.as_raw_fd()), Some(Address::v4([127, 0, 0, 1], port)));
        assert!(!is_connected(socket.as_raw_fd()));
    }
}
