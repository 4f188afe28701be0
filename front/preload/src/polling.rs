//! poll(2) and select(2), with our descriptors and the kernel's in one set.

use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, c_ulong, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use slipway_socket::{Deadline, Edge, Endpoint, Errno, Half, heavy, is_told_surely};

use crate::fds::{self, DescriptorKind, Ref};
use crate::guard::{assert_fits, guard};
use crate::polled::{Polled, SetOwner};
use crate::real::{self, sys};
use crate::session;
use crate::time::after;

/// Events that poll(2) reports without being asked for them.
const ALWAYS: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
/// The longest sleep in nanoseconds. Another thread may drain a connection's eventfd before this
/// one sees it, so a sleeper looks again after this time.
const LONGEST_SLEEP: u64 = 1_000_000_000;
/// The longest sleep in nanoseconds if a wake-up may be lost ([`is_told_surely`] is `false`), or if
/// there is no descriptor for the edges of shared eventfds.
const LONGEST_UNSURE_SLEEP: u64 = 1_000_000;

/// # Safety
/// The contract of ppoll(2).
unsafe fn slice<'a>(fds: *mut pollfd, count: nfds_t) -> Result<&'a mut [pollfd], Errno> {
    match usize::try_from(count) {
        Ok(0) => Ok(&mut []),
        Ok(count) if !fds.is_null() && count <= 1 << 20 => {
            // SAFETY: the caller guarantees valid pointers.
            Ok(unsafe { std::slice::from_raw_parts_mut(fds, count) })
        }
        _ => Err(Errno::INVAL),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller guarantees valid pointers.
    if unsafe { has_ours(fds, count) } {
        let until = match u64::try_from(timeout) {
            Ok(milliseconds) => Deadline::after(milliseconds * 1_000_000),
            Err(_) => Deadline::NEVER,
        };
        // SAFETY: the caller guarantees valid pointers.
        return guard(|| unsafe { poll_both(slice(fds, count)?, until, std::ptr::null()) })
            as c_int;
    }
    sys!(SYS_poll, fds, count, timeout) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    room: usize,
) -> c_int {
    assert_fits(count as usize * size_of::<pollfd>(), room);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { poll(fds, count, timeout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller guarantees valid pointers.
    if unsafe { has_ours(fds, count) } {
        // SAFETY: the caller guarantees valid pointers.
        let until = unsafe { timeout.as_ref() }.map_or(Deadline::NEVER, after);
        // SAFETY: the caller guarantees valid pointers.
        return guard(|| unsafe { poll_both(slice(fds, count)?, until, mask) }) as c_int;
    }
    // The system call writes the remaining time to the timeout; libc's function does not.
    // SAFETY: the caller guarantees that the pointer is valid if it is not null.
    let own = unsafe { timeout.as_ref() }.copied();
    let at = own.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    sys!(SYS_ppoll, fds, count, at, mask, 8) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: usize,
) -> c_int {
    assert_fits(count as usize * size_of::<pollfd>(), room);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { ppoll(fds, count, timeout, mask) }
}

unsafe fn has_ours(fds: *const pollfd, count: nfds_t) -> bool {
    // SAFETY: the caller guarantees valid pointers.
    !fds.is_null() && (0..count as usize).any(|at| fds::is_known(unsafe { (*fds.add(at)).fd }))
}

/// Returns the events of `object` that `events` asks for.
fn ready_events(object: &Ref, events: i16) -> i16 {
    object.stream().map_or(0, |stream| stream.endpoint.ready() & (events | ALWAYS))
}

/// Returns the connections in a set, with their positions.
fn streams(set: &[pollfd]) -> impl Iterator<Item = (usize, Ref)> + '_ {
    set.iter().enumerate().filter_map(|(at, polled)| Some((at, fds::stream(polled.fd)?)))
}

/// Fills in the ready events of our connections. Returns how many are ready. If a peer sent on one
/// connection before it sent on another, and the later one is reported, so is the earlier one.
fn look(set: &mut [pollfd]) -> usize {
    // The earlier connection may have been looked at before its bytes came: look at all again.
    let ready = look_once(set);
    if ready > 0 && ready < set.len() { look_once(set) } else { ready }
}

fn look_once(set: &mut [pollfd]) -> usize {
    let mut ready = 0;
    for polled in set.iter_mut() {
        if let Some(object) = fds::stream(polled.fd) {
            polled.revents = ready_events(&object, polled.events);
            ready += usize::from(polled.revents != 0);
        }
    }
    ready
}

fn poll_both(set: &mut [pollfd], until: Deadline, mask: *const sigset_t) -> Result<usize, Errno> {
    loop {
        let mut ready = look(set);
        if ready == 0 && !until.has_passed() {
            ready = spin(set, until);
        }
        if ready > 0 || until.has_passed() {
            return Ok(ready + poll_kernel(set, Some(0), mask, false, None)?);
        }
        let edge = watch_edges(set);
        if streams(set).next().is_some() && !arm(set) {
            continue;
        }
        let (longest, edge) = match &edge {
            Ok(edge) => (None, edge.as_ref()),
            // Without a descriptor for the shared eventfds' edges, the thread looks often.
            Err(_) => (Some(LONGEST_UNSURE_SLEEP), None),
        };
        let left = longest_sleep(set, until).into_iter().chain(longest).min();
        let others = poll_kernel(set, left, mask, true, edge)?;
        let ready = look(set);
        if ready + others > 0 {
            streams(set).for_each(|(_, object)| {
                if let Some(stream) = object.stream() {
                    stream.endpoint.spin().woke();
                }
            });
            return Ok(ready + others);
        }
    }
}

/// Busy-polls for a while, if all descriptors are ours, they are at most eight and traffic was
/// recent. Returns how many are ready.
fn spin(set: &mut [pollfd], until: Deadline) -> usize {
    let ours = streams(set).take(9).count();
    let Some((_, first)) = streams(set).next() else { return 0 };
    let Some(stream) = first.stream() else { return 0 };
    // A kernel descriptor's events must not wait while we spin for ours.
    if ours > 8 || ours < set.iter().filter(|polled| polled.fd >= 0).count() {
        return 0;
    }
    let spin = stream.endpoint.spin();
    let mut ready = 0;
    spin.until(until.left().unwrap_or(u64::MAX), || {
        ready = look(set);
        ready > 0
    });
    spin.sleeps();
    ready
}

/// Returns the longest time to sleep, in nanoseconds; `None` is for ever.
fn longest_sleep(set: &[pollfd], until: Deadline) -> Option<u64> {
    let longest = if is_told_surely() { LONGEST_SLEEP } else { LONGEST_UNSURE_SLEEP };
    match streams(set).next() {
        None => until.left(),
        Some(_) => Some(until.left().unwrap_or(longest).min(longest)),
    }
}

/// Asks the other sides to raise the eventfds, with one barrier. Returns `false` if something is
/// ready by now.
fn arm(set: &[pollfd]) -> bool {
    for (at, object) in streams(set) {
        wishes(&object, set[at].events, |endpoint, half, least| endpoint.wish(half, least));
    }
    heavy();
    let mut nothing = true;
    for (at, object) in streams(set) {
        wishes(&object, set[at].events, |endpoint, half, least| {
            endpoint.is_armed(half, least);
        });
        nothing &= ready_events(&object, set[at].events) == 0;
    }
    nothing
}

/// Calls `wish` for each half of a connection that `events` are about, with the least number of
/// bytes to wait for: room for one byte to send, and one arrived byte. If `events` do not ask for
/// arrived bytes, more than have arrived, so that only an end or further bytes wake the sleeper.
fn wishes(object: &Ref, events: i16, mut wish: impl FnMut(&Endpoint, Half, usize)) {
    let Some(stream) = object.stream() else { return };
    let endpoint = &stream.endpoint;
    if events & libc::POLLOUT != 0 {
        wish(endpoint, Half::Sending, 1);
    }
    let wants = events & (libc::POLLIN | libc::POLLRDNORM) != 0;
    wish(endpoint, Half::Receiving, if wants { 1 } else { endpoint.arrived() + 1 });
}

/// Watches the edges of the shared eventfds in `set` from now on. Returns `None` if none are
/// shared.
fn watch_edges(set: &[pollfd]) -> Result<Option<Edge>, Errno> {
    let mut edge = None;
    for (at, object) in streams(set) {
        let Some(stream) = object.stream().filter(|stream| stream.endpoint.is_shared()) else {
            continue;
        };
        if edge.is_none() {
            edge = Some(Edge::new()?);
        }
        if let Some(edge) = &edge {
            edge.add(&stream.endpoint, crate::real::borrowed(set[at].fd))?;
        }
    }
    if let Some(edge) = &edge {
        edge.begin()?;
    }
    Ok(edge)
}

/// Polls the kernel's descriptors in `set`. With `sleep`, also polls the eventfds of our
/// connections, or for shared eventfds the edges in `edge`. Returns how many of the kernel's
/// descriptors are ready.
fn poll_kernel(
    set: &mut [pollfd],
    left: Option<u64>,
    mask: *const sigset_t,
    sleep: bool,
    edge: Option<&Edge>,
) -> Result<usize, Errno> {
    let mut polled = Polled::new(set, |fd| found(fd, sleep));
    let family = if sleep { session::known() } else { None };
    let engine = family.as_ref().map(|family| polled.add(family.descriptor(), 0));
    if let Some(edge) = edge {
        polled.add(edge.as_fd().as_raw_fd(), libc::POLLIN);
    }
    let time = left.map(|left| timespec {
        tv_sec: (left / 1_000_000_000) as _,
        tv_nsec: (left % 1_000_000_000) as _,
    });
    let at = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let list = polled.list();
    if sys!(SYS_ppoll, list.as_mut_ptr(), list.len(), at, mask, 8) < 0 {
        return Err(Errno::from_raw_os_error(real::errno()));
    }
    if let Some((family, engine)) = family.zip(engine)
        && polled.said(engine) != 0
    {
        family.bury();
    }
    Ok(polled.tell(set, |fd, object| {
        // Not if the number was reused meanwhile: the eventfd's count is meant for its new owner.
        if fds::get(fd).is_some_and(|now| identity(&now) == object) {
            slipway_peer::eventfd::drain(crate::real::borrowed(fd));
        }
    }))
}

/// Returns a number that tells an object from others. It keeps no reference.
fn identity(object: &Ref) -> usize {
    std::ptr::from_ref(object.object()).addr()
}

/// Returns what a number stands for now, for a poll that sleeps or for one that only looks.
fn found(fd: c_int, sleep: bool) -> SetOwner {
    let Some(object) = fds::get(fd) else { return SetOwner::Kernels };
    match object.kind() {
        DescriptorKind::Stream(stream) => SetOwner::Stream {
            object: identity(&object),
            sleeps: sleep && !stream.endpoint.is_shared(),
        },
        DescriptorKind::Listener(listener) => SetOwner::Listener(listener.eventfd.as_raw_fd()),
        _ => SetOwner::Kernels,
    }
}

/// The sets of select(2): descriptors to read, to write, and with exceptions.
type Sets = [*mut fd_set; 3];
/// For each of [`Sets`], the events of poll(2) to ask for, and those that count (its manual page).
const EVENTS: [(i16, i16); 3] = [
    (libc::POLLIN, libc::POLLIN | libc::POLLHUP | libc::POLLERR),
    (libc::POLLOUT, libc::POLLOUT | libc::POLLERR),
    (libc::POLLPRI, libc::POLLPRI),
];

/// Returns the word of a set that holds the bit of `fd`, and that bit. Sets may be longer than
/// `fd_set`.
unsafe fn word(set: *mut fd_set, fd: c_int) -> (*mut c_ulong, c_ulong) {
    let place = set.cast::<c_ulong>().wrapping_add(fd as usize / 64);
    (place, 1 << (fd as usize % 64))
}

unsafe fn is_in(set: *mut fd_set, fd: c_int) -> bool {
    if set.is_null() {
        return false;
    }
    // SAFETY: the caller guarantees valid pointers.
    let (place, bit) = unsafe { word(set, fd) };
    // SAFETY: the caller guarantees valid pointers.
    unsafe { *place & bit != 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let sets = [read, write, except];
    // SAFETY: the caller guarantees valid pointers, here and below.
    if !unsafe { selects_ours(count, sets) } {
        return sys!(SYS_select, count, read, write, except, timeout) as c_int;
    }
    // SAFETY: the caller guarantees valid pointers.
    let until = unsafe { timeout.as_ref() }.map_or(Deadline::NEVER, |time| {
        after(&timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_usec * 1000 })
    });
    // SAFETY: the caller guarantees valid pointers.
    let got = guard(|| unsafe { select_both(count, sets, until, std::ptr::null()) }) as c_int;
    // Linux stores the remaining time.
    // SAFETY: the caller guarantees that the pointer is valid if it is not null.
    if let (Some(time), Some(left)) = (unsafe { timeout.as_mut() }, until.left()) {
        time.tv_sec = (left / 1_000_000_000) as _;
        time.tv_usec = (left % 1_000_000_000 / 1000) as _;
    }
    got
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let sets = [read, write, except];
    // SAFETY: the caller guarantees valid pointers, here and below.
    if !unsafe { selects_ours(count, sets) } {
        // SAFETY: the caller guarantees valid pointers.
        let own = unsafe { timeout.as_ref() }.copied();
        let at = own.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mask = [mask as usize, 8];
        return sys!(SYS_pselect6, count, read, write, except, at, mask.as_ptr()) as c_int;
    }
    // SAFETY: the caller guarantees valid pointers.
    let until = unsafe { timeout.as_ref() }.map_or(Deadline::NEVER, after);
    // SAFETY: the caller guarantees valid pointers.
    guard(|| unsafe { select_both(count, sets, until, mask) }) as c_int
}

unsafe fn selects_ours(count: c_int, sets: Sets) -> bool {
    (0..count.max(0)).any(|fd| {
        // SAFETY: the caller guarantees valid pointers.
        fds::is_known(fd) && sets.iter().any(|set| unsafe { is_in(*set, fd) })
    })
}

unsafe fn select_both(
    count: c_int,
    sets: Sets,
    until: Deadline,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let mut polled = Vec::new();
    for fd in 0..count {
        let mut events = 0;
        for (set, (wanted, _)) in sets.iter().zip(EVENTS) {
            // SAFETY: the caller guarantees valid pointers.
            events |= if unsafe { is_in(*set, fd) } { wanted } else { 0 };
        }
        if events != 0 {
            polled.push(pollfd { fd, events, revents: 0 });
        }
    }
    poll_both(&mut polled, until, mask)?;
    if polled.iter().any(|one| one.revents & libc::POLLNVAL != 0) {
        return Err(Errno::BADF);
    }
    let mut ready = 0;
    for one in &polled {
        for (set, (wanted, counts)) in sets.into_iter().zip(EVENTS) {
            if one.events & wanted == 0 {
                continue;
            }
            // SAFETY: the caller guarantees valid pointers; the set is not null, since the bit was
            // in it.
            let (place, bit) = unsafe { word(set, one.fd) };
            if one.revents & counts != 0 {
                ready += 1;
            } else {
                // SAFETY: the caller guarantees valid pointers.
                unsafe { *place &= !bit };
            }
        }
    }
    Ok(ready)
}
