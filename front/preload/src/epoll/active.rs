//! The active members of a set: examined, reported, and armed when they are quiet.

use std::sync::atomic::Ordering;

use libc::{c_int, epoll_event};
use slipway_socket::{Deadline, Half, fetch, heavy};

use super::kernels::Kernels;
use super::ready::{Found, Ready, place};
use super::{ALWAYS, EDGE, GROUP, Inner, Item, ONCE, READ, WRITE};
use crate::fds::{Object, Stream};

/// Active connections up to this number are never armed for being quiet.
const FEW: usize = 16;
/// In a set of at most so many connections, the armed ones are looked at when some may be raised.
/// In a larger one the kernel is asked, which costs as much as a look at so many.
const LOOKED_AT: usize = 32;
/// With more active connections than this, their memory is prefetched by the following numbers of
/// turns.
const MANY: usize = 64;
const ITEM_AHEAD: usize = 24;
const OBJECT_AHEAD: usize = 16;
const STREAM_AHEAD: usize = 8;
/// Nanoseconds, for each active connection, without an event until a connection counts as quiet.
/// That is longer than the other side needs to serve all of them. Quiet ones are armed when they
/// are a quarter of all.
const PATIENCE: u64 = 4_000;

pub(super) fn activate(inner: &mut Inner, fd: c_int) {
    let item = usize::try_from(fd).ok().and_then(|at| inner.items.get_mut(at)?.as_mut());
    if let Some(item) = item
        && item.object.is_some()
        && !std::mem::replace(&mut item.active, true)
    {
        item.busy = Deadline::now();
        inner.active.push_back(fd);
    }
}

/// Activates what the number in a kernel datum stands for: a connection whose eventfd was raised,
/// or the members of a group.
pub(super) fn activate_raised(inner: &mut Inner, number: u32) {
    if number & GROUP == 0 {
        return activate(inner, number as c_int);
    }
    let group = (number & !GROUP) as usize;
    for at in 0..inner.groups.members(group).len() {
        activate(inner, inner.groups.members(group)[at]);
    }
}

pub(super) fn activate_all(inner: &mut Inner) {
    for fd in 0..inner.items.len() {
        activate(inner, fd as c_int);
    }
}

/// Returns the events that are to be reported of an item now, and its stream's marks. Reporting
/// them is [`report_item`].
fn due(item: &mut Item) -> (u32, (u64, u64)) {
    let stream = item.object.filter(|_| !item.spent).and_then(Object::stream);
    let Some(stream) = stream else { return (0, item.marks) };
    let wanted = item.interest.events & !(EDGE | ONCE) | ALWAYS;
    let is = u32::from(stream.endpoint.ready() as u16) & wanted;
    if item.interest.events & EDGE == 0 {
        return (is, item.marks);
    }
    if is == 0 {
        item.reported = 0;
        return (0, item.marks);
    }
    let marks = stream.endpoint.marks();
    let arrived = marks.0 != item.marks.0 && is & READ != 0;
    let room = is & WRITE != 0 && stream.blocked.load(Ordering::Relaxed);
    let new = is & !item.reported;
    (if arrived || room || new != 0 { is } else { 0 }, marks)
}

/// Notes in an item that its events are reported, at the time `now`.
fn report_item(item: &mut Item, ready: &Ready, now: u64) {
    if item.interest.events & EDGE != 0 {
        let stream = item.object.and_then(Object::stream);
        if let Some(stream) = stream.filter(|_| ready.is & WRITE != 0) {
            stream.blocked.store(false, Ordering::Relaxed);
        }
        item.marks = ready.marks;
        item.reported = ready.is;
    }
    item.busy = now;
    item.last_report = now;
}

/// Prefetches the memory that the next active connections' turns will read, each part by a pointer
/// that was prefetched before it. With very many sockets none of it is in the caches when the turn
/// comes.
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

