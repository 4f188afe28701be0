//! Eventfds that a stranger shares: raised and emptied without ever waiting.
//!
//! Adding one: a write(2) waits when the counter is full and the description is blocking, and the peer can make
//! both true at any moment: the description is its own as well, so no flag set here, and no look
//! before the write, holds until the write. Linux has one way to raise an eventfd that does not
//! look at that flag: as the notice of a finished asynchronous request (`aio_resfd`, io_submit(2)),
//! which adds one and stops at the counter's maximum. The request is a write of one byte to
//! `/dev/null`, which ends within the same system call.
//!
//! Taking the count: a read(2) waits likewise; a request not to wait comes with preadv2(2).

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::ReadWriteFlags;

/// Requests that a context holds. Each ends at once; what fills up are notes that it ended, which
/// nobody wants.
const REQUESTS: libc::c_long = 16;

/// `struct iocb` of linux/aio_abi.h. Key and flags of the request, whose order depends on the
/// machine's byte order, stay zero.
#[repr(C)]
#[derive(Default)]
struct ControlBlock {
    data: u64,
    key_and_rw_flags: u64,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    length: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

const PWRITE: u16 = 1;
const NOTIFY_EVENTFD: u32 = 1;

/// `struct io_event`.
type Ended = [u64; 4];

/// A thread's own context for asynchronous requests.
struct Context {
    id: libc::c_ulong,
    nowhere: File,
}

impl Context {
    fn new() -> std::io::Result<Self> {
        let nowhere = File::options().write(true).open("/dev/null")?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: the kernel writes one word to `id`.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, REQUESTS, &raw mut id) };
        if made < 0 { Err(std::io::Error::last_os_error()) } else { Ok(Self { id, nowhere }) }
    }

    /// Whether the eventfd was raised; not when there is no room for another request.
    fn ring(&self, eventfd: BorrowedFd<'_>) -> bool {
        static BYTE: u8 = 0;
        let mut block = ControlBlock {
            opcode: PWRITE,
            file: self.nowhere.as_raw_fd().unsigned_abs(),
            buffer: (&raw const BYTE).expose_provenance() as u64,
            length: 1,
            flags: NOTIFY_EVENTFD,
            eventfd: eventfd.as_raw_fd().unsigned_abs(),
            ..ControlBlock::default()
        };
        let mut blocks = [&raw mut block];
        // SAFETY: the kernel reads one pointer, and reads and writes the block behind it, within
        // the call; the byte that the request reads lives for ever.
        let sent = unsafe {
            libc::syscall(libc::SYS_io_submit, self.id, 1 as libc::c_long, blocks.as_mut_ptr())
        };
        sent == 1
    }

    /// Makes room: forgets requests that have ended.
    fn forget_ended(&self) {
        let mut ended: [Ended; REQUESTS as usize] = Default::default();
        let mut at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            // SAFETY: the kernel writes up to REQUESTS events, for which there is room, and reads
            // the timeout.
            let taken = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.id,
                    0 as libc::c_long,
                    REQUESTS,
                    ended.as_mut_ptr(),
                    &raw mut at_once,
                )
            };
            if taken < REQUESTS {
                return;
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is this thread's and is not used again. No request is under way.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

thread_local! {
    static CONTEXT: RefCell<Option<Context>> = RefCell::new(Context::new().ok());
}

/// In the child of a fork(2), which does not have its parent's contexts: this thread gets one of its own.
pub fn forget() {
    let _ = CONTEXT.try_with(|context| {
        // The parent's, whose number means nothing here: not to be destroyed.
        std::mem::forget(context.replace(Context::new().ok()));
    });
}

/// Whether this thread can [`try_raise`]: the kernel has had a context to give (their sum is limited by
/// `fs.aio-max-nr`).
pub fn can_raise() -> bool {
    CONTEXT.try_with(|context| context.borrow().is_some()).unwrap_or(false)
}

/// Adds one to `eventfd`, whatever its flags and its counter are; a full counter stays full. False, and
/// nothing done: this thread cannot, see [`can_raise`].
pub fn try_raise(eventfd: BorrowedFd<'_>) -> bool {
    let raised = CONTEXT.try_with(|context| {
        let context = context.borrow();
        let Some(context) = &*context else { return false };
        context.ring(eventfd) || {
            context.forget_ended();
            context.ring(eventfd)
        }
    });
    raised.unwrap_or(false)
}

/// As [`try_raise`], but where this thread cannot, the eventfd is written to, which a peer that wants to
/// can make wait.
pub fn raise(eventfd: BorrowedFd<'_>) {
    if !try_raise(eventfd) {
        // Fails when the counter is full: it is readable already.
        let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
    }
}

/// Takes what an eventfd counted. Whether nothing is left in it now: one that its peer made to give out
/// its count bit by bit may hold what it likes.
pub fn drain(eventfd: BorrowedFd<'_>) -> bool {
    const AT_MOST: usize = 8;
    let current = u64::MAX;
    (0..AT_MOST).any(|_| {
        let mut count = [0; 8];
        let into = &mut [IoSliceMut::new(&mut count)];
        rustix::io::preadv2(eventfd, into, current, ReadWriteFlags::NOWAIT).is_err()
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn count(file: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(file, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    #[test]
    fn every_ring_counts() {
        let file = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        for _ in 0..10_000 {
            raise(file.as_fd());
        }
        assert_eq!(count(&file), 10_000);
    }

    /// A write(2) here would wait for a reader who never comes.
    #[test]
    fn a_full_blocking_counter_holds_nobody_up() {
        assert!(Context::new().is_ok(), "this kernel has no context to give");
        let file = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&file, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        let theirs = file.try_clone().unwrap();
        std::thread::spawn(move || {
            (0..100).for_each(|_| raise(theirs.as_fd()));
            done.send(()).unwrap();
        });
        is_done.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        assert!(count(&file) >= u64::MAX - 1);
    }

    #[test]
    fn what_is_no_eventfd_is_not_waited_for_either() {
        let (_reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        raise(writer.as_fd());
    }

    #[test]
    fn draining_never_waits() {
        let file = eventfd(3, EventfdFlags::empty()).unwrap();
        assert!(drain(file.as_fd()));
        assert!(drain(file.as_fd()), "it is empty, and blocking");
        let file = eventfd(100, EventfdFlags::SEMAPHORE).unwrap();
        assert!(!drain(file.as_fd()));
    }
}
