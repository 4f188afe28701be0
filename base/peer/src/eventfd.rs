//! Eventfds that a peer shares: raised and emptied without ever waiting.
//!
//! Raising: write(2) waits when the counter is full and the open file is blocking. The peer shares
//! the open file and can make both true at any moment: neither a flag set here nor a check before
//! the write holds until the write. Linux has two ways to raise an eventfd that ignore the blocking
//! flag, and both stop at the counter's maximum:
//! - as the notification of a finished asynchronous request (`aio_resfd`, io_submit(2)). The
//!   request writes one byte to `/dev/null` and ends within the system call. It needs a context of
//!   io_setup(2), and any user can take all contexts of the node (`fs.aio-max-nr`). So a process
//!   creates one context for all of its threads as soon as it raises anything, and each thread
//!   tries to get one of its own;
//! - as the eventfd that an io_uring notifies of a completion. This takes three system calls, and
//!   no user can take it away from another. It is the fallback for a process without a context.
//!
//! Emptying: read(2) waits likewise; preadv2(2) has a flag not to wait (`RWF_NOWAIT`).

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, OnceLock};

use io_uring::{IoUring, opcode};
use rustix::io::ReadWriteFlags;

/// Requests that a context has room for. Each ends at once; the context fills up with their
/// completion events, which nobody needs.
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

/// A completion event: `struct io_event` of linux/aio_abi.h.
type Ended = [u64; 4];

/// A context for asynchronous requests (io_setup(2)).
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

    /// Raises the eventfd. Returns `false` if io_submit(2) fails: the context is full, `eventfd` is
    /// no eventfd, or this thread's descriptor table lacks `nowhere`.
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

    /// Raises the eventfd as [`Context::ring`]. If that fails, frees the context of completion
    /// events and retries once.
    fn ring_or_make_room(&self, eventfd: BorrowedFd<'_>) -> bool {
        self.ring(eventfd) || {
            self.forget_ended();
            self.ring(eventfd)
        }
    }

    /// Removes the completion events of ended requests, which makes room for new requests.
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
        // SAFETY: the context belongs to this value and is not used again. No request is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

/// An io_uring that notifies an eventfd of each completion; it is registered with one eventfd at a
/// time.
struct Notifier(IoUring);

impl Notifier {
    fn new() -> std::io::Result<Self> {
        Ok(Self(IoUring::new(2)?))
    }

    /// Returns whether the eventfd was raised.
    fn ring(&mut self, eventfd: BorrowedFd<'_>) -> bool {
        if self.0.submitter().register_eventfd(eventfd.as_raw_fd()).is_err() {
            return false;
        }
        // SAFETY: a no-op request refers to no memory.
        let pushed = unsafe { self.0.submission().push(&opcode::Nop::new().build()) }.is_ok();
        // The no-op completes, and so notifies the eventfd, within the call.
        let raised = pushed && self.0.submit().is_ok_and(|submitted| submitted == 1);
        self.0.completion().for_each(drop);
        let _ = self.0.submitter().unregister_eventfd();
        raised
    }
}

/// A thread's way of raising eventfds.
enum Means {
    Own(Context),
    Shared,
    Ring(Box<Notifier>),
    None,
}

/// The process's context, for threads that got none of their own. The mutex holds `None` if the
/// process got no context either.
static SHARED: OnceLock<Mutex<Option<Context>>> = OnceLock::new();

fn shared() -> &'static Mutex<Option<Context>> {
    SHARED.get_or_init(|| Mutex::new(Context::new().ok()))
}

/// Raises the eventfd with the process's context. Returns `false` if there is none or if it fails.
fn ring_shared(eventfd: BorrowedFd<'_>) -> bool {
    // No call under this lock waits: the requests end at once.
    let context = shared().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    context.as_ref().is_some_and(|context| context.ring_or_make_room(eventfd))
}

impl Means {
    fn find() -> Self {
        // Never waits: in the child of a fork the lock may be that of a thread of the parent.
        let has_shared = shared().try_lock().is_ok_and(|context| context.is_some());
        if let Ok(own) = Context::new() {
            return Self::Own(own);
        }
        if has_shared {
            return Self::Shared;
        }
        Notifier::new().map_or(Self::None, |ring| Self::Ring(Box::new(ring)))
    }

    /// Raises the eventfd with a new io_uring and, if that works, keeps the io_uring as this
    /// thread's means.
    fn ring_instead(&mut self, eventfd: BorrowedFd<'_>) -> bool {
        let Ok(mut ring) = Notifier::new() else { return false };
        let raised = ring.ring(eventfd);
        if raised {
            *self = Self::Ring(Box::new(ring));
        }
        raised
    }

    fn ring(&mut self, eventfd: BorrowedFd<'_>) -> bool {
        match self {
            Self::Own(context) => context.ring_or_make_room(eventfd),
            // A thread with its own descriptor table may lack the context's `/dev/null`.
            Self::Shared => ring_shared(eventfd) || self.ring_instead(eventfd),
            Self::Ring(ring) => ring.ring(eventfd),
            Self::None => false,
        }
    }
}

thread_local! {
    static MEANS: RefCell<Means> = RefCell::new(Means::find());
}

/// Replaces the contexts in the child of a fork(2), which does not inherit those of its parent.
/// Call it before the child's first [`raise`], while the child has one thread.
pub fn forget() {
    if let Some(shared) = SHARED.get() {
        // Another thread of the parent may have held the lock during the fork: then the lock and
        // the context stay as they are. The parent's context number means nothing here, so the
        // context is forgotten and not destroyed.
        if let Ok(mut shared) = shared.try_lock() {
            std::mem::forget(std::mem::replace(&mut *shared, Context::new().ok()));
        }
    }
    let _ = MEANS.try_with(|means| {
        std::mem::forget(means.replace(Means::None));
        means.replace(Means::find());
    });
}

