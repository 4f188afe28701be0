//! The receiving half of a connection: the handshake, then the peer's frames.
//!
//! [`Connection::handle_frame`] passes each frame on by its kind: `Open` to `receive_open`,
//! `Accepted` and `Refused` to `receive_answer`, and `Data`, `Credit` and `Fin` to
//! `receive_on_open`. A frame that the protocol forbids is an error, which ends the connection.

use std::os::fd::AsFd;

use rustix::io::Errno;
use slipway_sgiov_spec::link::{Frame, Hello, Kind, Open};

use super::{Around, Broken, Connection, ConnectionState};
use crate::event::{Ended, Event};
use crate::handshake::{HandshakeError, Session, connected};
use crate::receiver::{Received, Receiver};
use crate::sender::Sender;
use crate::stream::{Phase, Stream};

/// The most frames that may wait to be sent. A peer that sends requests and does not read the
/// answers loses its connection beyond this number.
const MAX_QUEUED_FRAMES: usize = 1 << 18;
/// The most streams that a peer may have opened and the owner has not answered. Streams that the
/// peer has reset meanwhile count too: each is an event in the owner's queue.
const MAX_UNANSWERED: usize = 1024;
/// The most unused credit that a peer may grant to a stream, bytes.
const MAX_CREDIT: u64 = 1 << 40;

impl Connection {
    /// Takes the handshake as far as the bytes that have arrived allow. Returns `false` if the
    /// handshake is done already.
    ///
    /// # Errors
    /// The errors of connecting and of the handshake.
    pub(crate) fn shake_hands(&mut self, around: &mut Around<'_>) -> Result<bool, Broken> {
        let settings = around.settings;
        let (ConnectionState::Connecting(handshake) | ConnectionState::Handshake(handshake)) =
            &mut self.state
        else {
            return Ok(false);
        };
        connected(self.socket.as_fd()).map_err(HandshakeError::Io)?;
        let judge = |hello: &Hello| {
            let peer = settings.engine_named(hello.engine.as_str());
            let peer = peer.and_then(|number| settings.engine.get(number));
            peer.is_some_and(|peer| peer.serves(hello.tenant.as_str()))
        };
        match handshake.step(self.socket.as_fd(), &judge)? {
            Some(session) => self.start_records(session, around)?,
            None => self.state.connected(),
        }
        Ok(true)
    }

    /// Makes the connection ready for records after the handshake.
    fn start_records(&mut self, session: Session, around: &mut Around<'_>) -> Result<(), Broken> {
        let Session { hello, sealer, opener, rest } = session;
        let engine = around.settings.engine_named(hello.engine.as_str());
        if self.engine.is_some() && self.engine != engine {
            return Err(HandshakeError::Name(hello.engine.as_str().into()).into());
        }
        self.engine = engine;
        self.tenant = hello.tenant.as_str().into();
        self.window = hello.window;
        for stream in self.streams.values_mut() {
            stream.credit = hello.window.into();
        }
        (self.heard, self.pinged, self.emptied) = (around.now, around.now, around.now);
        let sender = Sender::new(sealer, around.settings.record, around.settings.rekey);
        let receiver = Receiver::new(opener, &rest);
        (self.state, self.receiver) = (ConnectionState::Up(sender.into()), Some(receiver));
        // Records that arrived together with the last bytes of the handshake.
        self.dispatch(around)?;
        Ok(())
    }

    /// Receives and dispatches until `budget` bytes or more have come. Returns whether anything
    /// came.
    pub(crate) fn receive(
        &mut self,
        budget: usize,
        around: &mut Around<'_>,
    ) -> Result<bool, Broken> {
        let (mut worked, mut taken) = (false, 0);
        loop {
            let Some(receiver) = &mut self.receiver else { return Ok(worked) };
            let before = receiver.bytes;
            let received = receiver.receive(self.socket.as_fd())?;
            let count = (receiver.bytes - before) as usize;
            self.coalescing.took(count, around.now, self.socket.as_fd());
            match received {
                Received::Nothing => return Ok(worked),
                Received::End if self.streams.is_empty() => return Err(Broken::Idle),
                Received::End => return Err(Broken::Closed),
                Received::Some => {}
            }
            taken += count;
            (worked, self.heard) = (true, around.now);
            self.dispatch(around)?;
            if taken >= budget {
                return Ok(true);
            }
        }
    }

