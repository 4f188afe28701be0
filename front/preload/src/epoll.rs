//! epoll(7) with descriptors of both kinds in one set.
//!
//! The kernel's set stays the program's. A connection is in it as well, by its eventfd, edge-triggered, with a
//! datum that nobody else has: the set's tag and the descriptor. What it is asked for and how lies here.
//!
//! Each connection in a set is *active* or *armed*. epoll_wait(2) looks at the active ones itself, without a
//! system call; before it sleeps it arms them, which makes the other side raise the eventfd; an eventfd that was
//! raised makes its connection active again. An edge is: bytes arrived, a send that found no room would find
//! some, or a bit that was not set when it was reported last.
//!
//! With thousands of active ones two things decide how fast they are. What belongs to one has left the processor's
//! caches when its turn comes, so it is fetched some turns ahead. And an eventfd costs more than a message of a few
//! KiB, so who is not ready stays active for as long as the other side may need to get round to it.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, epoll_event, sigset_t, timespec};
use slipway_socket::lock::Lock;
use slipway_socket::{Deadline, Errno, Half, Spin, fetch, heavy, is_told_surely};

use crate::fds::{self, Kind, Object, Ref, Stream};
use crate::guard::guard;
use crate::polling::after;
use crate::real::{self, sys};
use crate::session;

const EDGE: u32 = libc::EPOLLET as u32;
const ONCE: u32 = libc::EPOLLONESHOT as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
/// The number, in a datum, of the engine's connection.
const ENGINE: u32 = u32::MAX;
/// Nanoseconds for which who finds something of ours does not look at the kernel's again.
const KERNEL_EVERY: u64 = 5_000;
/// Nanoseconds that who may not be told sleeps at a time.
const A_BIT: u64 = 1_000_000;
/// Events that are taken from the kernel at a time.
const BATCH: usize = 64;
/// So many active ones are looked at whether they were ready lately or not.
const FEW: usize = 16;
/// With more than so many their memory is fetched ahead, by so many turns.
const MANY: usize = 64;
const ITEM_AHEAD: usize = 24;
const OBJECT_AHEAD: usize = 16;
const STREAM_AHEAD: usize = 8;
/// One of more is armed when it was not ready for so many nanoseconds for each of them, which is longer than the
/// other side needs to do something about all, and when so are a quarter of them.
const PATIENCE: u64 = 4_000;

/// What a set knows of a descriptor.
struct Item {
    events: u32,
    data: u64,
    /// None: the kernel's, which may become ours.
    object: Option<&'static Object>,
    active: bool,
    /// `EPOLLONESHOT` has shot.
    spent: bool,
    /// When it was ready, or became active.
    busy: u64,
    /// Marks and bits when it was reported last.
    marks: (u64, u64),
    reported: u32,
}

#[derive(Default)]
struct Inner {
    items: Vec<Option<Item>>,
    active: std::collections::VecDeque<c_int>,
    /// Of those the ones to be armed: empty between two looks.
    quiet: Vec<c_int>,
    /// When the kernel's were looked at last.
    looked: u64,
    count: usize,
}

/// What this process knows of a kernel's epoll.
pub struct Set {
    inner: Lock<Inner>,
    tag: u32,
    spin: Spin,
    /// The descriptor of the engine's connection that is in the kernel's set; 0: none.
    engine: std::sync::atomic::AtomicI32,
}

/// A tag that no datum of a program begins with by chance: neither an address nor a small number.
fn tag() -> u32 {
    static SEED: AtomicU64 = AtomicU64::new(0);
    let mut bytes = [0; 4];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let count = SEED.fetch_add(1, Ordering::Relaxed) as u32;
    (u32::from_ne_bytes(bytes) ^ count) & 0x3fff_ffff | 0x8000_0000
}

impl Set {
    fn new() -> Self {
        let inner = Lock::new(Inner::default());
        Self { inner, tag: tag(), spin: Spin::default(), engine: 0.into() }
    }