/// Prefetches the data of `stream`, which is reported after `last`, and notes in `last` what a
/// transfer on it is to prefetch for `stream`.
#[inline]
fn announce<'a>(stream: &'a Stream, is: u32, last: &mut Option<&'a Stream>) {
    if is & READ != 0 {
        stream.endpoint.fetch_data();
    }
    if let Some(last) = last.replace(stream) {
        last.writes_next.store(stream.endpoint.next_room().cast_mut(), Ordering::Relaxed);
        last.reads_next.store(stream.endpoint.next_data().cast_mut(), Ordering::Relaxed);
    }
}

/// Looks at the active connections. What is found is in `inner.found`, in the order to report it.
/// `now` is a time before the look. With `first`, quiet connections are armed.
pub(super) fn look(inner: &mut Inner, first: bool, now: u64) {
    inner.found.clear();
    let patience = inner.active.len() as u64 * PATIENCE;
    for _ in 0..inner.active.len() {
        let Some(fd) = inner.active.pop_front() else { break };
        let many = inner.active.len() > FEW;
        if inner.active.len() > MANY {
            fetch_next(inner);
        }
        let Some(item) = inner.items.get_mut(fd as usize).and_then(Option::as_mut) else {
            continue;
        };
        if !find(&mut inner.found, item, fd, now)
            && first
            && many
            && now.wrapping_sub(item.busy) > patience
        {
            inner.quiet.push(fd);
        } else {
            inner.active.push_back(fd);
        }
    }
    inner.found.sort();
    part_with_quiet(inner);
}

/// Returns the item of `fd` as one to report, or `None` if it has no events.
#[inline]
fn looked_at(item: &mut Item, fd: c_int, now: u64) -> Option<Ready> {
    let (is, marks) = due(item);
    if is == 0 {
        return None;
    }
    let since = item.object.and_then(Object::stream)?.endpoint.since();
    let (time, since) = place(since, item.last_report, now);
    Some(Ready { time, since, fd, is, marks })
}

/// Adds the item of `fd` to what was found, if it has events. Returns whether it has.
#[inline]
fn find(found: &mut Found, item: &mut Item, fd: c_int, now: u64) -> bool {
    let ready = looked_at(item, fd, now);
    let is = ready.is_some();
    if is {
        item.found = now;
    }
    found.add(ready);
    is
}

/// Looks at the connections that are not active, and activates those that have events.
pub(super) fn look_at_armed(inner: &mut Inner, now: u64) {
    let Inner { items, active, ours, found, .. } = inner;
    for fd in ours.iter() {
        let Some(Some(item)) = items.get_mut(*fd as usize) else { continue };
        if !item.active && find(found, item, *fd, now) {
            item.active = true;
            item.busy = now;
            active.push_back(*fd);
        }
    }
    found.sort();
}

/// Looks once more at the active connections that the look of the time `now` found without bytes.
pub(super) fn look_back(inner: &mut Inner, now: u64) {
    let Inner { items, active, found, .. } = inner;
    for fd in active.iter() {
        let Some(Some(item)) = items.get_mut(*fd as usize) else { continue };
        let stream = item.object.and_then(Object::stream);
        if item.found != now && stream.is_some_and(|stream| stream.endpoint.is_readable()) {
            find(found, item, *fd, now);
        }
    }
    found.sort();
}

/// Returns whether a connection was found that may have become ready after one that is armed.
pub(super) fn may_be_raised(inner: &mut Inner) -> bool {
    let has_armed = inner.active.len() + inner.spent < inner.ours.len();
    has_armed && !inner.found.is_empty() && inner.peers.have_raised()
}

/// Returns whether there are so few connections that [`look_at_armed`] costs less than to ask the
/// kernel.
pub(super) fn are_few(inner: &Inner) -> bool {
    inner.ours.len() <= LOOKED_AT
}

