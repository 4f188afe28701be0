use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slipway_reactor::{Reactor, Settings};

use crate::common::*;

fn entry(region: u32, offset: u64, data: &[u8]) -> spec::WriteMultiEntry {
    let mut entry = spec::WriteMultiEntry {
        offset: U64::new(offset),
        region: U32::new(region),
        count: U32::new(data.len() as u32),
        data: [0; 8],
    };
    entry.data[..data.len()].copy_from_slice(data);
    entry
}

fn message(count: u64, entries: &[spec::WriteMultiEntry]) -> Vec<u8> {
    [&count.to_le_bytes(), entries.as_bytes()].concat()
}

#[test]
fn writes_are_done_in_order() {
    let served = serve();
    let mut raw = served.client();
    let entries = [
        entry(0, 0x10, &1u32.to_le_bytes()),
        entry(0, 0x18, &2u64.to_le_bytes()),
        entry(spec::region::CONFIG, 4, &[2, 0]),
        entry(0, 0x10, &3u32.to_le_bytes()),
    ];
    let reply = raw.call(Command::RegionWriteMulti, &message(4, &entries)).ok();
    assert_eq!(reply, 4u64.to_le_bytes());
    assert_eq!((raw.read_u32(0x10), raw.read_u32(0x18)), (3, 2));
}

#[test]
fn bad_requests_do_nothing() {
    let served = serve();
    let mut raw = served.client();
    let good = entry(0, 0x10, &7u32.to_le_bytes());
    let mut wide = entry(0, 0x18, &[0; 8]);
    wide.count = U32::new(9);
    let cases = [
        message(0, &[]),
        message(2, &[good]),
        message(u64::MAX, &[good]),
        message(2, &[good, wide]),
        message(2, &[good, entry(1, 0, &[1])]),
        message(2, &[good, entry(0, 0x4000, &[1])]),
        message(1, &[good])[..31].to_vec(),
        vec![1, 0, 0],
    ];
    for case in cases {
        assert_eq!(raw.call(Command::RegionWriteMulti, &case).err(), Errno::INVAL);
    }
    assert_eq!(raw.read_u32(0x10), 0);
}

#[test]
fn it_must_have_been_agreed_on() {
    let served = serve();
    let mut raw = served.connect();
    raw.call(Command::Version, &[0, 0, 1, 0]).ok();
    let good = message(1, &[entry(0, 0x10, &[7])]);
    assert_eq!(raw.call(Command::RegionWriteMulti, &good).err(), Errno::NOTSUP);
}

/// A served function whose reactor does not look for more work before it sleeps, so that its polls
/// can be counted.
fn served_without_looking() -> Served {
    let settings = Settings { poll_budget: Duration::ZERO, ..Settings::default() };
    serve_on(Arc::new(Reactor::spawn(settings).unwrap()), |_| {})
}

/// Returns how often the function is polled while `act` runs.
fn polls(served: &Served, act: impl FnOnce()) -> u32 {
    let before = served.knobs.polls.load(Ordering::Relaxed);
    act();
    served.knobs.polls.load(Ordering::Relaxed) - before
}

/// A poll may copy as much data as a turn allows, so a client must not get one for each register.
#[test]
fn a_long_write_has_the_function_polled_a_few_times() {
    let served = served_without_looking();
    let mut raw = served.client();
    let table: Vec<u8> = (0..0x1000u32 / 4).flat_map(u32::to_le_bytes).collect();
    let request = access(0, 0x2000, 0x1000);
    let count = polls(&served, || {
        raw.call(Command::RegionWrite, &[request.as_bytes(), &table].concat()).ok();
    });
    assert!(count < 100, "{count} polls for {} registers", 0x1000 / 4);
    let read = raw.call(Command::RegionRead, request.as_bytes()).ok();
    assert_eq!(read[size_of_val(&request)..], table);
}

/// The function is polled between the turns of a message, so that a client that reads a whole BAR
/// has no long turn.
#[test]
fn a_long_read_is_done_in_several_turns() {
    const LEN: u32 = 0x3000;
    let served = served_without_looking();
    let mut raw = served.client();
    let table: Vec<u8> = (0..0x1000u32 / 4).flat_map(u32::to_le_bytes).collect();
    raw.call(Command::RegionWrite, &[access(0, 0x2000, 0x1000).as_bytes(), &table].concat()).ok();
    let request = access(0, 0x1000, LEN);
    let mut read = Vec::new();
    let count = polls(&served, || {
        read = raw.call(Command::RegionRead, request.as_bytes()).ok();
    });
    let data = &read[size_of_val(&request)..];
    assert_eq!(data.len(), LEN as usize);
    assert_eq!(data[0x1000..0x2000], table);
    let turns = LEN / 4 / 256;
    assert!(count + 1 >= turns, "{count} polls in {turns} turns");
}

#[test]
fn many_writes_in_a_message_are_done_in_several_turns() {
    const WRITES: u64 = 8000;
    let served = served_without_looking();
    let mut raw = served.client();
    let mut entries: Vec<_> =
        (0..WRITES).map(|at| entry(0, 0x2000 + at * 4 % 0x1000, &at.to_le_bytes()[..4])).collect();
    // Configuration space in between.
    entries[100] = entry(spec::region::CONFIG, 4, &[2, 0]);
    let count = polls(&served, || {
        let reply = raw.call(Command::RegionWriteMulti, &message(WRITES, &entries)).ok();
        assert_eq!(reply, WRITES.to_le_bytes());
    });
    assert!(count < 2000, "{count} polls for {WRITES} writes");
    assert_eq!(u64::from(raw.read_u32(0x2000 + (WRITES - 1) * 4 % 0x1000)), WRITES - 1);
}