    /// Handles all frames of all complete records in the buffer.
    fn dispatch(&mut self, around: &mut Around<'_>) -> Result<(), Broken> {
        // The receiver is taken out so that its bytes can be lent while streams and frames change.
        let Some(mut receiver) = self.receiver.take() else { return Ok(()) };
        let done = self.dispatch_records(&mut receiver, around);
        self.receiver = Some(receiver);
        done
    }

    /// Handles the frames of all complete records of `receiver`.
    fn dispatch_records(
        &mut self,
        receiver: &mut Receiver,
        around: &mut Around<'_>,
    ) -> Result<(), Broken> {
        while let Some(mut payload) = receiver.next()? {
            while !payload.is_empty() {
                let (frame, body, rest) = Frame::decode(payload).ok_or(Broken::Frame)?;
                self.handle_frame(frame, body, around)?;
                payload = rest;
            }
            if self.frames.len() > MAX_QUEUED_FRAMES {
                return Err(Broken::Flood);
            }
        }
        Ok(())
    }

    /// Handles one frame of the peer.
    pub(crate) fn handle_frame(
        &mut self,
        frame: Frame,
        body: &[u8],
        around: &mut Around<'_>,
    ) -> Result<(), Broken> {
        match frame.kind {
            Kind::Ping => self.frames.put(Kind::Pong, 0, frame.value),
            Kind::Pong => {}
            Kind::GoAway => self.away = true,
            Kind::Open => self.receive_open(frame.stream, body, around)?,
            _ if !self.streams.contains_key(&frame.stream) => {
                return self.check_existed(frame.stream);
            }
            Kind::Accepted | Kind::Refused => self.receive_answer(frame, around)?,
            Kind::Reset => {
                let stream = self.streams.get(&frame.stream);
                let open_sent = stream.is_some_and(|stream| stream.phase == Phase::OpenSent);
                let errno = Errno::CONNRESET.raw_os_error().unsigned_abs();
                let ended = if open_sent { Ended::Refused(errno) } else { Ended::Reset };
                self.drop_stream(frame.stream, ended, around);
            }
            Kind::Data | Kind::Credit | Kind::Fin => self.receive_on_open(frame, body, around)?,
        }
        Ok(())
    }

    /// Checks that the stream `number`, which does not exist, existed once: the peer may have sent
    /// a frame before it heard of the stream's end.
    ///
    /// # Errors
    /// [`Broken::Frame`] if neither side has used the number.
    fn check_existed(&self, number: u32) -> Result<(), Broken> {
        let own = number % 2 == self.next % 2;
        let existed = if own { number < self.next } else { number <= self.last };
        if existed { Ok(()) } else { Err(Broken::Frame) }
    }

    /// Receives the peer's request for a stream: tells the owner of it ([`Event::Asked`]), or
    /// refuses it at once.
    fn receive_open(
        &mut self,
        number: u32,
        body: &[u8],
        around: &mut Around<'_>,
    ) -> Result<(), Broken> {
        let theirs = number % 2 != self.next % 2 && number > self.last;
        let open = Open::decode(body).filter(|_| theirs).ok_or(Broken::Frame)?;
        self.last = number;
        let full = self.streams.len() >= around.settings.streams;
        // An engine may name only addresses of its own programs as a source.
        let forged = around.settings.engine_of(&self.tenant, open.source.ip) != self.engine;
        let refused = match (forged, full || self.unanswered.len() >= MAX_UNANSWERED) {
            (true, _) => Some(Errno::ADDRNOTAVAIL),
            (_, true) => Some(Errno::NOBUFS),
            _ => None,
        };
        if let Some(errno) = refused {
            let errno = errno.raw_os_error().unsigned_abs();
            self.frames.put(Kind::Refused, number, errno.into());
            return Ok(());
        }
        self.unanswered.insert(number);
        self.restart_silence_timers(around.now);
        let stream = Stream::new(Phase::OpenReceived, self.window, around.settings.window);
        self.streams.insert(number, stream);
        let engine = self.engine.and_then(|engine| around.settings.engine.get(engine));
        around.events.push_back(Event::Asked {
            stream: self.id(number),
            engine: engine.map(|peer| peer.name.clone()).unwrap_or_default(),
            tenant: self.tenant.clone(),
            source: open.source,
            destination: open.destination,
        });
        Ok(())
    }

