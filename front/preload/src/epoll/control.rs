//! epoll_ctl(2), and changes to a set's members: closed, connected, listening.
//!
//! epoll_ctl(2) goes three ways. The kernel's descriptors go to the kernel alone, but for sockets
//! that may become ours ([`note_unconnected`]). A listener is the kernel's and ours: the kernel
//! goes first, and [`follow`] does the same with the listener's second queue. A connection is ours,
//! and [`change`] keeps its eventfd in the kernel's set, or that of its group ([`watch`]). All of
//! them end in [`admit`] or [`leave`], which keep the set's members and each object's list of its
//! sets together. Afterwards [`forget`], [`became_ours`], [`became_listener`] and
//! [`stopped_listening`] follow what happens to a descriptor outside of epoll_ctl(2).

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use libc::{c_int, epoll_event};
use slipway_socket::Errno;

use super::active::activate;
use super::groups::Key;
use super::{EDGE, ENGINE, FLAGS, GROUP, IN, Inner, Interest, QUEUE, READ, Set};
use crate::fds::{self, DescriptorKind, Ref};
use crate::listener::Listener;
use crate::real::{self, last_error, sys};
use crate::session;

/// A descriptor in a set.
#[derive(Clone, Copy)]
struct Member {
    set: c_int,
    fd: c_int,
}

/// Calls the kernel's epoll_ctl(2). Returns -1 with errno set if it failed.
pub(super) fn control(set: c_int, how: c_int, fd: c_int, events: u32, datum: u64) -> c_int {
    let event = epoll_event { events, u64: datum };
    sys!(SYS_epoll_ctl, set, how, fd, &raw const event) as c_int
}

/// Carries out epoll_ctl(2). `kernel` makes the system call, and returns its result.
///
/// # Errors
/// The errors of epoll_ctl(2).
pub fn carry_out(
    set: c_int,
    how: c_int,
    fd: c_int,
    interest: Option<Interest>,
    kernel: impl FnOnce() -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let member = Member { set, fd };
    let Some(object) = fds::get(fd) else {
        let done = kernel()?;
        // The kernel adds nothing without an interest.
        if let (libc::EPOLL_CTL_ADD, Some(interest)) = (how, interest) {
            note_unconnected(member, interest);
        }
        return Ok(done);
    };
    match object.kind() {
        DescriptorKind::Stream(_) => change(member, how, &object, interest)?,
        DescriptorKind::Listener(_) | DescriptorKind::Plain => {
            kernel()?;
            follow(member, how, &object, interest)?;
        }
        _ => return kernel(),
    }
    Ok(0)
}

/// Notes a socket that was added before connect(2), as nginx does, or before listen(2): it may
/// become ours.
fn note_unconnected(member: Member, interest: Interest) {
    if is_unconnected(member.fd) {
        let plain = fds::make(DescriptorKind::Plain);
        fds::put(member.fd, &plain);
        admit(member, &plain, interest, None);
    }
}

