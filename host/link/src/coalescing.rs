//! The number of bytes that must be in a socket before the engine is woken for them.
//!
//! A wake for every record, or for a part of one, costs as much as opening the record. It costs the
//! sending host more, since the kernel wakes the engine in the sender's time. So a connection
//! coalesces, as network cards do with interrupts: while much comes, the socket wakes the engine
//! only when [`ENOUGH`] bytes are there (`SO_RCVLOWAT`), or when [`WAIT`] has passed.
//!
//! Some waits are in vain: a sender without credit waits as well, or the path is slower. After
//! [`VAIN`] such waits in a row the connection stops coalescing, and begins again only after more
//! bytes than before, twice as many each time.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Bytes that are waited for: with fewer the socket is not readable.
const ENOUGH: usize = 160 << 10;
/// The longest wait, from the last bytes that came.
const WAIT: Duration = Duration::from_micros(200);
/// Bytes that must come, with no pause longer than `WAIT`, before the connection begins to
/// coalesce.
const STREAK: u64 = 512 << 10;
/// The upper limit of [`Coalescing::needed`].
const MOST: u64 = 1 << 40;
/// Consecutive waits in vain after which the connection stops coalescing.
const VAIN: u8 = 4;

/// The state of a connection's coalescing.
pub(crate) struct Coalescing {
    /// Set while the connection coalesces.
    waits: bool,
    /// Bytes that have come since the last pause, or since coalescing began.
    came: u64,
    /// Bytes that must come without a pause before coalescing begins. Coalescing that ends in vain
    /// doubles the number; coalescing in which as many bytes come sets it to `STREAK` again.
    needed: u64,
    /// The waits in vain since the last that was not.
    vain: u8,
    /// When the last bytes came.
    last: Instant,
}

impl Coalescing {
    pub(crate) fn new(now: Instant) -> Self {
        Self { waits: false, came: 0, needed: STREAK, vain: 0, last: now }
    }

    /// Returns whether the connection coalesces: fewer than [`ENOUGH`] bytes are then left in the
    /// socket until more come, or until [`Coalescing::until`].
    pub(crate) fn waits(&self) -> bool {
        self.waits
    }

    /// Returns the time at which the bytes in the socket are taken, however few. Returns `None` if
    /// the connection does not coalesce.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.waits.then(|| self.last + WAIT)
    }

    /// Notes that the `count` bytes that were in `socket` were taken, and sets its least number of
    /// bytes if coalescing begins or ends with that.
    pub(crate) fn took(&mut self, count: usize, now: Instant, socket: BorrowedFd<'_>) {
        if self.learn(count, now) {
            let least = if self.waits { ENOUGH } else { 1 };
            // If this fails, every byte wakes the engine, and the bytes are taken in time all the
            // same.
            set_least(socket, least);
        }
    }

    /// Updates the state. Returns whether coalescing began or ended.
    fn learn(&mut self, count: usize, now: Instant) -> bool {
        let paused = now > self.last + WAIT;
        let before = self.waits;
        if count > 0 {
            self.last = now;
        }
        if !self.waits && paused {
            self.came = 0;
        }
        self.came = self.came.saturating_add(count as u64);
        self.vain = if !self.waits || count >= ENOUGH { 0 } else { self.vain + 1 };
        if !self.waits {
            self.waits = self.came >= self.needed;
        } else if count == 0 {
            self.waits = false;
        } else if self.vain == VAIN {
            (self.waits, self.needed) = (false, (self.needed * 2).min(MOST));
        } else if self.came >= self.needed {
            self.needed = STREAK;
        }
        if self.waits != before {
            (self.came, self.vain) = (0, 0);
        }
        self.waits != before
    }
}

/// Makes a socket with fewer than `least` bytes unreadable. Returns whether the kernel accepted
/// that.
#[allow(unsafe_code)] // rustix has no such option
fn set_least(socket: BorrowedFd<'_>, least: usize) -> bool {
    let least = least as libc::c_int;
    // SAFETY: the kernel reads an int, and is told its size.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const least).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    done == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `count` bytes every `micros` microseconds, `times` times. Returns how often coalescing
    /// began or ended.
    fn takes(one: &mut Coalescing, (count, micros): (usize, u64), times: u32) -> u32 {
        let step = Duration::from_micros(micros);
        (0..times).map(|_| u32::from(one.learn(count, one.last + step))).sum()
    }

    #[test]
    fn much_without_a_pause_is_waited_for_and_a_pause_ends_it() {
        let mut one = Coalescing::new(Instant::now());
        assert_eq!(takes(&mut one, (64 << 10, 300), 1000), 0, "pauses");
        assert_eq!(one.until(), None);
        assert_eq!(takes(&mut one, (64 << 10, 50), 8), 1);
        assert_eq!(one.until(), Some(one.last + WAIT));
        assert_eq!(takes(&mut one, (ENOUGH, 150), 1000), 0);
        // Some bytes come late, and then none.
        assert_eq!(takes(&mut one, (ENOUGH / 2, 210), u32::from(VAIN) - 1), 0);
        assert_eq!(takes(&mut one, (ENOUGH, 150), 1), 0);
        assert!(one.waits() && one.learn(0, one.last + WAIT) && !one.waits());
        assert_eq!(one.needed, STREAK);
    }

    #[test]
    fn who_waited_in_vain_waits_ever_less_often() {
        let mut one = Coalescing::new(Instant::now());
        // The sender stops after each window until it was read.
        let changes = takes(&mut one, (64 << 10, 100), 100_000);
        assert!(changes < 30, "{changes}");
        // Coalescing works again once the window has grown.
        takes(&mut one, (ENOUGH, 100), 1_000_000);
        assert!(one.waits() && one.needed == STREAK);
    }

    #[test]
    fn a_socket_is_readable_with_enough_or_when_it_ends() {
        use std::io::Write;
        use std::net::{TcpListener, TcpStream};
        use std::os::fd::AsFd;

        use rustix::event::{PollFd, PollFlags, Timespec, poll};

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, _) = listener.accept().unwrap();
        let readable = |millis: i64| {
            let file = here.as_fd();
            let time = Timespec { tv_sec: 0, tv_nsec: millis * 1_000_000 };
            poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&time)).unwrap() > 0
        };
        assert!(set_least(here.as_fd(), 1000));
        there.write_all(&[0; 999]).unwrap();
        assert!(!readable(20));
        there.write_all(&[0]).unwrap();
        assert!(readable(900));
        assert!(set_least(here.as_fd(), 2000) && !readable(20));
        assert!(set_least(here.as_fd(), 1) && readable(900));
        assert!(set_least(here.as_fd(), 2000) && !readable(20));
        drop(there);
        assert!(readable(900));
    }
}