    fn datum(&self, number: u32) -> u64 {
        u64::from(self.tag) << 32 | u64::from(number)
    }

    /// In the child of a fork: the engine's connection is another one.
    pub fn forked(&self) {
        self.engine.store(0, Ordering::Relaxed);
    }
}

fn control(set: c_int, how: c_int, fd: c_int, events: u32, datum: u64) -> c_int {
    let event = epoll_event { events, u64: datum };
    sys!(SYS_epoll_ctl, set, how, fd, &raw const event) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(
    set: c_int,
    how: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let kernel = || sys!(SYS_epoll_ctl, set, how, fd, event) as c_int;
    // SAFETY: as the caller says.
    let wanted = unsafe { event.as_ref() }.map(|event| (event.events, event.u64));
    let Some(object) = fds::get(fd) else {
        let done = kernel();
        // Before connect(2), as nginx does, or listen(2).
        if done == 0 && how == libc::EPOLL_CTL_ADD && is_unconnected(fd) {
            let (events, data) = wanted.unwrap_or_default();
            guard(|| {
                let plain = fds::make(Kind::Plain);
                fds::put(fd, &plain);
                admit(set, fd, &plain, events, data, None);
                Ok(0)
            });
        }
        return done;
    };
    match object.kind() {
        Kind::Stream(_) => guard(|| change(set, how, fd, &object, wanted)) as c_int,
        Kind::Listener(listener) => {
            let done = kernel();
            if done == 0 {
                sys!(SYS_epoll_ctl, set, how, listener.eventfd.as_raw_fd(), event);
                guard(|| {
                    remember(set, how, fd, &object, wanted);
                    Ok(0)
                });
            }
            done
        }
        Kind::Plain => {
            let done = kernel();
            if done == 0 {
                guard(|| {
                    remember(set, how, fd, &object, wanted);
                    Ok(0)
                });
            }
            done
        }
        _ => kernel(),
    }
}

/// Notes what the kernel's set was told of what is the kernel's and may change.
fn remember(set: c_int, how: c_int, fd: c_int, object: &Ref, wanted: Option<(u32, u64)>) {
    match (how, wanted) {
        (libc::EPOLL_CTL_DEL, _) => drop(leave(set, fd, object)),
        (_, Some((events, data))) => admit(set, fd, object, events, data, None),
        _ => {}
    }
}

/// A TCP socket of the kernel's that neither listens nor is connected.
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

fn change(
    set: c_int,
    how: c_int,
    fd: c_int,
    object: &Ref,
    wanted: Option<(u32, u64)>,
) -> Result<usize, Errno> {
    let failed = || Errno::from_raw_os_error(real::errno());
    if how == libc::EPOLL_CTL_DEL {
        if control(set, how, fd, 0, 0) < 0 {
            return Err(failed());
        }
        leave(set, fd, object);
        return Ok(0);
    }
    let (events, data) = wanted.ok_or(Errno::FAULT)?;
    let known = own(set);
    let Kind::Epoll(own) = known.kind() else { return Err(Errno::INVAL) };
    // The kernel knows whether it may be: the set may be none, or have it already.
    if control(set, how, fd, IN | EDGE, own.datum(fd as u32)) < 0 {
        return Err(failed());
    }
    admit(set, fd, object, events, data, object.stream().map(|_| object));
    watch_engine(set, own);
    Ok(0)
}

/// The kernel's set as an object.
fn own(set: c_int) -> Ref {
    if let Some(known) = fds::get(set) {
        return known;
    }
    let made = fds::make(Kind::Epoll(Set::new()));
    fds::put(set, &made);
    made
}

/// The engine's end wakes who sleeps.
fn watch_engine(set: c_int, own: &Set) {
    let Some(family) = session::known() else { return };
    let descriptor = family.descriptor();
    if own.engine.swap(descriptor, Ordering::Relaxed) != descriptor {
        control(set, libc::EPOLL_CTL_ADD, descriptor, EDGE, own.datum(ENGINE));
    }
}

fn admit(set: c_int, fd: c_int, object: &Ref, events: u32, data: u64, ours: Option<&Ref>) {
    let known = own(set);
    let Kind::Epoll(own) = known.kind() else { return };
    let Ok(at) = usize::try_from(fd) else { return };
    let mut inner = own.inner.hold();
    if inner.items.len() <= at {
        inner.items.resize_with(at + 1, || None);
    }
    let was_active = inner.items[at].as_ref().is_some_and(|item| item.active);
    if inner.items[at].is_none() {
        inner.count += 1;
    }
    inner.items[at] = Some(Item {
        events,
        data,
        object: ours.map(Ref::object),
        active: ours.is_some(),
        spent: false,
        busy: Deadline::now(),
        // Nothing was reported: what is so is an edge.
        marks: (u64::MAX, u64::MAX),
        reported: 0,
    });
    if ours.is_some() && !was_active {
        let room = inner.count;
        inner.active.reserve(room);
        inner.active.push_back(fd);
    }
    drop(inner);
    let mut sets = object.sets.hold();
    if !sets.contains(&(set, fd)) {
        sets.push((set, fd));
    }
}

/// Takes `fd` out of the set; what was asked for.
fn leave(set: c_int, fd: c_int, object: &Ref) -> Option<(u32, u64)> {
    object.sets.hold().retain(|one| *one != (set, fd));
    let known = fds::get(set)?;
    let Kind::Epoll(own) = known.kind() else { return None };
    let mut inner = own.inner.hold();
    let item = inner.items.get_mut(usize::try_from(fd).ok()?)?.take()?;
    inner.count -= 1;
    inner.active.retain(|one| *one != fd);
    Some((item.events, item.data))
}

/// The last number of `object` is being closed: it leaves all sets.
pub fn forget(object: &Ref) {
    let sets = std::mem::take(&mut *object.sets.hold());
    for (set, fd) in sets {
        if object.stream().is_some() {
            // Another process may have it open, so the kernel would not take it out.
            let saved = real::errno();
            control(set, libc::EPOLL_CTL_DEL, fd, 0, 0);
            real::set_errno(saved);
        }
        leave(set, fd, object);
    }
}

/// A socket that waited in `set` is a connection of ours now, and its descriptor an eventfd, which the kernel's
/// set does not have yet.
pub fn became_ours(set: c_int, fd: c_int, object: &Ref) {
    let before = fds::get(set);
    let asked = before.as_ref().and_then(|known| {
        let Kind::Epoll(own) = known.kind() else { return None };
        let inner = own.inner.hold();
        let item = inner.items.get(usize::try_from(fd).ok()?)?.as_ref()?;
        Some((item.events, item.data))
    });
    if asked.is_some() {
        let _ = change(set, libc::EPOLL_CTL_ADD, fd, object, asked);
    }
}

/// A socket that waited in `set` listens now, at two queues.
pub fn became_listener(set: c_int, fd: c_int, object: &Ref) {
    let Kind::Listener(listener) = object.kind() else { return };
    if let Some((events, data)) = leave(set, fd, object) {
        control(set, libc::EPOLL_CTL_ADD, listener.eventfd.as_raw_fd(), events, data);
        admit(set, fd, object, events, data, None);
    }
}

/// Something of the connection changed by this process's own doing.
pub fn touch(object: &Ref) {
    for (set, fd) in object.sets.hold().iter().copied() {
        if let Some(known) = fds::get(set)
            && let Kind::Epoll(own) = known.kind()
        {
            activate(&mut own.inner.hold(), fd);
        }
    }
}

fn activate(inner: &mut Inner, fd: c_int) {
    let item = usize::try_from(fd).ok().and_then(|at| inner.items.get_mut(at)?.as_mut());
    if let Some(item) = item
        && item.object.is_some()
        && !std::mem::replace(&mut item.active, true)
    {
        item.busy = Deadline::now();
        inner.active.push_back(fd);
    }
}

fn activate_all(inner: &mut Inner) {
    for fd in 0..inner.items.len() {
        activate(inner, fd as c_int);
    }
}

/// What is to be reported of an item now.
fn due(item: &mut Item) -> u32 {
    let Some(object) = item.object.filter(|_| !item.spent) else { return 0 };
    let Some(stream) = object.stream() else { return 0 };
    let wanted = item.events & !(EDGE | ONCE) | ALWAYS;
    let is = u32::from(stream.endpoint.ready() as u16) & wanted;
    if item.events & EDGE == 0 || is == 0 {
        if item.events & EDGE != 0 {
            item.reported = 0;
        }
        return is;
    }
    let marks = stream.endpoint.marks();
    let arrived = marks.0 != item.marks.0 && is & IN != 0;
    let room = is & OUT != 0 && stream.blocked.load(Ordering::Relaxed);
    let new = is & !item.reported;
    if arrived || room || new != 0 {
        if is & OUT != 0 {
            stream.blocked.store(false, Ordering::Relaxed);
        }
        item.marks = marks;
        item.reported = is;
        is
    } else {
        0
    }
}

/// Has the processor fetch what is looked at in the active ones' next turns, each thing by what was fetched before
/// it: with very many sockets nothing of theirs is near any more when their turn comes.
#[inline]
fn fetch_next(inner: &Inner) {
    let item = |ahead: usize| inner.items.get(*inner.active.get(ahead)? as usize);
    let object = |ahead: usize| item(ahead)?.as_ref()?.object;
    if let Some(item) = item(ITEM_AHEAD) {
        fetch(item, size_of::<Item>());
    }
    if let Some(object) = object(OBJECT_AHEAD) {
        fetch(object, size_of::<Object>());
    }
    if let Some(stream) = object(STREAM_AHEAD).and_then(Object::stream) {
        stream.endpoint.fetch();
    }
}

/// `stream` is reported after `last`: what a transfer will look at is fetched, or will be.
#[inline]
fn announce<'a>(stream: &'a Stream, is: u32, last: &mut Option<&'a Stream>) {
    if is & IN != 0 {
        stream.endpoint.fetch_data();
    }
    if let Some(last) = last.replace(stream) {
        last.ahead.store(stream.endpoint.next_room().cast_mut(), Ordering::Relaxed);
    }
}