/// Follows a change that the kernel made to a descriptor of its own in its set: a listener's second
/// queue is changed alike, and the interest is recorded, since the descriptor may become ours. If
/// several numbers of a listener are in the set, the queue has the interest of the first one.
///
/// # Errors
/// The kernel's, if it adds the descriptor but not the second queue. Neither is in the set then.
fn follow(
    member: Member,
    how: c_int,
    object: &Ref,
    interest: Option<Interest>,
) -> Result<(), Errno> {
    let Member { set, fd } = member;
    let has_queue = first_number(set, object).is_none_or(|first| first == fd);
    let listener = match object.kind() {
        DescriptorKind::Listener(listener) => Some(listener),
        _ => None,
    };
    if how == libc::EPOLL_CTL_DEL {
        leave(member, object);
        if let Some(listener) = listener.filter(|_| has_queue) {
            pass_queue_on(set, object, listener);
        }
        return Ok(());
    }
    let Some(interest) = interest else { return Ok(()) };
    // Before the queue, whose events are reported by this record.
    admit(member, object, interest, None);
    match listener {
        Some(listener) if how == libc::EPOLL_CTL_ADD => add_queue(member, listener, interest)
            .inspect_err(|_| {
                leave(member, object);
                control(set, libc::EPOLL_CTL_DEL, fd, 0, 0);
            }),
        Some(listener) if has_queue => {
            // The kernel has just made this change to the listener, so the call has no error.
            control_queue(member, how, listener, interest);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Returns the first number of `object` that is in the set and was not closed.
fn first_number(set: c_int, object: &Ref) -> Option<c_int> {
    let sets = object.sets.hold().clone();
    // The list keeps what was in a set that was closed, and whose number another set may have.
    let is_there = |fd: c_int| {
        let is_its = |its: Ref| std::ptr::eq(its.object(), object.object());
        interest_in(Member { set, fd }).is_some() && fds::get(fd).is_some_and(is_its)
    };
    sets.into_iter().find(|(its, fd)| *its == set && is_there(*fd)).map(|(_, fd)| fd)
}

/// Leaves the second queue of a listener, whose first number left the set, to the next number.
fn pass_queue_on(set: c_int, object: &Ref, listener: &Listener) {
    // Removed in any case: an exclusive member's interest cannot be changed.
    control(set, libc::EPOLL_CTL_DEL, listener.eventfd.as_raw_fd(), 0, 0);
    let next = first_number(set, object).map(|fd| Member { set, fd });
    if let Some((member, interest)) = next.and_then(|next| Some((next, interest_in(next)?))) {
        // The queue that left made room for itself, and epoll_ctl(2) has no error for this.
        let _ = add_queue(member, listener, interest);
    }
}

/// Adds the second queue of a listener to the kernel's set. Another number of the listener may have
/// added it before.
///
/// # Errors
/// The kernel's.
fn add_queue(member: Member, listener: &Listener, interest: Interest) -> Result<(), Errno> {
    let done = control_queue(member, libc::EPOLL_CTL_ADD, listener, interest);
    if done < 0 && last_error() != Errno::EXIST { Err(last_error()) } else { Ok(()) }
}

/// Calls the kernel's epoll_ctl(2) for the second queue of a listener, an eventfd: its readiness
/// stands for that of the listener, which has no other events. Returns -1 with errno set if it
/// failed.
fn control_queue(
    Member { set, fd }: Member,
    how: c_int,
    listener: &Listener,
    Interest { events, .. }: Interest,
) -> c_int {
    let known = get_or_make(set);
    let DescriptorKind::Epoll(own) = known.kind() else { return -1 };
    let readable = if events & READ != 0 { IN } else { 0 };
    let datum = own.datum(QUEUE | fd as u32);
    control(set, how, listener.eventfd.as_raw_fd(), events & FLAGS | readable, datum)
}

/// Returns whether `fd` is a kernel TCP socket that neither listens nor is connected.
fn is_unconnected(fd: c_int) -> bool {
    let saved = real::errno();
    let listens = real::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN);
    let is = listens == Some(0) && real::tcp_domain(fd).is_some() && {
        let mut bytes = [0u64; 4];
        let mut length: libc::socklen_t = 32;
        sys!(SYS_getpeername, fd, bytes.as_mut_ptr(), &raw mut length) < 0
    };
    real::set_errno(saved);
    is
}

/// Carries out epoll_ctl(2) for a connection of ours.
///
/// # Errors
/// The errors of epoll_ctl(2).
fn change(
    member: Member,
    how: c_int,
    object: &Ref,
    interest: Option<Interest>,
) -> Result<(), Errno> {
    let Member { set, fd } = member;
    let group = object.stream().and_then(|stream| stream.endpoint.group());
    if how == libc::EPOLL_CTL_DEL {
        if group.is_none() && control(set, how, fd, 0, 0) < 0 {
            return Err(last_error());
        }
        let left = leave(member, object);
        return if left.is_some() || group.is_none() { Ok(()) } else { Err(Errno::NOENT) };
    }
    let interest = interest.ok_or(Errno::FAULT)?;
    if interest.is_refused(how, interest_in(member)) {
        return Err(Errno::INVAL);
    }
    let known = get_or_make(set);
    let DescriptorKind::Epoll(own) = known.kind() else { return Err(Errno::INVAL) };
    match group {
        Some(key) => watch(member, own, how, object, key)?,
        // The kernel checks the request: `set` may be no epoll set, or contain `fd` already.
        None if control(set, how, fd, IN | EDGE, own.datum(fd as u32)) < 0 => {
            return Err(last_error());
        }
        None => {}
    }
    admit(member, object, interest, object.stream().map(|_| object));
    watch_engine(set, own);
    Ok(())
}

/// Returns whether `fd` is in the set as `object`, and not as a previous owner of the number.
fn is_in(inner: &Inner, fd: c_int, object: &Ref) -> bool {
    inner.object(fd).is_some_and(|its| std::ptr::eq(its, object.object()))
}

/// Adds a member of a group, or checks that it is there. The kernel's set gets only the first
/// member of each group.
///
/// # Errors
/// The errors of epoll_ctl(2).
fn watch(
    Member { set, fd }: Member,
    own: &Set,
    how: c_int,
    object: &Ref,
    key: Key,
) -> Result<(), Errno> {
    let mut inner = own.inner.hold();
    match (how, is_in(&inner, fd, object)) {
        (libc::EPOLL_CTL_ADD, true) => return Err(Errno::EXIST),
        (libc::EPOLL_CTL_ADD, false) => {}
        (_, true) => return Ok(()),
        (_, false) => return Err(Errno::NOENT),
    }
    if let Some(group) = inner.groups.find(key) {
        inner.groups.join(group, fd);
        return Ok(());
    }
    let datum = own.datum(GROUP | inner.groups.next() as u32);
    let mut done = control(set, libc::EPOLL_CTL_ADD, fd, IN | EDGE, datum);
    if done < 0 && real::errno() == libc::EEXIST {
        // A previous owner of the number was of this group, and was closed without this library.
        done = control(set, libc::EPOLL_CTL_MOD, fd, IN | EDGE, datum);
    }
    if done < 0 {
        return Err(last_error());
    }
    inner.groups.begin(key, fd);
    Ok(())
}

impl Set {
    /// Removes a closed connection from the kernel's set. The kernel does not do so by itself while
    /// another process has the descriptor open, or other connections share the eventfd. A set that
    /// belongs to another process is left alone.
    fn kernel_forgets(&self, set: c_int, fd: c_int) {
        if !self.is_inherited.load(Ordering::Relaxed) {
            // Fails if the kernel forgot the connection already.
            control(set, libc::EPOLL_CTL_DEL, fd, 0, 0);
        }
    }

    /// Replaces the group's member in the kernel's set, which leaves it, by `next`.
    fn pass_on(&self, set: c_int, fd: Option<c_int>, group: usize, next: Option<c_int>) {
        if let Some(fd) = fd {
            self.kernel_forgets(set, fd);
        }
        if let Some(next) = next
            && !self.is_inherited.load(Ordering::Relaxed)
        {
            // The eventfd stays raised once it was, so adding it reports it again: whatever was
            // missed in between is examined. The member that left made room for this one, and the
            // caller, which may be close(2), has no error for a kernel without memory.
            control(set, libc::EPOLL_CTL_ADD, next, IN | EDGE, self.datum(GROUP | group as u32));
        }
    }
}

/// Returns the object of the kernel's set `set`, made if there is none yet.
fn get_or_make(set: c_int) -> Ref {
    if let Some(known) = fds::get(set) {
        return known;
    }
    let made = fds::make(DescriptorKind::Epoll(Set::new()));
    fds::put(set, &made);
    made
}

/// Adds the engine's connection to the kernel's set, so that the engine's end wakes sleepers. If
/// that fails, the next change of the set tries again.
fn watch_engine(set: c_int, own: &Set) {
    let Some(family) = session::known() else { return };
    let descriptor = family.descriptor();
    if own.engine.swap(descriptor, Ordering::Relaxed) != descriptor
        && control(set, libc::EPOLL_CTL_ADD, descriptor, EDGE, own.datum(ENGINE)) < 0
        && real::errno() != libc::EEXIST
    {
        own.engine.store(0, Ordering::Relaxed);
    }
}

/// Records a member of the set, or its new interest, and notes the set in `object`. A connection,
/// which is passed as `ours` too, is active at first.
fn admit(Member { set, fd }: Member, object: &Ref, interest: Interest, ours: Option<&Ref>) {
    let known = get_or_make(set);
    let DescriptorKind::Epoll(own) = known.kind() else { return };
    let Ok(at) = usize::try_from(fd) else { return };
    own.inner.hold().put(at, interest, ours.map(Ref::object));
    let mut sets = object.sets.hold();
    if !sets.contains(&(set, fd)) {
        sets.push((set, fd));
    }
}

/// Takes `fd` out of the set. Returns its interest, or `None` if it was not in the set.
fn leave(Member { set, fd }: Member, object: &Ref) -> Option<Interest> {
    object.sets.hold().retain(|one| *one != (set, fd));
    let known = fds::get(set)?;
    let DescriptorKind::Epoll(own) = known.kind() else { return None };
    let mut inner = own.inner.hold();
    // The number may have been reused by now, here and in the kernel's set.
    let is_its = inner.object(fd).is_none_or(|its| std::ptr::eq(its, object.object()));
    let group = object.stream().and_then(|stream| stream.endpoint.group());
    if let Some((number, next)) = group.and_then(|group| inner.groups.leave(group, fd)) {
        own.pass_on(set, is_its.then_some(fd), number, next);
    }
    if !is_its {
        return None;
    }
    inner.take(fd).map(|item| item.interest)
}

/// Takes `object`, whose last number is being closed, out of all sets.
pub fn forget(object: &Ref) {
    let sets = std::mem::take(&mut *object.sets.hold());
    for (set, fd) in sets {
        let saved = real::errno();
        take_out(set, fd, object);
        real::set_errno(saved);
    }
}

/// Takes the descriptor `fd` of `object` out of `set`. Returns its interest, or `None` if it was
/// not in the set.
pub fn take_out(set: c_int, fd: c_int, object: &Ref) -> Option<Interest> {
    if object.stream().is_some_and(|stream| !stream.endpoint.is_shared())
        && let Some(known) = fds::get(set)
        && let DescriptorKind::Epoll(own) = known.kind()
        && is_in(&own.inner.hold(), fd, object)
    {
        own.kernel_forgets(set, fd);
    }
    leave(Member { set, fd }, object)
}

/// Puts the kernel's socket `fd`, which stands for `object` now and was a connection of ours before
/// [`take_out`], back into `set`.
pub fn put_back(set: c_int, fd: c_int, interest: Interest, object: &Ref) {
    control(set, libc::EPOLL_CTL_ADD, fd, interest.events, interest.datum);
    admit(Member { set, fd }, object, interest, None);
}

/// Moves a socket that waited in `set` over to our side of it. The socket is a connection of ours
/// now, and its descriptor an eventfd that the kernel's set does not contain yet.
pub fn became_ours(set: c_int, fd: c_int, object: &Ref) {
    let member = Member { set, fd };
    let interest = interest_in(member);
    if interest.is_some()
        && let Err(error) = change(member, libc::EPOLL_CTL_ADD, object, interest)
    {
        // connect(2), which calls this, succeeded and has no error for a set.
        session::log(format_args!("events of descriptor {fd} are lost: epoll_ctl: {error}"));
    }
}

/// Returns the recorded interest of a member of the set.
fn interest_in(Member { set, fd }: Member) -> Option<Interest> {
    let known = fds::get(set)?;
    let DescriptorKind::Epoll(own) = known.kind() else { return None };
    let inner = own.inner.hold();
    Some(inner.items.get(usize::try_from(fd).ok()?)?.as_ref()?.interest)
}

/// Adds the second queue of a listener to `set`, in which the socket waited before listen(2).
pub fn became_listener(set: c_int, fd: c_int, object: &Ref) {
    let DescriptorKind::Listener(listener) = object.kind() else { return };
    let member = Member { set, fd };
    let Some(interest) = leave(member, object) else { return };
    admit(member, object, interest, None);
    if let Err(error) = add_queue(member, listener, interest) {
        // listen(2), which calls this, succeeded and has no error for a set.
        session::log(format_args!("connections at descriptor {fd} are late: epoll_ctl: {error}"));
    }
}

/// Takes the second queue of a listener that the kernel has stopped out of `set`. The socket stays
/// there as `object`, one of the kernel's.
pub fn stopped_listening(set: c_int, fd: c_int, listener: &Listener, object: &Ref) {
    let member = Member { set, fd };
    if let Some(interest) = interest_in(member) {
        // Fails if another number of the listener was in the set, too, and came first.
        control(set, libc::EPOLL_CTL_DEL, listener.eventfd.as_raw_fd(), 0, 0);
        admit(member, object, interest, None);
    }
}

/// Activates a connection in its sets, after this process itself changed its state.
pub fn touch(object: &Ref) {
    // A thread with one of these locks must not wait for another one: see `forking::hold_all`.
    let sets = object.sets.hold().clone();
    for (set, fd) in sets {
        if let Some(known) = fds::get(set)
            && let DescriptorKind::Epoll(own) = known.kind()
        {
            activate(&mut own.inner.hold(), fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interest(datum: u64) -> Option<Interest> {
        Some(Interest { events: IN, datum })
    }

    /// Carries out epoll_ctl(2) for a descriptor, as if the kernel had done the same.
    fn carry(set: c_int, how: c_int, fd: c_int, datum: u64) -> Result<usize, Errno> {
        carry_out(set, how, fd, interest(datum), || Ok(0))
    }

    fn socket(kind: c_int) -> c_int {
        sys!(SYS_socket, libc::AF_INET, kind | libc::SOCK_CLOEXEC, 0) as c_int
    }

    fn close(fds: &[c_int]) {
        for fd in fds {
            fds::remove(*fd);
            real::close(*fd);
        }
    }

    #[test]
    fn a_socket_that_may_become_ours_is_followed_until_it_leaves() {
        let set = sys!(SYS_epoll_create1, libc::EPOLL_CLOEXEC) as c_int;
        let fd = socket(libc::SOCK_STREAM);
        let member = Member { set, fd };
        assert_eq!(carry(set, libc::EPOLL_CTL_ADD, fd, 7), Ok(0));
        let object = fds::get(fd).unwrap();
        assert!(matches!(object.kind(), DescriptorKind::Plain));
        assert_eq!((interest_in(member), first_number(set, &object)), (interest(7), Some(fd)));
        assert_eq!(carry(set, libc::EPOLL_CTL_MOD, fd, 8), Ok(0));
        assert_eq!(interest_in(member), interest(8));
        assert_eq!(object.sets.hold().as_slice(), [(set, fd)]);
        assert_eq!(carry(set, libc::EPOLL_CTL_DEL, fd, 0), Ok(0));
        assert_eq!((interest_in(member), object.sets.hold().len()), (None, 0));
        close(&[fd, set]);
    }

    #[test]
    fn a_socket_that_is_closed_leaves_its_sets() {
        let sets = [(); 2].map(|()| sys!(SYS_epoll_create1, libc::EPOLL_CLOEXEC) as c_int);
        let fd = socket(libc::SOCK_STREAM);
        for set in sets {
            assert_eq!(carry(set, libc::EPOLL_CTL_ADD, fd, 1), Ok(0));
        }
        let members = sets.map(|set| Member { set, fd });
        assert!(members.iter().all(|member| interest_in(*member) == interest(1)));
        close(&[fd]);
        assert!(members.iter().all(|member| interest_in(*member).is_none()));
        close(&sets);
    }

    #[test]
    fn what_cannot_become_ours_or_what_the_kernel_refuses_is_not_noted() {
        let set = sys!(SYS_epoll_create1, libc::EPOLL_CLOEXEC) as c_int;
        let (stream, datagrams) = (socket(libc::SOCK_STREAM), socket(libc::SOCK_DGRAM));
        assert_eq!(carry(set, libc::EPOLL_CTL_ADD, datagrams, 1), Ok(0));
        let refuses = || Err(Errno::EXIST);
        let refused = carry_out(set, libc::EPOLL_CTL_ADD, stream, interest(1), refuses);
        assert_eq!(refused, Err(Errno::EXIST));
        // The kernel adds nothing without an interest.
        assert_eq!(carry_out(set, libc::EPOLL_CTL_ADD, stream, None, || Ok(0)), Ok(0));
        assert!(![set, stream, datagrams].into_iter().any(fds::is_known));
        close(&[stream, datagrams, set]);
    }
}
