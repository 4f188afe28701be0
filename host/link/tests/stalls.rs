//! A program whose memory makes the engine's thread sleep.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::*;
use rustix::fs::{FallocateFlags, fallocate};
use slipway_peer::testing::slow;
use slipway_ring::cross::Arena;

/// Takes all pages of an arena away, as a program that has the arena can.
fn take_away(arena: &Arena) {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(arena.file().unwrap(), mode, 0, arena.shape().bytes() as u64).unwrap();
}

#[test]
fn a_tenant_whose_memory_made_the_thread_sleep_stands_still_and_others_do_not() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    let (blue, _there) = joined_for(&mut left, &mut right, "blue");
    left.memory = Memory::new(16);
    let (red, there) = joined_for(&mut left, &mut right, "red");
    let Ok(sleeps) = slow(blue.0.arena.words(), Duration::from_millis(40)) else {
        eprintln!("skipped: it needs userfaultfd(2)");
        return;
    };
    let sleeps = || sleeps.load(Ordering::Relaxed);
    let turn = |left: &mut Engine, now| {
        left.links.stir(blue.1);
        left.turn(now);
    };
    // The first sleep is nobody's.
    take_away(&blue.0.arena);
    turn(&mut left, Instant::now());
    assert!(sleeps() > 0);
    take_away(&blue.0.arena);
    let now = Instant::now();
    turn(&mut left, now);
    // The time stands still.
    take_away(&blue.0.arena);
    let before = sleeps();
    assert_eq!(red.0.write(&[7; 1000], || left.links.stir(red.1)), Ok(1000));
    let (begun, mut got) = (Instant::now(), 0);
    while got < 1000 {
        assert!(begun.elapsed() < Duration::from_secs(60), "red stands still, too");
        turn(&mut left, now);
        // Nor does the engine look at the memory of blue before it sleeps.
        left.links.doze(now);
        right.turn(Instant::now());
        got += there.0.read(&mut [0; 1000], || right.links.stir(there.1)).unwrap();
    }
    assert_eq!(sleeps(), before, "blue is served");
    until(&mut left, &mut right, |left, _| {
        left.links.stir(blue.1);
        sleeps() > before
    });
}

/// The engine releases memory of a FIFO that is idle, for which it looks whether it is empty.
#[test]
fn a_tenant_pays_for_sleeps_in_the_release_of_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let (mut left, mut right) = two(dir.path());
    left.memory = Memory::new(1);
    let (blue, there) = joined_for(&mut left, &mut right, "blue");
    let Ok(sleeps) = slow(blue.0.arena.words(), Duration::from_millis(200)) else {
        eprintln!("skipped: it needs userfaultfd(2)");
        return;
    };
    let sleeps = || sleeps.load(Ordering::Relaxed);
    // The first sleep is nobody's.
    take_away(&blue.0.arena);
    left.links.stir(blue.1);
    left.turn(Instant::now());
    assert!(sleeps() > 0);
    // All pages are there again, and the FIFO gets more than one.
    let (file, bytes) = (blue.0.arena.file().unwrap(), blue.0.arena.shape().bytes() as u64);
    fallocate(file, FallocateFlags::empty(), 0, bytes).unwrap();
    let (data, mut into) = (vec![7; 64 << 10], vec![0; 64 << 10]);
    let (mut written, mut got) = (0, 0);
    until(&mut left, &mut right, |left, right| {
        written += there.0.write(&data[written..], || right.links.stir(there.1)).unwrap();
        got += blue.0.read(&mut into, || left.links.stir(blue.1)).unwrap();
        got == data.len()
    });
    // The engine looks at the stream no more, and its memory is to be released in a second. The
    // time stands still.
    let now = Instant::now();
    for _ in 0..1000 {
        left.turn(now);
    }
    take_away(&blue.0.arena);
    let (before, later) = (sleeps(), now + Duration::from_millis(1500));
    left.turn(later);
    assert!(sleeps() > before, "nothing is released");
    take_away(&blue.0.arena);
    let before = sleeps();
    left.links.stir(blue.1);
    left.turn(later);
    assert_eq!(sleeps(), before, "blue is served");
}
