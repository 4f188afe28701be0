//! Work of a connection that is due by the clock.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_sgiov_spec::link::Kind;

use super::{Around, Broken, Connection};
use crate::event::Ended;
use crate::handshake::HandshakeError;
use crate::settings::Settings;
use crate::stream::Phase;

/// The idle time after which an empty FIFO gives up its memory.
pub(super) const REST: Duration = Duration::from_secs(1);
/// The time after which a turn releases no more memory of a connection. Shorter than any sleep that
/// a tenant pays for, and longer than many releases without one.
const TRIMS: Duration = Duration::from_millis(1);

/// Time until the other side must have accepted or refused a stream, with connecting and the
/// handshake. Less than a program waits for its engine: another engine that does not answer must
/// not look like the end of this one.
pub(super) const ANSWER: Duration = Duration::from_secs(8);

impl Connection {
    /// Does all work that is due by the clock.
    pub(crate) fn tend(&mut self, around: &mut Around<'_>) -> Result<(), Broken> {
        let (now, settings) = (around.now, around.settings);
        self.give_up(around);
        if !self.is_up() {
            let late = now >= self.since + settings.handshake();
            return if late {
                Err(HandshakeError::Io(Errno::TIMEDOUT.into()).into())
            } else {
                Ok(())
            };
        }
        if self.left_out.is_some() {
            // Messages of the other side are not read meanwhile, so its silence tells nothing.
            self.heard = now;
            return self.show_life(now, settings);
        }
        self.trim_due(now);
        if self.streams.is_empty() {
            return self.part(now, settings);
        }
        let (silence, ping) = (settings.silence(), settings.silence() / 3);
        if now >= self.heard + silence {
            return Err(Broken::Silent);
        }
        if now >= self.heard.max(self.pinged) + ping {
            self.pinged = now;
            self.frames.put(Kind::Ping, 0, 0);
        }
        Ok(())
    }

    /// Sends a ping from time to time while the connection is left out: the other side must not
    /// take it for dead.
    fn show_life(&mut self, now: Instant, settings: &Settings) -> Result<(), Broken> {
        if now < self.pinged + settings.silence() / 3 {
            return Ok(());
        }
        self.pinged = now;
        self.frames.put(Kind::Ping, 0, 0);
        self.send_frames()
    }

    /// Gives up streams that the other side has not answered in time.
    fn give_up(&mut self, around: &mut Around<'_>) {
        while let Some((when, number)) = self.asking.front().copied() {
            let asks = self.streams.get(&number).is_some_and(|s| s.phase == Phase::OpenSent);
            if asks && when > around.now {
                return;
            }
            self.asking.pop_front();
            if asks {
                self.frames.put(Kind::Reset, number, 0);
                let errno = Errno::TIMEDOUT.raw_os_error().unsigned_abs();
                self.drop_stream(number, Ended::Refused(errno), around);
            }
        }
    }

    /// Ends a connection without streams. Sends GoAway after the linger time, and ends the
    /// connection once the peer has sent GoAway, too, or after another linger time: the peer may
    /// have opened a stream before it saw ours.
    fn part(&mut self, now: Instant, settings: &Settings) -> Result<(), Broken> {
        let due = now >= self.emptied + settings.linger();
        if self.away || due && self.leaving {
            return Err(Broken::Idle);
        }
        if due {
            (self.leaving, self.emptied) = (true, now);
            self.frames.put(Kind::GoAway, 0, 0);
        }
        Ok(())
    }

    /// Returns whether this side may open streams on the connection.
    pub(crate) fn is_open(&self) -> bool {
        !self.away && !self.leaving
    }

    /// Releases memory of FIFOs that is due. After [`TRIMS`] the rest is left to the next turn,
    /// which is due at once: each release can sleep in a program's memory, and the tenant is only
    /// charged after the call.
    fn trim_due(&mut self, now: Instant) {
        let mut begun = None;
        while let Some((when, number)) = self.resting.front().copied()
            && when <= now
        {
            let begun: Instant = *begun.get_or_insert_with(Instant::now);
            self.resting.pop_front();
            self.trim(number, now);
            if begun.elapsed() >= TRIMS {
                break;
            }
        }
    }

