//! select(2) with our descriptors and the kernel's in one set: a poll(2) of the sets' members.

use libc::{c_int, c_ulong, fd_set, pollfd, sigset_t, timespec, timeval};
use slipway_socket::{Deadline, Errno};

use crate::fds;
use crate::guard::guard;
use crate::polling::poll_both;
use crate::real::sys;
use crate::time::after;

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
///
/// # Safety
/// The contract of pselect(2).
unsafe fn word(set: *mut fd_set, fd: c_int) -> (*mut c_ulong, c_ulong) {
    let place = set.cast::<c_ulong>().wrapping_add(fd as usize / 64);
    (place, 1 << (fd as usize % 64))
}

/// Returns whether `fd` is in a set, which may be null.
///
/// # Safety
/// The contract of pselect(2).
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

/// Returns whether a descriptor of ours is in a set.
///
/// # Safety
/// The contract of pselect(2).
unsafe fn selects_ours(count: c_int, sets: Sets) -> bool {
    (0..count.max(0)).any(|fd| {
        // SAFETY: the caller guarantees valid pointers.
        fds::is_known(fd) && sets.iter().any(|set| unsafe { is_in(*set, fd) })
    })
}

/// Waits until `until` for descriptors of the sets. Leaves the ready ones in the sets, and returns
/// how many bits are set.
///
/// # Errors
/// The errors of pselect(2).
///
/// # Safety
/// The contract of pselect(2).
unsafe fn select_both(
    count: c_int,
    sets: Sets,
    until: Deadline,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    // SAFETY: the caller guarantees valid pointers.
    let mut polled = unsafe { members(count, sets) };
    poll_both(&mut polled, until, mask)?;
    if polled.iter().any(|one| one.revents & libc::POLLNVAL != 0) {
        return Err(Errno::BADF);
    }
    // SAFETY: the caller guarantees valid pointers.
    Ok(polled.iter().map(|one| unsafe { store(one, sets) }).sum())
}

/// Returns the descriptors below `count` that are in a set, with the events to ask for.
///
/// # Safety
/// The contract of pselect(2).
unsafe fn members(count: c_int, sets: Sets) -> Vec<pollfd> {
    let events_of = |fd| {
        // SAFETY: the caller guarantees valid pointers.
        let asks = |set| unsafe { is_in(set, fd) };
        let asked = sets.into_iter().zip(EVENTS).filter(|(set, _)| asks(*set));
        asked.fold(0, |events, (_, (wanted, _))| events | wanted)
    };
    let all = (0..count).map(|fd| pollfd { fd, events: events_of(fd), revents: 0 });
    all.filter(|one| one.events != 0).collect()
}

/// Clears the bits of a descriptor in the sets whose events it does not have. Returns how many of
/// its bits stay.
///
/// # Safety
/// The contract of pselect(2). `one` comes from [`members`] of the same sets.
unsafe fn store(one: &pollfd, sets: Sets) -> usize {
    let mut stay = 0;
    for (set, (wanted, counts)) in sets.into_iter().zip(EVENTS) {
        if one.events & wanted == 0 {
            continue;
        }
        if one.revents & counts != 0 {
            stay += 1;
            continue;
        }
        // SAFETY: the caller guarantees valid pointers; the set is not null, since the bit was in
        // it.
        let (place, bit) = unsafe { word(set, one.fd) };
        // SAFETY: the caller guarantees valid pointers.
        unsafe { *place &= !bit };
    }
    stay
}
