//! Threads that may sleep for ever, so that no other thread has to.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

/// How long a thread without work waits for more before it ends.
const PATIENCE: Duration = Duration::from_secs(1);
/// Closing a file or dropping a mapping needs little stack.
const STACK: usize = 128 << 10;

/// Where the things of one peer go that must be closed or dropped without waiting.
///
/// Cheap to clone; all clones are one bin. Things are dropped in the order in which they came, on a
/// thread that has nothing else to do. If dropping one of them never ends, that thread is lost, the
/// later things of the same bin stay, and other bins get other threads. So the number of lost
/// threads is at most the number of bins: make one for each peer, and bound the number of peers.
#[derive(Clone, Default)]
pub struct Bin(Arc<Contents>);

#[derive(Default)]
struct Contents {
    queue: Mutex<Queue>,
    /// Things that are in the queue or being dropped.
    held: AtomicUsize,
    /// Bytes of memory that come back with them.
    held_bytes: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    /// With the bytes of memory that each of them holds.
    things: VecDeque<(Thing, usize)>,
    /// The bin is in [`Pool::waiting`] or a thread drops a thing of it.
    scheduled: bool,
}

enum Thing {
    Descriptor(OwnedFd),
    Value(Box<dyn Any + Send>),
}

impl Bin {
    /// Returns an empty bin. It has no thread before something is discarded.
    pub fn new() -> Self {
        Self::default()
    }

    /// Closes `file` elsewhere. The caller never waits.
    pub fn discard(&self, file: impl Into<OwnedFd>) {
        self.push(Thing::Descriptor(file.into()), 0);
    }

    /// Drops `value` elsewhere. The caller never waits.
    pub fn discard_value<T: Send + 'static>(&self, value: T) {
        self.discard_memory(value, 0);
    }

    /// Drops `value` elsewhere, of which `bytes` of memory are to come back. The caller never
    /// waits.
    pub fn discard_memory<T: Send + 'static>(&self, value: T, bytes: usize) {
        self.push(Thing::Value(Box::new(value)), bytes);
    }

    /// Returns how many discarded things still exist. A server refuses more from a peer whose bin
    /// holds many.
    pub fn held(&self) -> usize {
        self.0.held.load(Ordering::Relaxed)
    }

    /// Returns how many bytes of memory the discarded things still hold.
    pub fn held_bytes(&self) -> usize {
        self.0.held_bytes.load(Ordering::Relaxed)
    }

    fn push(&self, thing: Thing, bytes: usize) {
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

    /// Drops the oldest thing. Returns the bin if there are more.
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

fn drop_thing(thing: Thing) {
    match thing {
        Thing::Descriptor(file) => {
            // Fails for all but sockets. The peer may set it again in between; then this thread is
            // lost.
            let _ = set_socket_linger(&file, None);
            drop(file);
        }
        Thing::Value(value) => drop(value),
    }
}

/// The threads of this process that empty bins.
struct Pool {
    /// Bins with something to drop, each at most once.
    waiting: VecDeque<Bin>,
    /// Threads that wait for a bin, or are on their way there.
    free: usize,
}

static POOL: Mutex<Pool> = Mutex::new(Pool { waiting: VecDeque::new(), free: 0 });
static MORE: Condvar = Condvar::new();

/// Has a thread drop one thing of `bin`: one that is free, or a new one if there is none.
///
/// If no thread can be made, the bin waits until another thread takes it or the next call succeeds.
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
        // This thread takes the bin that waits for longest, so there is one for this bin too.
        pool.waiting.extend(more);
    }
}

/// Waits for a bin. Returns `None` if there was none for a while. The calling thread is not free
/// any more.
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

    /// Its drop waits until it is told to go on, and says that it is through.
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