/// Reports what is due of the active ones; how many events there are.
fn collect(inner: &mut Inner, into: &mut [epoll_event], first: bool, now: u64) -> usize {
    let mut found = 0;
    let mut last: Option<&Stream> = None;
    let patience = inner.active.len() as u64 * PATIENCE;
    for _ in 0..inner.active.len() {
        if found == into.len() {
            break;
        }
        let Some(fd) = inner.active.pop_front() else { break };
        let many = inner.active.len() > FEW;
        if inner.active.len() > MANY {
            fetch_next(inner);
        }
        let Some(item) = inner.items.get_mut(fd as usize).and_then(Option::as_mut) else {
            continue;
        };
        let is = due(item);
        let mut stays = true;
        if is != 0 {
            into[found] = epoll_event { events: is, u64: item.data };
            found += 1;
            if inner.active.len() > MANY
                && let Some(stream) = item.object.and_then(Object::stream)
            {
                announce(stream, is, &mut last);
            }
            item.busy = now;
            if item.events & ONCE != 0 {
                item.spent = true;
                item.active = false;
                stays = false;
            }
        } else if first && many && now.wrapping_sub(item.busy) > patience {
            inner.quiet.push(fd);
            stays = false;
        }
        if stays {
            inner.active.push_back(fd);
        }
    }
    part_with_quiet(inner);
    found
}

