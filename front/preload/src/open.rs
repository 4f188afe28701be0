//! Makes and ends connections: connect(2), listen(2), accept(2), shutdown(2).

use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use libc::{c_int, sockaddr, socklen_t};
use slipway_socket::hidden::{self, Hidden};
use slipway_socket::{Address, Deadline, Errno, NotConnected, Opened, option};

use crate::address::{read_address, write_address};
use crate::fds::{self, DescriptorKind, Ref, Stream};
use crate::guard::guard;
use crate::listener::Listener;
use crate::real::{self, fail, sys};
use crate::signals::{interrupted, restarts};
use crate::time::timespec_of;
use crate::{attach, epoll, session};

/// Returns the local address of a kernel socket.
pub fn own_address(fd: c_int) -> Option<Address> {
    let mut bytes = [0u64; 4];
    let mut length: socklen_t = 32;
    let at = bytes.as_mut_ptr().cast::<sockaddr>();
    let got = sys!(SYS_getsockname, fd, at, &raw mut length);
    // SAFETY: the kernel wrote `length` bytes, at most 32.
    if got == 0 { unsafe { read_address(at, length.min(32)) } } else { None }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, to: *const sockaddr, length: socklen_t) -> c_int {
    if let Some(object) = fds::get(fd)
        && object.stream().is_some()
    {
        return fail(Errno::ISCONN) as c_int;
    }
    // SAFETY: the caller guarantees valid pointers.
    let ours = unsafe { read_address(to, length) }
        .filter(|to| to.port != 0)
        .and_then(|to| Some((to, real::tcp_domain(fd)?)));
    if let Some((to, domain)) = ours {
        let saved = real::errno();
        let tried = guard(|| match try_connect(fd, to, domain) {
            Ok(nonblock) => {
                if nonblock {
                    Err(Errno::INPROGRESS)
                } else {
                    Ok(1)
                }
            }
            Err(NotConnected::NotOurs) => Ok(0),
            Err(NotConnected::Failed(errno)) => Err(errno),
        });
        if tried != 0 {
            return if tried < 0 { -1 } else { 0 };
        }
        real::set_errno(saved);
    }
    sys!(SYS_connect, fd, to, length) as c_int
}

/// Connects through the engine. Returns whether the socket is non-blocking; the program then
/// expects `EINPROGRESS`.
fn try_connect(fd: c_int, to: Address, domain: c_int) -> Result<bool, NotConnected> {
    if real::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) != Some(0) || is_connected(fd) {
        return Err(NotConnected::NotOurs);
    }
    let family = attach::family().ok_or(NotConnected::NotOurs)?;
    let to = if !to.is_unspecified() {
        to
    } else if domain == libc::AF_INET {
        Address::v4([127, 0, 0, 1], to.port)
    } else {
        let mut ip = [0; 16];
        ip[15] = 1;
        Address { ip, port: to.port }
    };
    let from = own_address(fd).filter(|from| from.port != 0);
    let Opened { endpoint, eventfd } = family.connect(to, from.unwrap_or(Address::ANY))?;
    let flags = sys!(SYS_fcntl, fd, libc::F_GETFL, 0) as c_int;
    let cloexec = sys!(SYS_fcntl, fd, libc::F_GETFD, 0) as c_int & libc::FD_CLOEXEC != 0;
    let nonblock = flags & libc::O_NONBLOCK != 0;
    endpoint.set(option::NONBLOCK, nonblock);
    endpoint.set(option::SIX, domain == libc::AF_INET6);
    crate::options::take_over(fd, &endpoint);
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

fn is_connected(fd: c_int) -> bool {
    let mut bytes = [0u64; 4];
    let mut length: socklen_t = 32;
    sys!(SYS_getpeername, fd, bytes.as_mut_ptr(), &raw mut length) == 0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if fds::stream(fd).is_some() {
        return fail(Errno::INVAL) as c_int;
    }
    let done = sys!(SYS_listen, fd, backlog) as c_int;
    if done == 0
        && !fds::get(fd).is_some_and(|object| matches!(object.kind(), DescriptorKind::Listener(_)))
        && let Some(domain) = real::tcp_domain(fd)
    {
        let saved = real::errno();
        guard(|| {
            try_listen(fd, backlog, domain);
            Ok(0)
        });
        real::set_errno(saved);
    }
    done
}

