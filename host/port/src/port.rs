//! A port: both rings, and the eventfds of both sides.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use slipway_ring::{Consumer, Descriptor, Producer};

use crate::Error;
use crate::attach::{Attached, attach, timespec};
use crate::received::{Received, fits};
use crate::spin::Spin;

/// Bytes of the largest frame that a switch takes: an IP packet of 64 KiB with a tagged header.
pub(crate) const MAX_FRAME: usize = 65_535 + 18;
/// The distance at which slots are prefetched: about as many as a processor can have in flight.
const AHEAD: usize = 8;
/// Polls of the ring between two reads of the clock.
const LOOKS: usize = 32;

/// Counters of a port since it was attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Frames received.
    pub frames_in: u64,
    /// Bytes of the frames received.
    pub bytes_in: u64,
    /// Frames sent.
    pub frames_out: u64,
    /// Bytes of the frames sent.
    pub bytes_out: u64,
    /// Frames that were not sent because the ring was full.
    pub full: u64,
    /// Malformed frames received: the switch is at fault.
    pub malformed: u64,
    /// Times that this side slept.
    pub sleeps: u64,
    /// Times that the switch slept and its eventfd was raised.
    pub tells: u64,
}

/// A memory port. It is detached when this value is dropped.
pub struct Port {
    path: PathBuf,
    attached: Attached,
    input: Consumer,
    output: Producer,
    /// Bytes of a slot.
    payload: usize,
    spin: Spin,
    statistics: Statistics,
}