/// Arms the quiet ones, so that nobody looks at them in vain, with one barrier; and only when it is worth that.
fn part_with_quiet(inner: &mut Inner) {
    let Inner { items, active, quiet, .. } = inner;
    if quiet.len() > active.len() / 4 {
        arm_of(items, quiet);
    }
    active.extend(quiet.drain(..));
}

/// Arms the items of `fds`, and leaves in there those that cannot be: something is due.
fn arm_of(items: &mut [Option<Item>], fds: &mut Vec<c_int>) {
    for fd in fds.iter() {
        if let Some(Some(item)) = items.get(*fd as usize) {
            wish(item);
        }
    }
    heavy();
    fds.retain(|fd| {
        let Some(Some(item)) = items.get_mut(*fd as usize) else { return false };
        item.active = !is_armed(item);
        item.active
    });
}

/// What an item is armed for: room to send, and so many bytes at least.
fn wishes(item: &Item) -> Option<(&'static Object, bool, usize)> {
    let object = item.object.filter(|_| !item.spent)?;
    let endpoint = &object.stream()?.endpoint;
    let edge = item.events & EDGE != 0;
    let room = item.events & OUT != 0 && (!edge || endpoint.ready() & libc::POLLOUT == 0);
    let more = edge || item.events & IN == 0;
    Some((object, room, if more { endpoint.arrived() + 1 } else { 1 }))
}