/// Reports the connections that were found, and the kernel's events, in order. The connections that
/// there is no room for stay found. With `again`, they stayed so before, and only those are
/// reported that have not changed. Returns how many events there are.
pub(super) fn report(
    inner: &mut Inner,
    into: &mut [epoll_event],
    kernels: &Kernels,
    now: u64,
    again: bool,
) -> usize {
    let (mut count, mut told, mut is_once) = (0, 0, false);
    let mut last: Option<&Stream> = None;
    while count + (kernels.count() - told) < into.len() {
        let Some(ready) = inner.found.take() else { break };
        let item = inner.items.get_mut(ready.fd as usize).and_then(Option::as_mut);
        let Some(item) = item.filter(|item| item.active) else { continue };
        if again && looked_at(item, ready.fd, now) != Some(ready) {
            continue;
        }
        while let Some((event, time)) = kernels.get(told)
            && time < ready.time
        {
            into[count] = event;
            (count, told) = (count + 1, told + 1);
        }
        report_item(item, &ready, now);
        into[count] = epoll_event { events: ready.is, u64: item.interest.datum };
        count += 1;
        if inner.active.len() > MANY
            && let Some(stream) = item.object.and_then(Object::stream)
        {
            announce(stream, ready.is, &mut last);
        }
        if item.interest.events & ONCE != 0 {
            (item.spent, item.active, is_once) = (true, false, true);
            inner.spent += 1;
        }
    }
    if is_once {
        let Inner { items, active, .. } = inner;
        active.retain(|fd| items[*fd as usize].as_ref().is_some_and(|item| item.active));
    }
    while let Some((event, _)) = kernels.get(told) {
        into[count] = event;
        (count, told) = (count + 1, told + 1);
    }
    count
}

/// Arms the quiet connections with one barrier, so that they are not examined in vain. Does so only
/// if they are more than a quarter of the active ones.
fn part_with_quiet(inner: &mut Inner) {
    let Inner { items, active, quiet, .. } = inner;
    if quiet.len() > active.len() / 4 {
        arm_of(items, quiet);
    }
    active.extend(quiet.drain(..));
}

/// Arms the items of `fds`. Leaves those in `fds` that have an event to report.
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

/// Returns what an item is armed for: its object, whether it waits for room to send, and the number
/// of bytes to wait for.
fn wishes(item: &Item) -> Option<(&'static Object, bool, usize)> {
    let object = item.object.filter(|_| !item.spent)?;
    let endpoint = &object.stream()?.endpoint;
    let edge = item.interest.events & EDGE != 0;
    let room =
        item.interest.events & WRITE != 0 && (!edge || endpoint.ready() & libc::POLLOUT == 0);
    let more = edge || item.interest.events & READ == 0;
    Some((object, room, if more { endpoint.arrived() + 1 } else { 1 }))
}

/// Does the first part of arming: asks the other side to raise the eventfd.
fn wish(item: &Item) {
    let Some((object, room, least)) = wishes(item) else { return };
    let Some(stream) = object.stream() else { return };
    if room {
        stream.endpoint.wish(Half::Sending, 1);
    }
    stream.endpoint.wish(Half::Receiving, least);
}

/// Does the last part of arming, after a barrier. Returns `false` if an event is to be reported.
fn is_armed(item: &mut Item) -> bool {
    let Some((object, room, least)) = wishes(item) else { return true };
    let Some(stream) = object.stream() else { return true };
    if room {
        stream.endpoint.is_armed(Half::Sending, 1);
    }
    stream.endpoint.is_armed(Half::Receiving, least);
    due(item).0 == 0
}

/// Arms all active connections with one barrier. Returns `false` if an event is to be reported.
pub(super) fn arm_all(inner: &mut Inner) -> bool {
    if inner.active.is_empty() {
        return true;
    }
    let Inner { items, active, quiet, .. } = inner;
    quiet.extend(active.drain(..));
    arm_of(items, quiet);
    active.extend(quiet.drain(..));
    active.is_empty()
}
