//! Streams between two engines of one process, over loopback.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Instant;

use common::*;
use slipway_link::Ended;

/// Sends `total` bytes from one program to the other, in messages of `size`, and checks each byte.
fn carry(
    (left, right): (&mut Engine, &mut Engine),
    (from, to): (&Joined, &Joined),
    total: u64,
    size: usize,
) {
    let (mut sent, mut got) = (0, 0);
    let mut buffer = vec![0; size];
    until(left, right, |left, right| {
        let count = size.min((total - sent) as usize);
        let message = bytes(7, sent, count);
        sent += from.0.write(&message, || left.links.stir(from.1)).unwrap() as u64;
        let count = to.0.read(&mut buffer, || right.links.stir(to.1)).unwrap();
        assert_eq!(buffer[..count], bytes(7, got, count), "at {got}");
        got += count as u64;
        got == total
    });
}

#[test]
fn bytes_go_both_ways_and_end() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (here, there) = joined(&mut left, &mut right);
    for size in [1, 100, 4096, 100_000] {
        let total = 40 * size as u64;
        carry((&mut left, &mut right), (&here, &there), total, size);
        carry((&mut right, &mut left), (&there, &here), total, size);
    }

    // One direction ends, the other goes on.
    if here.0.shutdown() {
        left.links.stir(here.1);
    }
    until(&mut left, &mut right, |_, _| there.0.is_at_end());
    carry((&mut right, &mut left), (&there, &here), 1000, 100);
    if there.0.shutdown() {
        right.links.stir(there.1);
    }
    until(&mut left, &mut right, |left, right| {
        here.0.is_at_end() && !left.ended.is_empty() && !right.ended.is_empty()
    });
    assert_eq!(left.ended, [(here.1, Ended::Finished)]);
    assert_eq!(right.ended, [(there.1, Ended::Finished)]);
}

#[test]
fn a_megabyte_ends_with_the_last_byte() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (here, there) = joined(&mut left, &mut right);
    // All bytes are written and the stream is closed before the engine has moved much.
    let all = bytes(7, 0, 400_000);
    assert_eq!(here.0.write(&all, || left.links.stir(here.1)), Ok(all.len()));
    here.0.shutdown();
    left.links.stir(here.1);
    left.links.leave(here.1, Instant::now());
    let mut got = Vec::new();
    until(&mut left, &mut right, |_, right| {
        let mut buffer = [0; 1000];
        let count = there.0.read(&mut buffer, || right.links.stir(there.1)).unwrap();
        got.extend_from_slice(&buffer[..count]);
        there.0.is_at_end()
    });
    assert!(got == all);
    // No program is left to read an answer.
    there.0.write(b"too late", || {}).unwrap();
    right.links.stir(there.1);
    until(&mut left, &mut right, |_, _| there.0.is_reset());
    assert_eq!(right.ended, [(there.1, Ended::Reset)]);
    assert_eq!(left.ended, [(here.1, Ended::Reset)]);
}

#[test]
fn one_who_does_not_read_stops_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let all: Vec<_> = (0..101).map(|_| joined(&mut left, &mut right)).collect();
    assert_eq!(left.links.reports().len(), 1, "few connections");
    assert_eq!(left.links.reports()[0].streams, 101);
    let (blocked, others) = all.split_first().unwrap();
    // Write until the stream is full; nobody reads.
    let mut stuck = 0;
    let mut quiet = 0;
    until(&mut left, &mut right, |left, _| {
        let more = bytes(1, stuck, 10_000);
        let count = blocked.0.0.write(&more, || left.links.stir(blocked.0.1)).unwrap();
        stuck += count as u64;
        quiet = if count == 0 { quiet + 1 } else { 0 };
        quiet > 1000
    });
    let window = u64::from(left.links.settings().window);
    assert!(stuck >= window && stuck < 8 << 20, "{stuck} bytes under way");

    let (total, size) = (200_000u64, 5000);
    let mut sent = vec![0; others.len()];
    let mut got = vec![0; others.len()];
    let mut buffer = vec![0; size];
    until(&mut left, &mut right, |left, right| {
        for (number, (here, there)) in others.iter().enumerate() {
            let count = size.min((total - sent[number]) as usize);
            let message = bytes(number as u64, sent[number], count);
            let count = here.0.write(&message, || left.links.stir(here.1)).unwrap();
            sent[number] += count as u64;
            let count = there.0.read(&mut buffer, || right.links.stir(there.1)).unwrap();
            assert_eq!(buffer[..count], bytes(number as u64, got[number], count));
            got[number] += count as u64;
        }
        got.iter().all(|got| *got == total)
    });
    // The blocked stream goes on where it was.
    let mut got = 0;
    until(&mut left, &mut right, |_, right| {
        let count = blocked.1.0.read(&mut buffer, || right.links.stir(blocked.1.1)).unwrap();
        assert_eq!(buffer[..count], bytes(1, got, count));
        got += count as u64;
        got == stuck
    });
}

