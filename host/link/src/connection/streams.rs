//! Operations of the engine on a connection's streams.

use std::time::Instant;

use rustix::io::Errno;
use slipway_ring::cross;
use slipway_sgiov_spec::link::{Kind, Open};

use super::time::ANSWER;
use super::{Around, Broken, Connection};
use crate::event::{Ended, Event, StreamId};
use crate::stream::{End, Phase, Stream};

impl Connection {
    /// Opens a stream. Returns `None` if there are as many streams as allowed, or no numbers left.
    pub(crate) fn open(&mut self, open: Open, around: &Around<'_>) -> Option<StreamId> {
        let number = self.next;
        if self.streams.len() >= around.settings.streams {
            return None;
        }
        self.next = number.checked_add(2)?;
        self.restart_silence_timers(around.now);
        let stream = Stream::new(Phase::OpenSent, self.window, around.settings.window);
        self.streams.insert(number, stream);
        self.asking.push_back((around.now + ANSWER, number));
        self.frames.open(number, open);
        Some(self.id(number))
    }

    /// Restarts the timers of the peer's silence if the connection has no streams: it may have been
    /// silent for long, and gets its first stream.
    pub(super) fn restart_silence_timers(&mut self, now: Instant) {
        if self.streams.is_empty() {
            (self.heard, self.pinged) = (now, now);
        }
    }

    /// Attaches the local FIFO's end to a stream. Returns `end` as the error if there is no such
    /// stream any more.
    pub(crate) fn attach(&mut self, number: u32, end: End) -> Result<(), End> {
        self.unanswered.remove(&number);
        let Some(stream) = self.streams.get_mut(&number) else { return Err(end) };
        stream.attach(end);
        if stream.phase == Phase::OpenReceived {
            stream.phase = Phase::Open;
            self.frames.put(Kind::Accepted, number, 0);
        }
        self.mark_hot(number);
        Ok(())
    }

    /// Refuses a stream that the peer opened, unless it has ended meanwhile. `errno` is a number of
    /// errno(3).
    pub(crate) fn refuse(&mut self, number: u32, errno: u32, now: Instant) {
        self.unanswered.remove(&number);
        if self.streams.get(&number).is_some_and(|stream| stream.phase == Phase::OpenReceived) {
            self.frames.put(Kind::Refused, number, errno.clamp(1, 4095).into());
            self.forget(number, now);
        }
    }

    /// Makes a stream hot: it is polled in the next turns.
    pub(crate) fn mark_hot(&mut self, number: u32) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.idle = 0;
        if !stream.hot {
            stream.hot = true;
            self.hot.push_back(number);
        }
    }

    /// Handles that the local program has closed the stream.
    pub(crate) fn leave(&mut self, number: u32, around: &mut Around<'_>) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.left = true;
        // As in TCP, closing with unread bytes resets the stream.
        if stream.phase != Phase::Open || stream.is_unread() {
            self.break_off(number, around);
        } else {
            self.mark_hot(number);
        }
    }

    /// Ends the stream on both sides.
    pub(crate) fn break_off(&mut self, number: u32, around: &mut Around<'_>) {
        let Some(stream) = self.streams.get(&number) else { return };
        match stream.phase {
            Phase::OpenReceived => {
                let errno = Errno::CONNREFUSED.raw_os_error().unsigned_abs();
                self.frames.put(Kind::Refused, number, errno.into());
            }
            _ => self.frames.put(Kind::Reset, number, 0),
        }
        self.drop_stream(number, Ended::Reset, around);
    }

    /// Ends the stream on this side only.
    pub(super) fn drop_stream(&mut self, number: u32, ended: Ended, around: &mut Around<'_>) {
        if let Some(stream) = self.forget(number, around.now) {
            if ended != Ended::Finished {
                stream.reset();
            }
            let (attached, region) = (stream.is_attached(), stream.region());
            let stream = self.id(number);
            around.events.push_back(Event::Ended { stream, ended, attached, region });
        }
    }

    /// Removes a stream. Notes the time if it was the last one.
    fn forget(&mut self, number: u32, now: Instant) -> Option<Stream> {
        let stream = self.streams.remove(&number);
        if self.streams.is_empty() {
            self.emptied = now;
        }
        stream
    }

    /// Ends all streams of the connection.
    pub(crate) fn end(&mut self, broken: &Broken, around: &mut Around<'_>) {
        let numbers: Vec<u32> = self.streams.keys().copied().collect();
        for number in numbers {
            let asking = self.streams.get(&number).is_some_and(|s| s.phase == Phase::OpenSent);
            let ended = if asking { Ended::Refused(broken.errno()) } else { Ended::Reset };
            self.drop_stream(number, ended, around);
        }
    }

    /// Ends a stream whose FIFO the local program spoiled or reset.
    pub(super) fn fail(&mut self, number: u32, error: cross::Error, around: &mut Around<'_>) {
        if error == cross::Error::Spoiled {
            let what = format!("tenant {}: {error}", self.tenant);
            around.logs.warn(around.now, &around.settings.name, &what);
        }
        self.break_off(number, around);
    }
}
