//! The family's table, and the locks in it.

use std::cell::Cell;
use std::io::{Error, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use slipway_ram::Lasting;
use slipway_ring::cross::Regions;
use slipway_ring::sleep::{ANY, SleepWord};
use slipway_sgiov_spec::table::{self as layout, entry};

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// Returns this thread's id, as locks hold it.
#[inline]
pub(crate) fn thread() -> u32 {
    let known = THREAD.get();
    if known != 0 {
        return known;
    }
    let id = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
    THREAD.set(id);
    id
}

/// Forgets the cached thread id, in the child of a fork, whose thread has another one.
pub fn forget_thread() {
    THREAD.set(0);
}

/// Returns whether no thread has the id `id`.
pub(crate) fn is_gone(id: u32) -> bool {
    let pid = i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw);
    pid.is_none_or(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH))
}

/// The mapped table of a family.
pub struct Table {
    words: Lasting,
    entries: usize,
    links: usize,
}

impl Table {
    /// Maps the table in `file`.
    ///
    /// # Errors
    /// `InvalidData`: the file is no table, or one of another version.
    pub fn open(file: OwnedFd) -> std::io::Result<Self> {
        let words = Lasting::of(file)?;
        let word = |at: usize| words.words().get(at).map_or(0, |word| word.load(Ordering::Relaxed));
        let (entries, links) = (word(2), word(3));
        let known = word(0) == layout::MAGIC && word(1) == layout::VERSION;
        let possible = (1..=1 << 24).contains(&entries) && (1..=1 << 16).contains(&links);
        let (entries, links) = (entries as usize, links as usize);
        if !known || !possible || words.len() < layout::bytes(entries, links) {
            let text = "a file that is no table of sockets, or of another version";
            return Err(Error::new(ErrorKind::InvalidData, text));
        }
        Ok(Self { words, entries, links })
    }

    /// Returns the number of links that can exist at a time.
    pub(crate) fn links(&self) -> usize {
        self.links
    }

    /// Returns whether the table has the entry.
    pub(crate) fn has(&self, entry: u64) -> bool {
        entry < self.entries as u64
    }

    /// Returns the words of an entry.
    #[inline]
    pub(crate) fn entry(&self, entry: usize) -> &[AtomicU64; entry::WORDS] {
        let at = (layout::ENTRIES + entry * layout::ENTRY) / 8;
        let words = &self.words.words()[at..at + entry::WORDS];
        words.try_into().unwrap_or_else(|_| unreachable!("a slice of that length"))
    }

    /// Returns the allocation bitmap of a link's regions.
    #[inline]
    pub(crate) fn regions(&self, link: usize) -> &[AtomicU64] {
        let at = (layout::links(self.entries) + link * layout::LINK) / 8;
        &self.words.words()[at..at + Regions::WORDS]
    }

    /// Leaves a signal for the engine. Returns whether the engine sleeps and its bell must be
    /// raised.
    pub(crate) fn signal(&self, event: u64) -> bool {
        let words = self.words.words();
        if let Ok(_held) = lock(&words[layout::SIGNAL_LOCK / 8]) {
            let at = layout::signals(self.entries, self.links) / 8;
            let (tail, head) = (&words[at], &words[at + 8]);
            let own = tail.load(Ordering::Relaxed);
            if own.wrapping_sub(head.load(Ordering::Acquire)) < layout::SIGNALS as u64 {
                let place = at + 16 + (own as usize & (layout::SIGNALS - 1));
                words[place].store(event, Ordering::Relaxed);
                tail.store(own.wrapping_add(1), Ordering::Release);
            } else {
                words[layout::OVERFLOW / 8].store(1, Ordering::Release);
            }
        } else {
            words[layout::OVERFLOW / 8].store(1, Ordering::Release);
        }
        // Pairs with the engine, which announces its sleep and then looks at the signals once more.
        SleepWord::new(&words[layout::ASLEEP / 8]).barrier_and_take(ANY)
    }
}

/// Returns the low half of a word, for a futex.
pub(crate) fn low_half(word: &AtomicU64) -> &AtomicU32 {
    // SAFETY: a word of 8 bytes has two of 4; both are only ever used as atomics of that size.
    unsafe { &*std::ptr::from_ref(word).cast::<AtomicU32>() }
}

/// Guard of a lock in the table.
pub(crate) struct TableGuard<'a>(&'a AtomicU64);

impl Drop for TableGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Takes a lock in the table.
///
/// # Errors
/// `EDEADLK`: this very thread holds the lock, and a signal handler has interrupted it.
#[inline]
pub(crate) fn lock(word: &AtomicU64) -> Result<TableGuard<'_>, Errno> {
    let me = u64::from(thread());
    match word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed) {
        Ok(_) => Ok(TableGuard(word)),
        Err(holder) => lock_slowly(word, me, holder),
    }
}

#[cold]
fn lock_slowly(word: &AtomicU64, me: u64, mut holder: u64) -> Result<TableGuard<'_>, Errno> {
    let mut rounds = 0u32;
    loop {
        if holder == me {
            return Err(Errno::DEADLK);
        }
        rounds += 1;
        match rounds {
            ..200 => std::hint::spin_loop(),
            200..2000 => rustix::thread::sched_yield(),
            _ => {
                let pause = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 100_000 };
                let _ = rustix::thread::nanosleep(&pause);
            }
        }
        // A holder whose low half is 0 is the engine, which holds the lock until it has given a
        // page back, among programs that need not fear each other. After some ten seconds it counts
        // as gone, as when it does not answer.
        let gone = || if holder as u32 == 0 { rounds >= 100_000 } else { is_gone(holder as u32) };
        let dead = rounds.is_multiple_of(1000) && holder != 0 && gone();
        let from = if dead { holder } else { 0 };
        match word.compare_exchange(from, me, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return Ok(TableGuard(word)),
            Err(now) => holder = now,
        }
    }
}