/// The programs signal only when they were asked to; the engines sleep in between.
#[test]
fn sleepers_are_told() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (here, there) = joined(&mut left, &mut right);
    let mut buffer = vec![0; 100_000];
    for round in 0..50 {
        sleep(&mut left, &mut right, round % 3 == 0);
        let (message, mut told) = (bytes(3, 0, 1 + round * 2000), false);
        let mut written = here.0.write(&message, || told = true).unwrap();
        assert!(told, "round {round}: the engine rests, and nobody tells it");
        left.links.stir(here.1);
        let mut got = 0;
        until(&mut left, &mut right, |left, right| {
            written += here.0.write(&message[written..], || left.links.stir(here.1)).unwrap();
            got += there.0.read(&mut buffer[got..], || right.links.stir(there.1)).unwrap();
            got == message.len()
        });
        assert!(buffer[..got] == message);
    }
    // The other program was asked for a signal before all that, and has had no reason for one
    // since.
    sleep(&mut left, &mut right, false);
    let mut told = false;
    there.0.write(b"answer", || told = true).unwrap();
    assert!(told);
}

/// Runs both engines until they sleep, `briefly` or not.
fn sleep(left: &mut Engine, right: &mut Engine, briefly: bool) {
    until(left, right, |left, right| {
        let now = Instant::now();
        if briefly {
            left.links.doze(now) && right.links.doze(now)
        } else {
            left.links.rest(now) && right.links.rest(now)
        }
    });
}

/// A program that reads after a long time signals, and is not asked again and again before.
#[test]
fn readers_tell_of_room() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (here, there) = joined(&mut left, &mut right);
    let all = bytes(5, 0, 3 << 20);
    let (mut sent, mut got, mut tells) = (0, 0, 0);
    let mut buffer = [0; 9000];
    let end = Instant::now() + std::time::Duration::from_secs(60);
    while got < all.len() {
        assert!(Instant::now() < end, "nobody told the engine of room, after {got} bytes");
        sent += here.0.write(&all[sent..], || left.links.stir(here.1)).unwrap();
        left.links.stir(here.1);
        // Move what the sockets have.
        let now = Instant::now();
        let _ = left.turn(now) | right.turn(now);
        sleep(&mut left, &mut right, false);
        let mut told = false;
        let count = there.0.read(&mut buffer, || told = true).unwrap();
        assert!(buffer[..count] == all[got..got + count]);
        got += count;
        if told {
            tells += 1;
            right.links.stir(there.1);
        }
    }
    assert!(tells < 100, "{tells}");
}

#[test]
fn keys_are_replaced_under_way() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let mut settings = right(dir.path(), "127.0.0.1:1");
    settings.rekey = 1 << 16;
    let mut right = Engine::new(settings);
    let mut settings = common::left(dir.path(), &right.at());
    (settings.rekey, settings.record) = (1 << 16, 4096);
    settings.cipher = slipway_link::Cipher::Aes256Gcm;
    let mut left = Engine::new(settings);
    let (here, there) = joined(&mut left, &mut right);
    carry((&mut left, &mut right), (&here, &there), 3 << 20, 100_000);
    carry((&mut right, &mut left), (&there, &here), 3 << 20, 100_000);
    for engine in [&left, &right] {
        assert!(engine.links.reports()[0].generation > 20);
    }
}

#[test]
fn empty_fifos_give_their_memory_back() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (here, there) = joined(&mut left, &mut right);
    // A FIFO may be empty for a moment while it is used, and its idle time counts from there.
    let begin = Instant::now();
    carry((&mut left, &mut right), (&here, &there), 1 << 20, 100_000);
    let blocks = || rustix::fs::fstat(there.0.arena.file().unwrap()).unwrap().st_blocks;
    let full = blocks();
    assert!(full * 512 > 64 << 10, "it did hold something");
    until(&mut left, &mut right, |_, _| blocks() * 512 < 64 << 10);
    assert!(begin.elapsed().as_millis() > 500, "not while it is in use");
    carry((&mut left, &mut right), (&here, &there), 1 << 20, 100_000);
}

/// Two tenants that send as much as they can, one of them with three times the weight.
#[test]
fn tenants_have_a_connection_each_and_none_starves() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    left.links.set_weight("blue", 3.0);
    let pairs = ["blue", "red"].map(|tenant| joined_for(&mut left, &mut right, tenant));
    let mut got = [0u64; 2];
    let message = vec![1; 200_000];
    let mut buffer = vec![0; 1 << 20];
    until(&mut left, &mut right, |left, right| {
        for ((here, there), got) in pairs.iter().zip(&mut got) {
            for _ in 0..4 {
                here.0.write(&message, || left.links.stir(here.1)).unwrap();
                let count = there.0.read(&mut buffer, || right.links.stir(there.1)).unwrap();
                *got += count as u64;
            }
        }
        got[0] > 30 << 20
    });
    assert_eq!(left.links.reports().len(), 2, "a connection for each tenant");
    assert!(got[1] > 1 << 20, "{got:?}: one is starved");
}

#[test]
fn a_rate_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    left.links.set_rate("blue", 10_000_000);
    let (here, there) = joined(&mut left, &mut right);
    let begin = Instant::now();
    carry((&mut left, &mut right), (&here, &there), 4_000_000, 100_000);
    let time = begin.elapsed();
    // The burst is a tenth of a second's bytes, and one turn comes on top of it.
    assert!(time.as_millis() > 200, "{time:?}");
}