/// The first part of arming: the other side is asked to raise the eventfd.
fn wish(item: &Item) {
    let Some((object, room, least)) = wishes(item) else { return };
    let Some(stream) = object.stream() else { return };
    if room {
        stream.endpoint.wish(Half::Sending, 1);
    }
    stream.endpoint.wish(Half::Receiving, least);
}

/// The last part, after a barrier. False: something is due.
fn is_armed(item: &mut Item) -> bool {
    let Some((object, room, least)) = wishes(item) else { return true };
    let Some(stream) = object.stream() else { return true };
    if room {
        stream.endpoint.is_armed(Half::Sending, 1);
    }
    stream.endpoint.is_armed(Half::Receiving, least);
    // An edge that was found is still one at the next look.
    let (marks, reported) = (item.marks, item.reported);
    let blocked = stream.blocked.load(Ordering::Relaxed);
    let is = due(item);
    if is != 0 {
        (item.marks, item.reported) = (marks, reported);
        stream.blocked.store(blocked, Ordering::Relaxed);
    }
    is == 0
}

/// Arms all, with one barrier; false: something is due.
fn arm_all(inner: &mut Inner) -> bool {
    if inner.active.is_empty() {
        return true;
    }
    let Inner { items, active, quiet, .. } = inner;
    quiet.extend(active.drain(..));
    arm_of(items, quiet);
    active.extend(quiet.drain(..));
    active.is_empty()
}

fn wait_kernel(
    set: c_int,
    into: &mut [epoll_event],
    left: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let count = into.len().min(BATCH);
    let milliseconds =
        left.map_or(-1, |left| c_int::try_from(left.div_ceil(1_000_000)).unwrap_or(c_int::MAX));
    let got = sys!(SYS_epoll_pwait, set, into.as_mut_ptr(), count, milliseconds, mask, 8);
    usize::try_from(got).map_err(|_| Errno::from_raw_os_error(real::errno()))
}

/// Takes out what the kernel says of ours, which becomes active; what is left.
fn translate(set: c_int, own: &Set, events: &mut [epoll_event]) -> usize {
    let mut kept = 0;
    for at in 0..events.len() {
        let event = events[at];
        let data = event.u64;
        if (data >> 32) as u32 != own.tag {
            events[kept] = event;
            kept += 1;
            continue;
        }
        let number = data as u32;
        let mut inner = own.inner.hold();
        if number != ENGINE {
            activate(&mut inner, number as c_int);
            continue;
        }
        if let Some(family) = session::known() {
            family.bury();
        }
        let descriptor = own.engine.swap(0, Ordering::Relaxed);
        control(set, libc::EPOLL_CTL_DEL, descriptor, 0, 0);
        activate_all(&mut inner);
    }
    kept
}

