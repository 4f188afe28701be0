//! Eventfds beyond the limit of open files.
//!
//! The engine needs the eventfds of a connection to introduce its two ends, and after that only to
//! tell one end that the other has ended. With very many idle connections the limit of open files
//! would be reached first. That limit holds for each table of descriptors, and threads of one
//! process need not share their table: a thread of [`EventfdThreads`] has a table of its own, takes
//! pairs of eventfds over a socket, and raises them on command. A thread holds as many as the limit
//! allows, and sleeps otherwise. Threads start as they are needed; at first there are none.
//!
//! A descriptor on its way through a socket counts for its user (unix(7)), so pairs go only to a
//! thread that takes them at once, and are never left in a socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, socketpair,
};
use rustix::process::{Resource, getrlimit};
use slipway_peer::{Bin, Foreign};
use slipway_ring::cross::Side;

/// Descriptors of a thread beside its pairs: the standard ones, its socket, those needed for
/// raising.
const RESERVE: u64 = 64;
/// The most threads. With the usual limits they hold far more pairs than there can be connections.
const MOST_THREADS: usize = 64;

/// Returns the number of ends of connections for which an engine has eventfds, at `limit` open
/// files.
pub fn ends_within(limit: u64) -> u64 {
    (limit / 2).saturating_add(limit.saturating_sub(RESERVE).saturating_mul(MOST_THREADS as u64))
}

/// The place of a pair: its thread and its slot there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairPlace {
    thread: u32,
    slot: u32,
}

/// Bytes of a message to a thread: an operation and a slot, `u32` each.
const BYTES: usize = 8;
const KEEP: u32 = 0;
const DROP: u32 = 1;
/// `RAISE` plus the side, [`Side::Zero`] or [`Side::One`], raises that side's eventfd.
const RAISE: u32 = 2;

/// Threads that keep pairs of eventfds.
#[derive(Default)]
pub struct EventfdThreads {
    all: Vec<EventfdThread>,
    /// Set once a thread could not be started. No further start is tried.
    failed: bool,
}

impl EventfdThreads {
    /// Has a thread take copies of a pair. Returns `None` if no thread has room or the pair cannot
    /// be sent; the caller then keeps the pair.
    pub fn keep(&mut self, pair: [BorrowedFd<'_>; 2]) -> Option<PairPlace> {
        let with_room = self.all.iter().position(EventfdThread::has_room);
        let at = match with_room {
            Some(at) => at,
            None if self.failed || self.all.len() == MOST_THREADS => return None,
            None => {
                let started = EventfdThread::start();
                self.failed = started.is_none();
                self.all.push(started?);
                self.all.len() - 1
            }
        };
        let slot = self.all[at].keep(pair)?;
        Some(PairPlace { thread: at as u32, slot })
    }

    /// Has a thread raise one eventfd of the pair. The thread does so soon, maybe after this
    /// returns.
    pub fn raise(&self, kept: PairPlace, side: Side) {
        if let Some(thread) = self.all.get(kept.thread as usize) {
            thread.send(RAISE + side as u32, kept.slot, &[]);
        }
    }

    /// Has a thread close a pair.
    pub fn drop(&mut self, kept: PairPlace) {
        if let Some(thread) = self.all.get_mut(kept.thread as usize) {
            thread.send(DROP, kept.slot, &[]);
            thread.free.push(kept.slot);
        }
    }
}

/// The handle of a thread.
struct EventfdThread {
    /// The socket to the thread, or `None` while the thread is being ended.
    socket: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    /// Slots that were used and are free again.
    free: Vec<u32>,
    /// The first slot that was never used.
    next: u32,
    /// The number of slots that the thread's limit of open files allows.
    room: u32,
}

impl EventfdThread {
    fn start() -> Option<Self> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
        let room = u32::try_from(limit.checked_sub(RESERVE)? / 2).ok().filter(|room| *room > 0)?;
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (socket, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None).ok()?;
        let (ready, is_ready) = channel();
        let number = theirs.as_raw_fd();
        let name = std::thread::Builder::new().name("eventfds".into()).stack_size(128 << 10);
        let thread = name.spawn(move || serve(number, &ready)).ok()?;
        // `theirs` stays open here until the thread has a table of its own, with the socket under
        // the same number.
        is_ready.recv().ok().filter(|ready| *ready)?;
        drop(theirs);
        let (free, next) = (Vec::new(), 0);
        Some(Self { socket: Some(socket), thread: Some(thread), free, next, room })
    }

    fn has_room(&self) -> bool {
        !self.free.is_empty() || self.next < self.room
    }

    fn keep(&mut self, pair: [BorrowedFd<'_>; 2]) -> Option<u32> {
        let slot = self.free.last().copied().unwrap_or(self.next);
        if !self.send(KEEP, slot, &pair) {
            return None;
        }
        if self.free.pop().is_none() {
            self.next += 1;
        }
        Some(slot)
    }

    /// Sends a message to the thread. The thread takes messages without ever waiting for a peer, so
    /// this does not wait for long.
    fn send(&self, operation: u32, slot: u32, with: &[BorrowedFd<'_>]) -> bool {
        let Some(socket) = &self.socket else { return false };
        let bytes = message(operation, slot);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !with.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(with));
        }
        let once = || {
            let parts = [IoSlice::new(&bytes)];
            rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)
        };
        rustix::io::retry_on_intr(once).is_ok()
    }
}