fn try_listen(fd: c_int, backlog: c_int, domain: c_int) {
    let flags = sys!(SYS_fcntl, fd, libc::F_GETFL, 0) as c_int;
    let timeout = crate::options::timeout_of(fd, libc::SO_RCVTIMEO) as i32;
    let Some(listener) = register(fd, backlog, domain, flags & libc::O_NONBLOCK != 0, timeout)
    else {
        return;
    };
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
    let (nonblock, timeout) =
        (old.nonblock.load(Ordering::Relaxed), old.timeout.load(Ordering::Relaxed));
    let Some(new) = register(fd, old.backlog, old.domain, nonblock, timeout) else { return };
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
fn register(
    fd: c_int,
    backlog: c_int,
    domain: c_int,
    nonblock: bool,
    timeout: i32,
) -> Option<Listener> {
    let family = attach::family()?;
    let at = own_address(fd)?;
    let option = |level, name| real::option(fd, level, name).unwrap_or(0);
    let shared = option(libc::SOL_SOCKET, libc::SO_REUSEPORT) != 0;
    let v6_only = domain == libc::AF_INET6 && option(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) != 0;
    // SAFETY: the caller's descriptor, which is open during the call.
    let proof = unsafe { BorrowedFd::borrow_raw(fd) };
    let waiting = u32::try_from(backlog).unwrap_or(4096);
    let listening = match family.listen(at, waiting, shared, v6_only, Some(proof)) {
        Ok(listening) => listening,
        Err(error) => {
            session::log(format_args!("port {} is the kernel's alone: {error}", at.port));
            return None;
        }
    };
    let eventfd = Hidden::new(listening.eventfd).ok()?;
    let (number, timeout) = (listening.listener, AtomicI32::new(timeout));
    let (not_before, nonblocking) = (AtomicU64::new(0), nonblock.into());
    let listener = Listener {
        family,
        number,
        eventfd,
        domain,
        backlog,
        not_before,
        nonblock: nonblocking,
        timeout,
    };
    listener.set_nonblock(nonblock);
    Some(listener)
}

/// Handles a new kernel descriptor: if its number was ours, that one was closed without this
/// library.
fn fresh(fd: c_int) {
    if fds::is_known(fd) && !fds::in_vfork_child() {
        fds::remove(fd);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = sys!(SYS_socket, domain, kind, protocol) as c_int;
    fresh(fd);
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, from: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the caller guarantees valid pointers.
    unsafe { accept4(fd, from, length, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let Some(object) = fds::get(fd) else {
        return sys!(SYS_accept4, fd, from, length, flags) as c_int;
    };
    match object.kind() {
        DescriptorKind::Listener(listener) => {
            guard(|| accept_either(fd, &object, listener, from, length, flags)) as c_int
        }
        DescriptorKind::Stream(_) => fail(Errno::INVAL) as c_int,
        _ => sys!(SYS_accept4, fd, from, length, flags) as c_int,
    }
}

fn accept_either(
    fd: c_int,
    object: &Ref,
    listener: &Listener,
    from: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> Result<usize, Errno> {
    let milliseconds = listener.timeout.load(Ordering::Relaxed);
    let until = match milliseconds {
        0 => Deadline::NEVER,
        some => Deadline::after(some as u64 * 1_000_000),
    };
    loop {
        if let Some(new) = take_ours(listener, flags)? {
            let object = fds::get(new).ok_or(Errno::BADF)?;
            if let Some(stream) = object.stream() {
                // SAFETY: the caller's pointers, under the contract of accept(2).
                unsafe { write_address(stream.endpoint.remote(), stream.domain, from, length) };
            }
            return Ok(new as usize);
        }
        let new = sys!(SYS_accept4, fd, from, length, flags);
        if new >= 0 {
            fresh(new as c_int);
            if listener.family.look() && !fds::in_vfork_child() {
                register_again(fd, object);
            }
            return Ok(new as usize);
        }
        let errno = Errno::from_raw_os_error(real::errno());
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
        Err(Errno::from_raw_os_error(real::errno()))
    }
}

/// Takes the next connection from the engine's queue, as a descriptor of ours. Returns `None` if
/// the queue is empty.
fn take_ours(listener: &Listener, flags: c_int) -> Result<Option<c_int>, Errno> {
    if !take_one(&listener.eventfd) {
        return Ok(None);
    }
    let opened = match listener.family.accept(listener.number) {
        Ok(opened) => opened,
        Err(Errno::AGAIN) => return Ok(None),
        Err(errno @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS)) => return Err(errno),
        // The engine is gone, or no longer knows the listener: only the kernel's queue remains.
        Err(_) => return Ok(None),
    };
    Ok(Some(admit(opened, listener.domain, flags)))
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
        // Fails only if another holder of the eventfd filled its counter, which harms that holder's
        // own listener.
        let _ = rustix::io::write(eventfd, &rest.to_ne_bytes());
    }
    true
}

fn admit(opened: Opened, domain: c_int, flags: c_int) -> c_int {
    let Opened { endpoint, eventfd } = opened;
    endpoint.set(option::NONBLOCK, flags & libc::SOCK_NONBLOCK != 0);
    endpoint.set(option::SIX, domain == libc::AF_INET6);
    let fd = eventfd.into_raw_fd();
    if flags & libc::SOCK_CLOEXEC == 0 {
        sys!(SYS_fcntl, fd, libc::F_SETFD, 0);
    }
    let stream = Stream::new(endpoint, domain);
    fds::put(fd, &fds::make(DescriptorKind::Stream(stream)));
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_shutdown, fd, how) as c_int;
    };
    guard(|| shut(&object, how)) as c_int
}

fn shut(object: &Ref, how: c_int) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    if ![libc::SHUT_RD, libc::SHUT_WR, libc::SHUT_RDWR].contains(&how) {
        return Err(Errno::INVAL);
    }
    if how != libc::SHUT_RD {
        stream.endpoint.finish();
    }
    if how != libc::SHUT_WR {
        stream.endpoint.want_no_more();
    }
    epoll::touch(object);
    Ok(0)
}
