//! The sending half of a connection: which stream is next, and how much of it goes into the record.

use std::os::fd::AsFd;

use slipway_ring::cross;
use slipway_sgiov_spec::link::Kind;
use slipway_warp::RecordError;

use super::time::REST;
use super::{Around, Broken, Connection, ConnectionState};
use crate::event::Ended;
use crate::frames::Frames;
use crate::sender::Sender;
use crate::settings::Settings;
use crate::stream::{Phase, SourceState, Stream};

/// Polls of a stream that find nothing before its program is asked to signal instead.
const LOOKS: u8 = 64;

/// The result of serving a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Served {
    Something,
    Nothing,
    /// There is no room in the records.
    Full,
    /// The stream is no more.
    Gone,
}

impl Connection {
    /// Fills records with the bytes of streams, seals and sends them, until `budget` bytes or more
    /// were sent. Returns whether there was something to do.
    pub(crate) fn send(&mut self, budget: usize, around: &mut Around<'_>) -> Result<bool, Broken> {
        let (mut worked, mut sent) = (false, 0);
        loop {
            let some = self.fill(around)?;
            let ConnectionState::Up(sender) = &mut self.state else { return Ok(worked) };
            let all = sender.put(&mut self.frames)?;
            sender.seal()?;
            let count = sender.send(self.socket.as_fd())?;
            sent += count;
            worked |= some || count > 0;
            let more = some || !all;
            if !more || sender.is_due() || sent >= budget {
                return Ok(worked);
            }
        }
    }

    /// Sends waiting frames, as far as the socket takes them. Touches no stream's memory.
    pub(super) fn send_frames(&mut self) -> Result<(), Broken> {
        let ConnectionState::Up(sender) = &mut self.state else { return Ok(()) };
        sender.put(&mut self.frames)?;
        sender.seal()?;
        sender.send(self.socket.as_fd())?;
        Ok(())
    }

    /// Serves each hot stream once, as far as there is room. Returns whether any stream had
    /// something to do.
    fn fill(&mut self, around: &mut Around<'_>) -> Result<bool, Broken> {
        let mut some = false;
        for _ in 0..self.hot.len() {
            let Some(number) = self.hot.pop_front() else { break };
            match self.serve(number, around)? {
                Served::Something => {
                    some = true;
                    self.hot.push_back(number);
                }
                Served::Nothing => self.cool(number),
                Served::Full => {
                    self.hot.push_front(number);
                    return Ok(true);
                }
                Served::Gone => some = true,
            }
        }
        if self.wish(around) {
            cross::heavy();
        }
        self.sort_cooled(around);
        Ok(some)
    }

