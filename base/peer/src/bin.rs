//! Disposal threads: they may sleep for ever, so that no other thread has to.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// Time that a disposal thread without work waits for more before it ends.
const PATIENCE: Duration = Duration::from_secs(1);
/// Stack of a disposal thread, bytes. Closing a file or dropping a mapping needs little.
const STACK: usize = 128 << 10;

/// The things of one peer that must be closed or dropped without waiting.
///
/// A bin is cheap to clone; all clones are one bin. Things are dropped in the order in which they
/// came, on a disposal thread. If dropping one of them never ends, that thread is lost, the later
/// things of the same bin stay, and other bins get other threads. So the number of lost threads is
/// at most the number of bins: make one bin for each peer, and bound the number of peers.
#[derive(Clone, Default)]
pub struct Bin(Arc<Contents>);

#[derive(Default)]
struct Contents {
    queue: Mutex<Queue>,
    /// Number of things that are in the queue or being dropped.
    held: AtomicUsize,
    /// Bytes of memory that the held things give back when they are dropped.
    held_bytes: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    /// Discarded things, each with the bytes of memory that it holds.
    things: VecDeque<(Discarded, usize)>,
    /// Set while the bin is in [`Pool::waiting`] or a thread drops one of its things.
    scheduled: bool,
}

enum Discarded {
    Descriptor(OwnedFd),
    Value(Box<dyn Any + Send>),
}

impl Bin {
    /// Returns an empty bin. The bin takes no thread until something is discarded.
    pub fn new() -> Self {
        Self::default()
    }

    /// Closes `file` on a disposal thread. The caller never waits.
    pub fn discard(&self, file: impl Into<OwnedFd>) {
        self.push(Discarded::Descriptor(file.into()), 0);
    }

    /// Drops `value` on a disposal thread. The caller never waits.
    pub fn discard_value<T: Send + 'static>(&self, value: T) {
        self.discard_memory(value, 0);
    }

    /// Drops `value` on a disposal thread and counts the `bytes` of memory that it holds until
    /// then. The caller never waits.
    pub fn discard_memory<T: Send + 'static>(&self, value: T, bytes: usize) {
        self.push(Discarded::Value(Box::new(value)), bytes);
    }

    /// Returns the number of discarded things that still exist. A server refuses more from a peer
    /// whose bin holds many.
    pub fn held(&self) -> usize {
        self.0.held.load(Ordering::Relaxed)
    }

    /// Returns the bytes of memory that discarded things still hold.
    pub fn held_bytes(&self) -> usize {
        self.0.held_bytes.load(Ordering::Relaxed)
    }

    fn push(&self, thing: Discarded, bytes: usize) {
        self.0.held.fetch_add(1, Ordering::Relaxed);
        self.0.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut queue = lock(&self.0.queue);
        queue.things.push_back((thing, bytes));
        let scheduled = std::mem::replace(&mut queue.scheduled, true);
        drop(queue);
        if !scheduled {
            schedule(self.clone());
        }
    }

    /// Drops the oldest thing. Returns the bin if it holds more things.
    fn empty_one(self) -> Option<Self> {
        let oldest = lock(&self.0.queue).things.pop_front();
        if let Some((thing, bytes)) = oldest {
            // A destructor that panics must not end the thread with the bin still scheduled.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop_thing(thing)));
            self.0.held.fetch_sub(1, Ordering::Relaxed);
            self.0.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        let mut queue = lock(&self.0.queue);
        queue.scheduled = !queue.things.is_empty();
        let more = queue.scheduled;
        drop(queue);
        more.then_some(self)
    }
}

fn drop_thing(thing: Discarded) {
    match thing {
        Discarded::Descriptor(file) => {
            // Turns lingering off; fails for all files but sockets. The peer may turn it on again
            // before the close; then this thread is lost.
            let _ = set_socket_linger(&file, None);
            drop(file);
        }
        Discarded::Value(value) => drop(value),
    }
}

/// The disposal threads of this process and the bins that wait for them.
struct Pool {
    /// Bins with something to drop, each at most once.
    waiting: VecDeque<Bin>,
    /// Number of threads that wait for a bin, or are on their way there.
    free: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { waiting: VecDeque::new(), free: 0 });
static MORE: Condvar = Condvar::new();

/// Has a disposal thread drop one thing of `bin`. Starts a new thread if all free ones are needed
/// for other bins.
///
/// If no thread can be started, the bin waits until another thread takes it or the next call
/// succeeds.
fn schedule(bin: Bin) {
    let mut pool = lock(&POOL);
    pool.waiting.push_back(bin);
    if pool.free >= pool.waiting.len() {
        drop(pool);
        MORE.notify_one();
        return;
    }
    pool.free += 1;
    drop(pool);
    let builder = std::thread::Builder::new().name("disposal".into()).stack_size(STACK);
    if builder.spawn(work).is_err() {
        lock(&POOL).free -= 1;
    }
}

fn work() {
    while let Some(bin) = next() {
        let more = bin.empty_one();
        let mut pool = lock(&POOL);
        pool.free += 1;
        // This thread takes the oldest waiting bin next, so each waiting bin still has a free
        // thread.
        pool.waiting.extend(more);
    }
}

/// Waits for a bin and takes it. Returns `None` if none came within [`PATIENCE`]. Either way, the
/// calling thread no longer counts as free.
fn next() -> Option<Bin> {
    let empty = |pool: &mut Pool| pool.waiting.is_empty();
    let (mut pool, _) =
        MORE.wait_timeout_while(lock(&POOL), PATIENCE, empty).unwrap_or_else(|p| p.into_inner());
    pool.free -= 1;
    pool.waiting.pop_front()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that may panic runs under these locks.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A value whose drop waits for a message, and then sends one.
    struct Sleeper(Receiver<()>, Sender<()>);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.recv();
            let _ = self.1.send(());
        }
    }

    struct Says(Sender<()>);

    impl Drop for Says {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    #[test]
    fn a_thing_that_is_never_dropped_holds_up_its_own_bin_only() {
        let (one, other) = (Bin::new(), Bin::new());
        let (wake, told) = channel();
        let (done, is_done) = channel();
        let (later, is_later) = channel();
        one.discard_value(Sleeper(told, done));
        one.discard_memory(Says(later), 4096);
        for _ in 0..100 {
            let (dropped, is_dropped) = channel();
            other.discard_value(Says(dropped));
            is_dropped.recv_timeout(LONG).unwrap();
        }
        assert!(is_later.try_recv().is_err(), "it stands behind the one that sleeps");
        assert_eq!((one.held(), one.held_bytes()), (2, 4096));
        wake.send(()).unwrap();
        is_done.recv_timeout(LONG).unwrap();
        is_later.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn a_destructor_that_panics_is_one_thing_less() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
        }
        let bin = Bin::new();
        let (dropped, is_dropped) = channel();
        bin.discard_value(Panics);
        bin.discard_value(Says(dropped));
        is_dropped.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn many_bins_at_once_are_all_emptied() {
        let (dropped, is_dropped) = channel();
        let bins: Vec<Bin> = (0..200).map(|_| Bin::new()).collect();
        for _ in 0..10 {
            bins.iter().for_each(|bin| bin.discard_value(Says(dropped.clone())));
        }
        (0..2000).for_each(|_| is_dropped.recv_timeout(LONG).unwrap());
    }
}