    /// Gives memory of a stream's FIFO back, unless the stream is served again by now. Comes back
    /// later if more than a page is left.
    fn trim(&mut self, number: u32, now: Instant) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.resting = false;
        if !stream.hot {
            stream.trim();
            if stream.has_more_than_a_page() {
                stream.resting = true;
                self.resting.push_back((now + REST, number));
            }
        }
    }

    /// Returns whether the bytes in the socket must be received now, however few.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.coalescing.until().is_some_and(|until| until <= now)
    }

    /// Returns whether the socket is left unread until more bytes are there.
    pub(crate) fn coalesces(&self) -> bool {
        self.coalescing.waits()
    }

    /// Returns when [`Connection::tend`] or [`Connection::receive`] must be called even if nothing
    /// happens.
    pub(crate) fn deadline(&self, settings: &Settings) -> Option<Instant> {
        let asking = self.asking.front().map(|(when, _)| *when);
        if !self.is_up() {
            let late = self.since + settings.handshake();
            return Some(asking.map_or(late, |asking| asking.min(late)));
        }
        if let Some(until) = self.left_out {
            let until = until.min(self.pinged + settings.silence() / 3);
            return Some(asking.map_or(until, |asking| asking.min(until)));
        }
        let alive = match self.streams.is_empty() {
            true if self.away => self.emptied,
            true => self.emptied + settings.linger(),
            false => (self.heard.max(self.pinged) + settings.silence() / 3)
                .min(self.heard + settings.silence()),
        };
        let resting = self.resting.front().map(|(when, _)| *when);
        [Some(alive), asking, resting, self.held, self.coalescing.until()]
            .into_iter()
            .flatten()
            .min()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{FallocateFlags, fallocate};
    use slipway_ring::cross::{Arena, Regions, Side};

    use super::*;
    use crate::logs::Logs;
    use crate::stream::{End, Stream};

    const FIFO: usize = 64 << 10;

    /// Adds a stream with an arena to itself, whose memory is due to be released.
    fn add_due(connection: &mut Connection, number: u32, now: Instant) -> Arena {
        let arena = Arena::new(Regions::shape(1)).unwrap();
        let regions: Arc<[AtomicU64]> = (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect();
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut stream = Stream::new(Phase::Open, 0, FIFO as u32);
        stream.attach(End { arena: arena.clone(), regions, number: 0, side: Side::One, bell });
        assert_eq!(stream.push(&[1; FIFO], FIFO), Ok(true));
        assert!(stream.has_more_than_a_page());
        stream.resting = true;
        connection.streams.insert(number, stream);
        connection.resting.push_back((now, number));
        arena
    }

    /// A program takes its arenas' pages away before they are released.
    #[test]
    fn a_turn_releases_no_more_after_a_release_that_slept() {
        let (now, (socket, _other)) = (Instant::now(), UnixStream::pair().unwrap());
        let settings = Settings::for_tests();
        let mut connection = Connection::for_tests(socket.into(), &settings, now);
        let slow = add_due(&mut connection, 2, now);
        let _other = add_due(&mut connection, 4, now);
        let pause = Duration::from_millis(20);
        if slipway_peer::testing::slow(slow.words(), pause).is_err() {
            eprintln!("skipped: it needs userfaultfd(2)");
            return;
        }
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(slow.file().unwrap(), mode, 0, slow.shape().bytes() as u64).unwrap();
        let (mut events, mut logs) = (VecDeque::new(), Logs::new(now));
        let (events, logs) = (&mut events, &mut logs);
        let mut around = Around { now, settings: &settings, events, logs };
        connection.tend(&mut around).unwrap();
        let due: Vec<_> = connection.resting.iter().filter(|(when, _)| *when <= now).collect();
        assert_eq!(due, [&(now, 4)]);
        assert_eq!(connection.deadline(&settings), Some(now), "the next turn is due at once");
        connection.tend(&mut around).unwrap();
        assert!(connection.resting.iter().all(|(when, _)| *when > now));
    }
}