/// What the kernel has, unless it was looked at just now; what it says of ours is active then.
fn of_kernel(
    set: c_int,
    own: &Set,
    into: &mut [epoll_event],
    mask: *const sigset_t,
    now: u64,
) -> usize {
    {
        let mut inner = own.inner.hold();
        if now.wrapping_sub(inner.looked) < KERNEL_EVERY {
            return 0;
        }
        inner.looked = now;
    }
    let saved = real::errno();
    let Ok(got) = wait_kernel(set, into, Some(0), mask) else {
        // A signal shows when there is nothing else to show.
        real::set_errno(saved);
        return 0;
    };
    translate(set, own, &mut into[..got])
}

fn wait_both(
    set: c_int,
    own: &Set,
    into: &mut [epoll_event],
    until: Deadline,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let look = |into: &mut [epoll_event], first| {
        let now = Deadline::now();
        let kernels = of_kernel(set, own, into, mask, now);
        kernels + collect(&mut own.inner.hold(), &mut into[kernels..], first, now)
    };
    let mut first = true;
    loop {
        let mut found = look(into, first);
        let worth = first && !own.inner.hold().active.is_empty();
        if found == 0 && worth && !until.has_passed() {
            own.spin.until(until.left().unwrap_or(u64::MAX), || {
                found = look(into, false);
                found > 0
            });
        }
        if found > 0 {
            return Ok(found);
        }
        first = false;
        if !until.has_passed() && !arm_all(&mut own.inner.hold()) {
            continue;
        }
        own.spin.sleeps();
        let left = if is_told_surely() {
            until.left()
        } else {
            Some(until.left().unwrap_or(A_BIT).min(A_BIT))
        };
        let got = wait_kernel(set, into, left, mask)?;
        let kept = translate(set, own, &mut into[..got]);
        if kept < got {
            own.spin.woke();
        }
        if !is_told_surely() {
            activate_all(&mut own.inner.hold());
        }
        let more = collect(&mut own.inner.hold(), &mut into[kept..], false, Deadline::now());
        if kept + more > 0 || (got == 0 && until.has_passed()) {
            return Ok(kept + more);
        }
    }
}

unsafe fn wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    until: Deadline,
    mask: *const sigset_t,
) -> Option<c_int> {
    let known = fds::get(set)?;
    let Kind::Epoll(own) = known.kind() else { return None };
    let most = usize::try_from(most).ok().filter(|most| (1..1 << 20).contains(most))?;
    if events.is_null() {
        return None;
    }
    // SAFETY: as the caller says; the events are only written.
    let into = unsafe { std::slice::from_raw_parts_mut(events, most) };
    Some(guard(|| wait_both(set, own, into, until, mask)) as c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe { epoll_pwait(set, events, most, timeout, std::ptr::null()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    if fds::is_known(set) {
        let until = match u64::try_from(timeout) {
            Ok(milliseconds) => Deadline::after(milliseconds * 1_000_000),
            Err(_) => Deadline::NEVER,
        };
        // SAFETY: as the caller says.
        if let Some(got) = unsafe { wait(set, events, most, until, mask) } {
            return got;
        }
    }
    sys!(SYS_epoll_pwait, set, events, most, timeout, mask, 8) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if fds::is_known(set) {
        // SAFETY: as the caller says.
        let until = unsafe { timeout.as_ref() }.map_or(Deadline::NEVER, after);
        // SAFETY: as above.
        if let Some(got) = unsafe { wait(set, events, most, until, mask) } {
            return got;
        }
    }
    sys!(SYS_epoll_pwait2, set, events, most, timeout, mask, 8) as c_int
}

/// Before fork(2): nobody else is in the middle of a set.
pub fn hold_all() {
    for (_, object) in fds::all(0, c_int::MAX - 1) {
        if let Kind::Epoll(set) = object.kind() {
            set.inner.take();
        }
    }
}

/// After it.
pub fn release_all() {
    for (_, object) in fds::all(0, c_int::MAX - 1) {
        if let Kind::Epoll(set) = object.kind() {
            set.inner.release();
        }
    }
}