    /// Receives the peer's answer to a stream that this side opened.
    fn receive_answer(&mut self, frame: Frame, around: &mut Around<'_>) -> Result<(), Broken> {
        let stream = self.streams.get_mut(&frame.stream).ok_or(Broken::Frame)?;
        if stream.phase != Phase::OpenSent {
            return Err(Broken::Frame);
        }
        if frame.kind == Kind::Refused {
            let errno = u32::try_from(frame.value).unwrap_or(0);
            self.drop_stream(frame.stream, Ended::Refused(errno), around);
        } else {
            stream.phase = Phase::Open;
            around.events.push_back(Event::Opened(self.id(frame.stream)));
            self.mark_hot(frame.stream);
        }
        Ok(())
    }

    /// Receives data, credit or the end of the peer's data on a stream that both sides have opened.
    fn receive_on_open(
        &mut self,
        frame: Frame,
        body: &[u8],
        around: &mut Around<'_>,
    ) -> Result<(), Broken> {
        let stream = self.streams.get_mut(&frame.stream).ok_or(Broken::Frame)?;
        if stream.phase != Phase::Open || stream.has_ended() && frame.kind != Kind::Credit {
            return Err(Broken::Frame);
        }
        match frame.kind {
            Kind::Credit => {
                stream.credit += frame.value;
                if stream.credit > MAX_CREDIT {
                    return Err(Broken::Frame);
                }
            }
            Kind::Fin => stream.take_fin(),
            // As in TCP, data for a program that is gone is answered by a reset.
            _ if stream.left => {
                self.break_off(frame.stream, around);
                return Ok(());
            }
            _ => match stream.push(body, around.settings.fifo) {
                Ok(true) => {}
                Ok(false) => return Err(Broken::Credit),
                Err(error) => self.fail(frame.stream, error, around),
            },
        }
        self.mark_hot(frame.stream);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;
    use crate::logs::Logs;
    use crate::settings::{Peer, Settings};

    /// Streams that are opened and reset at once, or opened with another engine's address, do not
    /// pile up as work for the owner.
    #[test]
    fn an_engine_opens_a_limited_number_of_unanswered_streams_and_for_its_own_programs() {
        let mut settings = Settings::for_tests();
        let now = Instant::now();
        let (mut events, mut logs) = (VecDeque::new(), Logs::new(now));
        let (socket, _other) = UnixStream::pair().unwrap();
        let mut connection = Connection::for_tests(socket.into(), &settings, now);
        let nobody = slipway_sgiov_spec::Address::ANY;
        let open = Open { source: nobody, destination: nobody }.encode();
        let frame = |kind, stream| Frame { kind, stream, value: 0 };
        let mut ask = |connection: &mut Connection, settings: &Settings, stream| {
            let mut around = Around { now, settings, events: &mut events, logs: &mut logs };
            connection.handle_frame(frame(Kind::Open, stream), &open, &mut around).unwrap();
            connection.handle_frame(frame(Kind::Reset, stream), &[], &mut around).unwrap();
            events.iter().filter(|event| matches!(event, Event::Asked { .. })).count()
        };
        let mut asked = 0;
        for number in 0..2000 {
            asked = ask(&mut connection, &settings, 2 * number + 1);
        }
        assert_eq!(asked, MAX_UNANSWERED);
        connection.refuse(1, 111, now);
        assert_eq!(ask(&mut connection, &settings, 4001), MAX_UNANSWERED + 1);
        // An open with another engine's address as its source.
        connection.refuse(3, 111, now);
        settings.engine = toml::from_str::<HashMap<String, Vec<Peer>>>(
            "engine = [{ name = 'a', at = '127.0.0.1:1', addresses = ['::/0'] }]",
        )
        .unwrap()
        .remove("engine")
        .unwrap();
        assert_eq!(ask(&mut connection, &settings, 4003), MAX_UNANSWERED + 1);
        connection.engine = Some(0);
        assert_eq!(ask(&mut connection, &settings, 4005), MAX_UNANSWERED + 2);
    }

    /// Plays `frames` of a hostile engine after a valid beginning. Returns the bytes held beside
    /// FIFOs.
    fn after_open(frames: &[(Kind, u32, u64, &[u8])]) -> Result<usize, Broken> {
        let settings = Settings::for_tests();
        let now = Instant::now();
        let (mut events, mut logs) = (VecDeque::new(), Logs::new(now));
        let (socket, _other) = UnixStream::pair().unwrap();
        let mut connection = Connection::for_tests(socket.into(), &settings, now);
        let mut around = Around { now, settings: &settings, events: &mut events, logs: &mut logs };
        let nobody = slipway_sgiov_spec::Address::ANY;
        let open = Open { source: nobody, destination: nobody }.encode();
        let frame = |kind, stream, value| Frame { kind, stream, value };
        connection.handle_frame(frame(Kind::Open, 5, 0), &open, &mut around).unwrap();
        connection.open(Open { source: nobody, destination: nobody }, &around).unwrap();
        connection.handle_frame(frame(Kind::Accepted, 2, 0), &[], &mut around).unwrap();
        for (kind, stream, value, body) in frames {
            connection.handle_frame(frame(*kind, *stream, *value), body, &mut around)?;
        }
        Ok(connection.held())
    }

    #[test]
    fn what_an_engine_must_not_say_ends_the_connection() {
        let open: &[u8] = &[0; 48];
        let window = Settings::for_tests().window as usize;
        for frames in [
            // A number of this side, one used before, one never used.
            &[(Kind::Open, 6, 0, open)][..],
            &[(Kind::Open, 3, 0, open)],
            &[(Kind::Open, 5, 0, open)],
            &[(Kind::Data, 7, 1, &[1])],
            &[(Kind::Reset, 4, 0, &[])],
            // Frames to a stream that the peer opened and nobody accepted, and an answer from the
            // wrong side.
            &[(Kind::Data, 5, 1, &[1])],
            &[(Kind::Credit, 5, 1, &[])],
            &[(Kind::Accepted, 5, 0, &[])],
            &[(Kind::Accepted, 2, 0, &[])],
            &[(Kind::Refused, 2, 111, &[])],
            // Frames after the end, more credit than the limit, more bytes than credit.
            &[(Kind::Fin, 2, 0, &[]), (Kind::Data, 2, 1, &[1])],
            &[(Kind::Fin, 2, 0, &[]), (Kind::Fin, 2, 0, &[])],
            &[(Kind::Credit, 2, 1 << 40, &[])],
            &[(Kind::Data, 2, 1, &vec![1; window + 1])],
            &[(Kind::Data, 2, 1, &vec![1; window]), (Kind::Data, 2, 1, &[1])],
        ] {
            assert!(after_open(frames).is_err(), "{:?}", &frames[0].0);
        }
        assert_eq!(after_open(&[(Kind::Data, 2, 1, &vec![1; window])]).unwrap(), window);
        // Frames may cross a reset or a refusal.
        assert!(after_open(&[(Kind::Reset, 2, 0, &[]), (Kind::Data, 2, 1, &[1])]).is_ok());
        assert!(after_open(&[(Kind::Open, 9, 0, open), (Kind::Credit, 7, 1, &[])]).is_ok());
    }
}