impl Drop for EventfdThread {
    fn drop(&mut self) {
        drop(self.socket.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn message(operation: u32, slot: u32) -> [u8; BYTES] {
    (u64::from(operation) | u64::from(slot) << 32).to_le_bytes()
}

/// Gives this thread a table of descriptors of its own, with the standard ones and `number`.
fn part(number: RawFd) -> bool {
    let close = |first: RawFd, last: u32, flags: libc::c_uint| {
        // SAFETY: no memory is passed. The first call makes this thread's new table, and only
        // descriptors of that table are closed.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) == 0 }
    };
    let unshare = libc::CLOSE_RANGE_UNSHARE;
    close(number + 1, u32::MAX, unshare)
        && (number == 3 || close(3, number.unsigned_abs() - 1, unshare))
}

/// Runs the thread.
fn serve(number: RawFd, ready: &Sender<bool>) {
    // A number below 3 means that a standard descriptor was closed at the start: the socket cannot
    // be told from the standard descriptors.
    let parted = number > 2 && part(number);
    if ready.send(parted).is_err() || !parted {
        return;
    }
    // SAFETY: this table is the thread's alone, and nothing else in it refers to the number.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let mut pairs: Vec<Option<[OwnedFd; 2]>> = Vec::new();
    let bin = Bin::new();
    while let Some((operation, slot, files)) = receive(socket.as_fd(), &bin) {
        let at = slot as usize;
        if pairs.len() <= at {
            pairs.resize_with(at + 1, || None);
        }
        match operation {
            KEEP => pairs[at] = <[OwnedFd; 2]>::try_from(files).ok(),
            DROP => pairs[at] = None,
            side => {
                if let Some(pair) = &pairs[at] {
                    // The stream has ended by now. A program that cannot be woken sees that when it
                    // looks next.
                    let _ = slipway_peer::eventfd::raise(pair[(side - RAISE) as usize & 1].as_fd());
                }
            }
        }
    }
}

/// Receives the next message: operation, slot, descriptors. Returns `None` if the engine has ended.
fn receive(socket: BorrowedFd<'_>, bin: &Bin) -> Option<(u32, u32, Vec<OwnedFd>)> {
    let mut bytes = [0; BYTES];
    let got = loop {
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        match slipway_peer::receive(socket, parts, bin, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            got => break got.ok()?,
        }
    };
    if got.bytes != BYTES {
        return None;
    }
    let word = u64::from_le_bytes(bytes);
    // The engine made these eventfds, so closing them does not wait.
    let files = got.files.into_iter().map(Foreign::into_owned).collect();
    Some((word as u32, (word >> 32) as u32, files))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

    fn is_raised(file: &OwnedFd) -> bool {
        let wait = Timespec { tv_sec: 60, tv_nsec: 0 };
        let mut polled = [PollFd::new(file, PollFlags::IN)];
        let raised = poll(&mut polled, Some(&wait)).unwrap() > 0;
        raised && slipway_peer::eventfd::drain(file.as_fd())
    }

    fn pair() -> [OwnedFd; 2] {
        [(); 2].map(|()| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap())
    }

    #[test]
    fn kept_eventfds_can_be_raised() {
        let mut threads = EventfdThreads::default();
        let pairs: Vec<_> = (0..100).map(|_| pair()).collect();
        let kept: Vec<PairPlace> = pairs
            .iter()
            .map(|pair| threads.keep([pair[0].as_fd(), pair[1].as_fd()]).unwrap())
            .collect();
        assert_eq!(threads.all.len(), 1);
        for (pair, kept) in pairs.iter().zip(&kept).rev() {
            threads.raise(*kept, Side::One);
            assert!(is_raised(&pair[1]));
            threads.raise(*kept, Side::Zero);
            assert!(is_raised(&pair[0]));
        }
        // A free slot is used again, with the new pair.
        threads.drop(kept[50]);
        let other = pair();
        let again = threads.keep([other[0].as_fd(), other[1].as_fd()]).unwrap();
        assert_eq!(again, kept[50]);
        threads.raise(again, Side::Zero);
        assert!(is_raised(&other[0]));
        let nothing = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut old = [PollFd::new(&pairs[50][0], PollFlags::IN)];
        assert_eq!(poll(&mut old, Some(&nothing)).unwrap(), 0);
    }

    /// A pipe's reader sees the end once nobody has its writer. A thread may not have a copy by
    /// accident, and may not keep what it was told to drop.
    #[test]
    fn a_thread_has_the_pairs_that_it_was_given_and_nothing_else() {
        let end = |reader: &OwnedFd| rustix::io::read(reader, &mut [0; 1]) == Ok(0);
        let mut threads = EventfdThreads::default();
        let (before, writer) = rustix::pipe::pipe().unwrap();
        let first = pair();
        threads.keep([first[0].as_fd(), first[1].as_fd()]).unwrap();
        drop(writer);
        assert!(end(&before));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let kept = threads.keep([writer.as_fd(), writer.as_fd()]).unwrap();
        drop(writer);
        threads.drop(kept);
        assert!(end(&reader));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        threads.keep([writer.as_fd(), writer.as_fd()]).unwrap();
        drop((writer, threads));
        assert!(end(&reader));
    }

    #[test]
    fn a_full_thread_has_another_one_started() {
        let mut threads = EventfdThreads::default();
        let one = pair();
        for _ in 0..3 {
            threads.keep([one[0].as_fd(), one[1].as_fd()]).unwrap();
            threads.all.iter_mut().for_each(|thread| thread.room = thread.next);
        }
        assert_eq!(threads.all.len(), 3);
        threads.raise(PairPlace { thread: 2, slot: 0 }, Side::One);
        assert!(is_raised(&one[1]));
    }
}
