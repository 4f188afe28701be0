//! Streams of families that a carrier does not have.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

mod common;

use std::time::{Duration, Instant};

use common::{DESTINATION, Memory, SOURCE, certificates, left, right};
use slipway_link::{Carrier, Command, Ended, Event, Links, News, start_carrier};

/// The longest time for which a test waits.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits for an event of which `wanted` makes something.
fn event<T>(carrier: &Carrier, wanted: impl Fn(Event) -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        let events = carrier.news().filter_map(|news| match news {
            News::Event(event) => wanted(event),
            _ => None,
        });
        if let Some(found) = events.last() {
            return found;
        }
        assert!(begun.elapsed() < LIMIT, "there is no such event");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_stream_of_a_family_whose_signals_are_not_taken_is_reset() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let there = Links::new(right(dir.path(), "127.0.0.1:1")).unwrap();
    let here = Links::new(left(dir.path(), &there.local().unwrap().to_string())).unwrap();
    let (here, there) = (start_carrier(here).unwrap(), start_carrier(there).unwrap());
    let (tenant, source, destination) = ("blue".into(), SOURCE, DESTINATION);
    here.command(Command::Open { ticket: 1, tenant, source, destination });
    let stream = event(&there, |event| match event {
        Event::Asked { stream, .. } => Some(stream),
        _ => None,
    });
    let (program, end) = Memory::new(1024).socket();
    there.command(Command::Attach { stream, end, entry: (7, program.number) });
    let ended = event(&there, |event| match event {
        Event::Ended { stream, ended, .. } => Some((stream, ended)),
        _ => None,
    });
    assert_eq!(ended, (stream, Ended::Reset));
    assert!(program.is_reset());
}