impl Port {
    /// Attaches to the port whose socket is at `path`, as `slipway port create` printed it.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Busy`], [`Error::Stranger`], [`Error::Version`],
    /// [`Error::Protocol`] for an invalid answer, and other errors of the daemon or the system.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref().to_owned();
        let attached = attach(&path)?;
        Ok(Self::new(path, attached))
    }

    pub(crate) fn new(path: PathBuf, attached: Attached) -> Self {
        let (input, output) = attached.link.peer();
        let payload = attached.link.geometry().payload as usize;
        let statistics = Statistics::default();
        Self { path, attached, input, output, payload, spin: Spin::default(), statistics }
    }

    /// Attaches anew, after [`Error::Gone`] or [`Error::Broken`]: retries until a daemon serves the
    /// socket, for `patience` at most. Frames in the rings are lost; statistics go on.
    ///
    /// # Errors
    /// The last error of [`Port::connect`].
    pub fn reconnect(&mut self, patience: Duration) -> Result<(), Error> {
        let until = Instant::now() + patience;
        loop {
            match Self::connect(&self.path) {
                Ok(port) => {
                    let statistics = self.statistics;
                    *self = Self { statistics, ..port };
                    return Ok(());
                }
                Err(error) if Instant::now() >= until => return Err(error),
                // A killed daemon leaves its socket for a moment, and may still count this program
                // as its client.
                Err(Error::Connect { .. } | Error::Busy(_) | Error::Gone) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the address that the switch has assigned to the port: frames with another source are
    /// dropped. Returns `None` if any source will do.
    pub fn mac(&self) -> Option<[u8; 6]> {
        Some(self.attached.mac).filter(|mac| *mac != [0; 6])
    }

    /// Returns the bytes that a slot holds: longer frames take several slots.
    pub fn slot_size(&self) -> usize {
        self.payload
    }

    /// Returns the number of slots of each ring.
    pub fn slots(&self) -> usize {
        self.attached.link.geometry().slots as usize
    }

    /// Returns the counters.
    pub fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// Returns whether there is room for a frame of `len` bytes.
    ///
    /// # Errors
    /// [`Error::Broken`].
    pub fn has_room(&mut self, len: usize) -> Result<bool, Error> {
        let slots = len.div_ceil(self.payload);
        Ok(self.output.free(slots)? >= slots)
    }

    /// Sends copies of as many frames as there is room for, and returns their number. None of them
    /// is held back: the switch sees them at once.
    ///
    /// # Errors
    /// [`Error::Broken`]. An empty frame, or one of more than 65,553 bytes, is left out without an
    /// error, and counts as sent: no network would carry it.
    pub fn send<F: AsRef<[u8]>>(&mut self, frames: &[F]) -> Result<usize, Error> {
        let (mut slots, mut sent) = (0, 0);
        let mut free = self.output.free(frames.len())?;
        for frame in frames {
            let frame = frame.as_ref();
            if !(1..=MAX_FRAME).contains(&frame.len()) {
                sent += 1;
                continue;
            }
            let needs = frame.len().div_ceil(self.payload);
            if slots + needs > free {
                free = self.output.free(slots + needs)?;
                if slots + needs > free {
                    break;
                }
            }
            self.fill(slots, frame);
            slots += needs;
            sent += 1;
            self.statistics.frames_out += 1;
            self.statistics.bytes_out += frame.len() as u64;
        }
        self.statistics.full += (frames.len() - sent) as u64;
        self.publish(slots);
        Ok(sent)
    }

    fn fill(&mut self, first: usize, frame: &[u8]) {
        let last = frame.len().div_ceil(self.payload) - 1;
        for (number, part) in frame.chunks(self.payload).enumerate() {
            self.slot(first + number)[..part.len()].copy_from_slice(part);
            let descriptor = Descriptor::new(part.len() as u32);
            let descriptor = if number < last { descriptor.and_more() } else { descriptor };
            self.output.describe(first + number, descriptor);
        }
    }

    /// Lets `fill` write up to `limit` frames into the ring, each into a slot of
    /// [`Port::slot_size`] bytes with undefined content. `fill` returns the frame's length, or 0 to
    /// stop. Returns how many frames were sent.
    ///
    /// # Errors
    /// [`Error::Broken`].
    ///
    /// # Panics
    /// If a frame is longer than its slot: a programmer's error.
    pub fn send_with(
        &mut self,
        limit: usize,
        mut fill: impl FnMut(&mut [u8]) -> usize,
    ) -> Result<usize, Error> {
        let room = self.output.free(limit)?.min(limit);
        let mut sent = 0;
        while sent < room {
            if sent + AHEAD < room {
                self.output.fetch(sent + AHEAD);
            }
            let len = fill(self.slot(sent));
            assert!(len <= self.payload, "a frame that is longer than its slot");
            if len == 0 {
                break;
            }
            self.output.describe(sent, Descriptor::new(len as u32));
            self.statistics.bytes_out += len as u64;
            sent += 1;
        }
        self.statistics.frames_out += sent as u64;
        self.publish(sent);
        Ok(sent)
    }

    fn slot(&mut self, number: usize) -> &mut [u8] {
        // SAFETY: as for `Frame::slot`. The slot is not published, so that the switch does not read
        // it yet, and `self` is borrowed mutably: there is no other reference to it.
        unsafe { std::slice::from_raw_parts_mut(self.output.address(number), self.payload) }
    }

    fn publish(&mut self, slots: usize) {
        if slots == 0 {
            return;
        }
        self.output.publish(slots);
        slipway_ring::barrier();
        if self.output.must_tell() {
            self.statistics.tells += 1;
            // If the counter is full, the eventfd is readable already.
            let _ = rustix::io::write(&self.attached.tell, &1_u64.to_ne_bytes());
        }
    }

    /// Returns frames that have arrived, up to about `limit`, without waiting.
    ///
    /// # Errors
    /// [`Error::Broken`].
    pub fn receive(&mut self, limit: usize) -> Result<Received<'_>, Error> {
        let mut there = self.input.available(limit)?;
        let (mut at, mut whole, mut frames) = (0, 0, 0);
        let (mut bytes, mut good) = (0, true);
        while at < there && frames < limit {
            if at + AHEAD < there {
                self.input.fetch(at + AHEAD);
            }
            let descriptor = self.input.descriptor(at);
            good &= fits(descriptor, self.payload);
            bytes += descriptor.len();
            at += 1;
            if !descriptor.has_more() {
                self.count(good, bytes);
                frames += usize::from(good);
                (whole, bytes, good) = (at, 0, true);
            } else if at == there {
                there = self.input.available(there + 1)?;
                if at == there && at - whole > MAX_FRAME.div_ceil(self.payload) {
                    // The frame is longer than any valid one: it never ends.
                    self.statistics.malformed += 1;
                    whole = at;
                }
            }
        }
        Ok(Received::new(self, whole, frames))
    }

    fn count(&mut self, good: bool, bytes: usize) {
        if good {
            self.statistics.frames_in += 1;
            self.statistics.bytes_in += bytes as u64;
        } else {
            self.statistics.malformed += 1;
        }
    }

    pub(crate) fn input(&self) -> (&Consumer, usize) {
        (&self.input, self.payload)
    }

    pub(crate) fn give_back(&mut self, slots: usize) {
        if slots > 0 {
            self.input.release(slots);
        }
    }

    /// Waits until there is a frame, for `timeout` at most. Returns whether there is one. Polls for
    /// a time that follows the traffic, up to 200 us, and then sleeps.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Broken`].
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        let begin = Instant::now();
        let budget = timeout.map_or(self.spin.budget(), |most| most.min(self.spin.budget()));
        loop {
            for _ in 0..LOOKS {
                if self.input.available(1)? > 0 {
                    self.spin.looked(true);
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            if begin.elapsed() >= budget {
                break;
            }
        }
        self.spin.looked(false);
        loop {
            if self.arm()? {
                return Ok(true);
            }
            let left = timeout.map(|most| most.saturating_sub(begin.elapsed()));
            if left == Some(Duration::ZERO) {
                self.check()?;
                return Ok(false);
            }
            self.sleep(left)?;
            if self.input.available(1)? > 0 {
                return Ok(true);
            }
            self.check()?;
        }
    }

    fn sleep(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.statistics.sleeps += 1;
        let interest = [&self.attached.told, &self.attached.socket];
        let mut descriptors = interest.map(|file| PollFd::new(file, PollFlags::IN));
        match poll(&mut descriptors, timeout.map(timespec).as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Arms [`Port::descriptor`], for programs with an event loop of their own: it becomes readable
    /// when there is a frame. Returns whether there is one already.
    ///
    /// # Errors
    /// [`Error::Broken`].
    pub fn arm(&mut self) -> Result<bool, Error> {
        // Drain first, so that a notification after this is not lost.
        let _ = rustix::io::read(&self.attached.told, &mut [0; 8]);
        Ok(self.input.available(1)? > 0 || self.input.arm())
    }

    /// Returns the descriptor that [`Port::arm`] arms.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.attached.told.as_fd()
    }

    /// Returns the socket, which is readable when the daemon is gone.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.attached.socket.as_fd()
    }

    /// Checks by a system call that the daemon still serves the port.
    ///
    /// # Errors
    /// [`Error::Gone`].
    pub fn check(&self) -> Result<(), Error> {
        use rustix::net::RecvFlags;
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        #[allow(
            clippy::disallowed_methods,
            reason = "what is only looked at stays in the socket, so no descriptor is closed here"
        )]
        let looked = rustix::net::recv(&self.attached.socket, &mut [0; 1], flags);
        match looked {
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            // The end of the connection, or a message that no daemon sends.
            _ => Err(Error::Gone),
        }
    }
}