    /// Serves a hot stream once. Ends the stream if it is over, its FIFO cannot grow, or its
    /// program has spoiled it.
    fn serve(&mut self, number: u32, around: &mut Around<'_>) -> Result<Served, Broken> {
        let ConnectionState::Up(sender) = &mut self.state else { return Ok(Served::Nothing) };
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(Served::Gone) };
        if stream.phase != Phase::Open {
            return Ok(Served::Nothing);
        }
        let frames = &mut self.frames;
        let served = serve(stream, number, sender, frames, around.settings);
        match served? {
            Ok(_) if stream.is_over() => {
                self.drop_stream(number, Ended::Finished, around);
                Ok(Served::Gone)
            }
            Ok(_) if stream.is_stuck() => {
                let what = format!("tenant {}: no memory left for a stream", self.tenant);
                around.logs.warn(around.now, &around.settings.name, &what);
                self.break_off(number, around);
                Ok(Served::Gone)
            }
            Ok(Served::Something) => {
                stream.idle = 0;
                Ok(Served::Something)
            }
            Ok(other) => Ok(other),
            Err(error) => {
                self.fail(number, error, around);
                Ok(Served::Gone)
            }
        }
    }

    /// Keeps an idle stream hot for some more polls, then moves it to `cooling`, where its program
    /// is asked to signal.
    fn cool(&mut self, number: u32) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.idle = stream.idle.saturating_add(1);
        if stream.idle <= LOOKS { self.hot.push_back(number) } else { self.cooling.push(number) }
    }

    /// Asks the programs of all cooling streams to signal. Returns whether a barrier is due, one
    /// for all of them.
    fn wish(&mut self, around: &mut Around<'_>) -> bool {
        let mut due = false;
        for at in 0..self.cooling.len() {
            let number = self.cooling[at];
            match self.streams.get_mut(&number).map(|stream| stream.wish(true)) {
                Some(Ok(asked)) => due |= asked,
                Some(Err(error)) => self.fail(number, error, around),
                None => {}
            }
        }
        due
    }

    /// Decides about the cooling streams, after the barrier if one was due: those with something to
    /// do stay hot.
    fn sort_cooled(&mut self, around: &mut Around<'_>) {
        for number in std::mem::take(&mut self.cooling) {
            let Some(stream) = self.streams.get_mut(&number) else { continue };
            match stream.take_wishes() {
                Ok(true) => self.hot.push_back(number),
                Ok(false) => {
                    stream.hot = false;
                    if !stream.resting && stream.has_more_than_a_page() {
                        stream.resting = true;
                        self.resting.push_back((around.now + REST, number));
                    }
                }
                Err(error) => self.fail(number, error, around),
            }
        }
    }

    /// Returns whether nothing can be sent, whatever the streams have.
    fn is_held_up(&self) -> bool {
        !matches!(&self.state, ConnectionState::Up(sender) if !sender.blocked)
            || self.held.is_some()
    }

    /// Returns the number of bytes given to the socket.
    pub(crate) fn sent(&self) -> u64 {
        if let ConnectionState::Up(sender) = &self.state { sender.bytes } else { 0 }
    }

    /// Returns the number of bytes taken from the socket.
    pub(crate) fn received(&self) -> u64 {
        self.receiver.as_ref().map_or(0, |receiver| receiver.bytes)
    }

    /// Asks the programs of all streams to signal. Returns whether a barrier is due.
    /// [`Connection::rested`] must follow in any case.
    pub(crate) fn rest(&mut self, around: &mut Around<'_>) -> bool {
        if self.is_held_up() {
            return false;
        }
        self.cooling.extend(self.hot.drain(..));
        self.wish(around)
    }

    /// Returns whether nothing is left to be done now. Follows [`Connection::rest`].
    pub(crate) fn rested(&mut self, around: &mut Around<'_>) -> bool {
        if self.is_held_up() {
            return true;
        }
        self.sort_cooled(around);
        self.hot.is_empty() && self.frames.is_empty()
    }

    /// Asks the programs of the hot streams to signal, for a short sleep. The streams stay hot and
    /// are polled after the sleep, with or without a signal. Like [`Connection::rest`], it touches
    /// no stream's memory if nothing can be sent.
    pub(crate) fn doze(&mut self, around: &mut Around<'_>) {
        if self.is_held_up() {
            return;
        }
        for at in 0..self.hot.len() {
            let number = self.hot[at];
            let wished = self.streams.get_mut(&number).map(|stream| stream.wish(false));
            if let Some(Err(error)) = wished {
                self.fail(number, error, around);
            }
        }
    }

    /// Returns whether nothing is left to be done now. Follows [`Connection::doze`].
    pub(crate) fn dozes(&mut self, around: &mut Around<'_>) -> bool {
        if self.is_held_up() {
            return true;
        }
        let mut quiet = self.frames.is_empty();
        for at in 0..self.hot.len() {
            let number = self.hot[at];
            match self.streams.get_mut(&number).map(Stream::take_wishes) {
                Some(Ok(some)) => quiet &= !some,
                Some(Err(error)) => self.fail(number, error, around),
                None => {}
            }
        }
        quiet && self.frames.is_empty()
    }
}

/// Passes on bytes that arrived for `stream`, grants credit for the room that it has, and sends its
/// bytes. The outer error is the connection's, the inner one is the stream's alone.
fn serve(
    stream: &mut Stream,
    number: u32,
    sender: &mut Sender,
    frames: &mut Frames,
    settings: &Settings,
) -> Result<Result<Served, cross::Error>, RecordError> {
    let passed = match receive_side(stream, number, frames, settings) {
        Ok(true) => Served::Something,
        Ok(false) => Served::Nothing,
        Err(error) => return Ok(Err(error)),
    };
    if stream.finished {
        return Ok(Ok(passed));
    }
    match stream.look() {
        Ok(SourceState::Bytes(_)) if stream.credit > 0 => {}
        Ok(SourceState::Bytes(_) | SourceState::Nothing) => return Ok(Ok(passed)),
        Ok(SourceState::End) => {
            stream.finished = true;
            frames.put(Kind::Fin, number, 0);
            return Ok(Ok(Served::Something));
        }
        Ok(SourceState::Reset) => return Ok(Err(cross::Error::Reset)),
        Err(error) => return Ok(Err(error)),
    }
    if !sender.put(frames)? {
        return Ok(Ok(Served::Full));
    }
    let most = usize::try_from(stream.credit).unwrap_or(usize::MAX);
    let Some(count) = sender.data(number, most, |into| stream.pull(into))? else {
        return Ok(Ok(Served::Full));
    };
    Ok(count.map(|count| if count > 0 { Served::Something } else { passed }))
}

/// Passes on bytes that arrived for `stream`, and grants credit for the room that it has. Returns
/// whether there was anything to do.
fn receive_side(
    stream: &mut Stream,
    number: u32,
    frames: &mut Frames,
    settings: &Settings,
) -> Result<bool, cross::Error> {
    let passed = stream.pass(settings.fifo)?;
    let more = stream.grant(settings.fifo)?;
    if more > 0 {
        frames.put(Kind::Credit, number, more);
    }
    Ok(passed || more > 0)
}