/// Returns whether this thread can [`raise`] at all. Returns `false` if the kernel gave it neither
/// an asynchronous I/O context nor an io_uring.
pub fn can_raise() -> bool {
    MEANS.try_with(|means| !matches!(*means.borrow(), Means::None)).unwrap_or(false)
}

/// Adds one to `eventfd`, whatever its flags and its counter are; a full counter stays full. Never
/// waits.
///
/// Returns `false`, without having raised anything, if `eventfd` is no eventfd or if this thread
/// cannot raise without waiting (see [`can_raise`]). The caller then drops the peer rather than
/// wait for it.
#[must_use = "a peer that could not be told has to be dropped"]
pub fn raise(eventfd: BorrowedFd<'_>) -> bool {
    MEANS.try_with(|means| means.borrow_mut().ring(eventfd)).unwrap_or(false)
}

/// Empties an eventfd with at most eight reads. Never waits. Returns whether a read failed, as it
/// does on an empty eventfd. A peer may have made the eventfd a semaphore (EFD_SEMAPHORE), whose
/// count each read lowers by one only; then it may still hold a count.
pub fn drain(eventfd: BorrowedFd<'_>) -> bool {
    const AT_MOST: usize = 8;
    (0..AT_MOST).any(|_| read(eventfd).is_none())
}

/// Empties an eventfd that is no semaphore. Never waits. Returns its count, which its peers choose;
/// 0 if it was empty.
pub fn take(eventfd: BorrowedFd<'_>) -> u64 {
    read(eventfd).unwrap_or(0)
}

/// Reads an eventfd without waiting. Returns `None` if it is empty, or no eventfd.
fn read(eventfd: BorrowedFd<'_>) -> Option<u64> {
    let (mut count, current) = ([0; 8], u64::MAX);
    let into = &mut [IoSliceMut::new(&mut count)];
    rustix::io::preadv2(eventfd, into, current, ReadWriteFlags::NOWAIT).ok()?;
    Some(u64::from_ne_bytes(count))
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

    /// As in the child of a fork(2), while another thread of the parent raised an eventfd.
    #[test]
    fn a_lock_that_is_never_released_holds_nobody_up() {
        let held = shared().lock().unwrap();
        let (done, found) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            Means::find();
            done.send(())
        });
        let outcome = found.recv_timeout(std::time::Duration::from_secs(60));
        drop(held);
        outcome.expect("it waits for the lock");
    }

    #[test]
    fn every_ring_counts() {
        let file = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        for _ in 0..10_000 {
            assert!(raise(file.as_fd()));
        }
        assert_eq!(count(&file), 10_000);
    }

    /// A write(2) here would wait for ever, since nobody reads.
    #[test]
    fn a_full_blocking_counter_holds_nobody_up() {
        assert!(Context::new().is_ok(), "this kernel has no context to give");
        let file = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&file, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        let theirs = file.try_clone().unwrap();
        std::thread::spawn(move || {
            (0..100).for_each(|_| assert!(raise(theirs.as_fd())));
            done.send(()).unwrap();
        });
        is_done.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        assert!(count(&file) >= u64::MAX - 1);
    }

    #[test]
    fn what_is_no_eventfd_is_not_waited_for_either() {
        let (_reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        assert!(!raise(writer.as_fd()));
    }

    /// Checks that `means`, one of those for a thread without a context of its own, counts each
    /// raise, does not wait for a full blocking counter, and refuses a pipe.
    fn works(mut means: Means) {
        let file = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        (0..1_000).for_each(|_| assert!(means.ring(file.as_fd())));
        assert_eq!(count(&file), 1_000);
        let file = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&file, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        (0..100).for_each(|_| assert!(means.ring(file.as_fd())));
        assert!(count(&file) >= u64::MAX - 1);
        let (_reader, writer) = std::io::pipe().unwrap();
        assert!(!means.ring(writer.as_fd()));
    }

    #[test]
    fn the_process_has_a_context_for_threads_without_one() {
        works(Means::Shared);
    }

    /// The keepers of the socket engine are such threads.
    #[test]
    fn a_thread_with_a_table_of_its_own_raises_without_a_context_too() {
        let file = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        assert!(shared().lock().unwrap().is_some());
        let raise = || {
            // SAFETY: no memory is passed; the table is a copy for this thread.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            let nowhere = shared().lock().unwrap().as_ref().unwrap().nowhere.as_raw_fd();
            // SAFETY: the descriptor is closed in this thread's table only, and a raise that uses
            // the context here fails and falls back to an io_uring.
            assert_eq!(unsafe { libc::close(nowhere) }, 0);
            let mut means = Means::Shared;
            assert!(means.ring(file.as_fd()) && means.ring(file.as_fd()));
        };
        std::thread::scope(|scope| scope.spawn(raise).join().unwrap());
        assert_eq!(count(&file), 2);
    }

    #[test]
    fn a_ring_is_as_good_as_a_context() {
        works(Means::Ring(Box::new(Notifier::new().unwrap())));
    }

    #[test]
    fn draining_never_waits() {
        let file = eventfd(3, EventfdFlags::empty()).unwrap();
        assert_eq!(take(file.as_fd()), 3);
        assert_eq!(take(file.as_fd()), 0, "it is empty, and blocking");
        assert!(drain(file.as_fd()), "it is empty, and blocking");
        let file = eventfd(100, EventfdFlags::SEMAPHORE).unwrap();
        assert!(!drain(file.as_fd()));
    }
}
