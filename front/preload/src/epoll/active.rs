//! The active members of a set: examined, reported, and armed when they are quiet.

use std::sync::atomic::Ordering;

use libc::{c_int, epoll_event};
use slipway_socket::{Deadline, Half, fetch, heavy};

use super::{ALWAYS, EDGE, GROUP, IN, Inner, Item, ONCE, OUT};
use crate::fds::{Object, Stream};

/// Active connections up to this number are never armed for being quiet.
const FEW: usize = 16;
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

/// Returns the events to report of an item now.
fn due(item: &mut Item) -> u32 {
    let Some(object) = item.object.filter(|_| !item.spent) else { return 0 };
    let Some(stream) = object.stream() else { return 0 };
    let wanted = item.interest.events & !(EDGE | ONCE) | ALWAYS;
    let is = u32::from(stream.endpoint.ready() as u16) & wanted;
    if item.interest.events & EDGE == 0 || is == 0 {
        if item.interest.events & EDGE != 0 {
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
    if is & IN != 0 {
        stream.endpoint.fetch_data();
    }
    if let Some(last) = last.replace(stream) {
        last.writes_next.store(stream.endpoint.next_room().cast_mut(), Ordering::Relaxed);
        last.reads_next.store(stream.endpoint.next_data().cast_mut(), Ordering::Relaxed);
    }
}

/// Reports the events of the active connections. Returns how many there are.
pub(super) fn collect(inner: &mut Inner, into: &mut [epoll_event], first: bool, now: u64) -> usize {
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
            into[found] = epoll_event { events: is, u64: item.interest.datum };
            found += 1;
            if inner.active.len() > MANY
                && let Some(stream) = item.object.and_then(Object::stream)
            {
                announce(stream, is, &mut last);
            }
            item.busy = now;
            if item.interest.events & ONCE != 0 {
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
    let room = item.interest.events & OUT != 0 && (!edge || endpoint.ready() & libc::POLLOUT == 0);
    let more = edge || item.interest.events & IN == 0;
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
    // Restored below, so that the next look finds the same edge again.
    let (marks, reported) = (item.marks, item.reported);
    let blocked = stream.blocked.load(Ordering::Relaxed);
    let is = due(item);
    if is != 0 {
        (item.marks, item.reported) = (marks, reported);
        stream.blocked.store(blocked, Ordering::Relaxed);
    }
    is == 0
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
