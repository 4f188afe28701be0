//! poll(2) with our descriptors and the kernel's in one set.
//!
//! [`poll`], which select(2) uses too, looks at our connections ([`look`]) and at the kernel's
//! descriptors ([`poll_kernel`]), polls in a loop for a while ([`spin`]), arms our connections
//! ([`arm`]) and sleeps ([`sleep`]). Nothing outlives a call: `epoll` has sets that do.

use std::os::fd::{AsFd, AsRawFd};

use libc::{c_int, pollfd, sigset_t};
use slipway_socket::{Deadline, Edge, Endpoint, Errno, Half, heavy, is_told_surely};

use crate::fds::{self, DescriptorKind, Ref};
use crate::polled::{Polled, READ, SetOwner, WRITE};
use crate::real::{self, sys};
use crate::session;
use crate::time::timespec_of;

/// Events that poll(2) reports without being asked for them.
const ALWAYS: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
/// The longest sleep in nanoseconds. Another thread may drain a connection's eventfd before this
/// one sees it, so a sleeper looks again after this time.
const LONGEST_SLEEP: u64 = 1_000_000_000;
/// The longest sleep in nanoseconds if a wake-up may be lost ([`is_told_surely`] is `false`), or if
/// there is no descriptor for the edges of shared eventfds.
const LONGEST_UNSURE_SLEEP: u64 = 1_000_000;
/// The most connections that a thread polls in a loop before it sleeps.
const MOST_SPUN: usize = 8;

/// The occasion of a poll of the kernel.
enum KernelPoll<'a> {
    /// A look at the kernel's own descriptors, without a sleep.
    Look,
    /// A sleep that the eventfds of our connections end, too.
    Sleep {
        /// The longest time, in nanoseconds; `None` is for ever.
        left: Option<u64>,
        /// The edges of shared eventfds, which the thread watches instead of the eventfds.
        edge: Option<&'a Edge>,
    },
}

/// Returns whether a descriptor of the set is ours.
pub fn has_ours(set: &[pollfd]) -> bool {
    set.iter().any(|polled| fds::is_known(polled.fd))
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
    // The first pass may have looked at the earlier connection before its bytes came.
    let ready = look_once(set);
    if ready > 0 && ready < set.len() { look_once(set) } else { ready }
}

/// Fills in the ready events of our connections. Returns how many are ready.
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

/// Polls a set in which a descriptor is ours, until `until`. Only the kernel reads `mask`, the
/// signal mask during a sleep. Returns how many descriptors are ready.
///
/// # Errors
/// The errors of ppoll(2).
pub fn poll(set: &mut [pollfd], until: Deadline, mask: *const sigset_t) -> Result<usize, Errno> {
    loop {
        let mut ready = look(set);
        if ready == 0 && !until.has_passed() {
            ready = spin(set, until);
        }
        if ready > 0 || until.has_passed() {
            return Ok(ready + poll_kernel(set, &KernelPoll::Look, mask)?);
        }
        ready = sleep(set, until, mask)?;
        if ready > 0 {
            return Ok(ready);
        }
    }
}

/// Busy-polls for a while, if all descriptors are ours, they are at most [`MOST_SPUN`] and traffic
/// was recent. Returns how many are ready.
fn spin(set: &mut [pollfd], until: Deadline) -> usize {
    let ours = streams(set).take(MOST_SPUN + 1).count();
    let Some((_, first)) = streams(set).next() else { return 0 };
    let Some(stream) = first.stream() else { return 0 };
    // A kernel descriptor's events must not wait while this thread spins.
    if ours > MOST_SPUN || ours < set.iter().filter(|polled| polled.fd >= 0).count() {
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

/// Sleeps until a descriptor may be ready. Returns how many are. May return 0 before `until`: a
/// connection became ready before the sleep, the wake-up was for nothing, or the sleep was at its
/// longest.
///
/// # Errors
/// The errors of ppoll(2).
fn sleep(set: &mut [pollfd], until: Deadline, mask: *const sigset_t) -> Result<usize, Errno> {
    let edge = watch_edges(set);
    if streams(set).next().is_some() && !arm(set) {
        return Ok(0);
    }
    let mut left = longest_sleep(set, until);
    if edge.is_err() {
        // Without a descriptor for the shared eventfds' edges, the thread looks often.
        left = Some(left.map_or(LONGEST_UNSURE_SLEEP, |left| left.min(LONGEST_UNSURE_SLEEP)));
    }
    let edge = edge.as_ref().ok().and_then(Option::as_ref);
    let kernels = poll_kernel(set, &KernelPoll::Sleep { left, edge }, mask)?;
    let ready = look(set) + kernels;
    if ready > 0 {
        note_wake_up(set);
    }
    Ok(ready)
}

/// Notes at our connections that a sleep ended with an event, from which they learn how long to
/// spin.
fn note_wake_up(set: &[pollfd]) {
    for (_, object) in streams(set) {
        if let Some(stream) = object.stream() {
            stream.endpoint.spin().woke();
        }
    }
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
    if events & WRITE != 0 {
        wish(endpoint, Half::Sending, 1);
    }
    let wants = events & READ != 0;
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
            edge.add(&stream.endpoint, real::borrowed(set[at].fd))?;
        }
    }
    if let Some(edge) = &edge {
        edge.begin()?;
    }
    Ok(edge)
}

/// Polls the kernel's descriptors in `set`. Returns how many of them are ready.
///
/// # Errors
/// The errors of ppoll(2).
fn poll_kernel(
    set: &mut [pollfd],
    occasion: &KernelPoll<'_>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let (left, edge, sleeps) = match occasion {
        KernelPoll::Look => (Some(0), None, false),
        KernelPoll::Sleep { left, edge } => (*left, *edge, true),
    };
    let mut polled = Polled::new(set, |fd| owner(fd, sleeps));
    let family = if sleeps { session::known() } else { None };
    let engine = family.as_ref().map(|family| polled.add(family.descriptor(), 0));
    if let Some(edge) = edge {
        polled.add(edge.as_fd().as_raw_fd(), libc::POLLIN);
    }
    let time = left.map(timespec_of);
    let at = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let list = polled.list();
    if sys!(SYS_ppoll, list.as_mut_ptr(), list.len(), at, mask, 8) < 0 {
        return Err(real::last_error());
    }
    if let Some((family, engine)) = family.zip(engine)
        && polled.said(engine) != 0
    {
        family.bury();
    }
    Ok(polled.tell(set, drain))
}

/// Drains the eventfd of `fd` if the number still stands for the object of this identity. A new
/// owner of the number needs its eventfd's count.
fn drain(fd: c_int, object: usize) {
    if fds::get(fd).is_some_and(|now| identity(&now) == object) {
        slipway_peer::eventfd::drain(real::borrowed(fd));
    }
}

/// Returns a number that tells an object from others. It keeps no reference.
fn identity(object: &Ref) -> usize {
    std::ptr::from_ref(object.object()).addr()
}

/// Returns the owner of a number now. The kernel polls a connection's own eventfd if the thread
/// `sleeps`.
fn owner(fd: c_int, sleeps: bool) -> SetOwner {
    let Some(object) = fds::get(fd) else { return SetOwner::Kernels };
    match object.kind() {
        DescriptorKind::Stream(stream) => SetOwner::Stream {
            object: identity(&object),
            sleeps: sleeps && !stream.endpoint.is_shared(),
        },
        DescriptorKind::Listener(listener) => SetOwner::Listener(listener.eventfd.as_raw_fd()),
        _ => SetOwner::Kernels,
    }
}
