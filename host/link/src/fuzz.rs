//! Entry points of fuzz targets: frames of a hostile engine.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use slipway_ring::cross::{Arena, Regions, Side};
use slipway_sgiov_spec::link::{Frame, HELLO, Hello, Open};

use crate::connection::{Around, Connection};
use crate::event::Event;
use crate::logs::Logs;
use crate::stream::End;

/// Decodes the messages that a connection and a stream begin with: a valid one encodes to the same
/// bytes.
pub fn hello(data: &[u8]) {
    let mut bytes = [0; HELLO];
    let count = data.len().min(HELLO);
    bytes[..count].copy_from_slice(&data[..count]);
    if let Some(hello) = Hello::decode(&bytes) {
        assert_eq!(hello.encode(), bytes);
    }
    if let Some(open) = Open::decode(data) {
        assert_eq!(open.encode(), *data);
    }
}

/// Handles payloads of records, as an engine that holds the keys can send them. No stream may hold
/// more than was granted.
pub fn frames(data: &[u8]) {
    let now = Instant::now();
    let settings = crate::Settings::for_tests();
    let Ok((socket, _other)) = std::os::unix::net::UnixStream::pair() else { return };
    let Ok(arena) = Arena::new(Regions::shape(64)) else { return };
    let Ok(bell) = eventfd(0, EventfdFlags::NONBLOCK) else { return };
    let (regions, bell) = ((0..Regions::WORDS).map(|_| Default::default()), Arc::new(bell));
    let regions: Arc<[_]> = regions.collect();
    let (mut events, mut logs, mut number) = (VecDeque::new(), Logs::new(now), 0);
    let mut connection = Connection::for_tests(socket.into(), &settings, now);
    let mut around = Around { now, settings: &settings, events: &mut events, logs: &mut logs };
    let (mut payload, mut ended) = (data, false);
    while let (Some((frame, body, rest)), false) = (Frame::decode(payload), ended) {
        assert!(frame.encode() == payload[..16] && body.len() + rest.len() + 16 == payload.len());
        ended = connection.handle_frame(frame, body, &mut around).is_err();
        payload = rest;
        while let Some(event) = around.events.pop_front() {
            if let Event::Asked { stream, .. } = event
                && number < 64
            {
                let arena = arena.clone();
                let (regions, bell) = (regions.clone(), bell.clone());
                let end = End { arena, regions, number, side: Side::One, bell };
                let _ = connection.attach(stream.number(), end);
                number += 1;
            }
        }
        assert!(connection.held() <= settings.window as usize * settings.streams);
    }
    let _ = connection.tend(&mut around);
    let _ = connection.send(1 << 20, &mut around);
    connection.doze(&mut around);
    connection.dozes(&mut around);
    connection.rest(&mut around);
    connection.rested(&mut around);
}
