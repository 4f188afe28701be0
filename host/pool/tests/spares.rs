//! Memory that is ready for forks before they begin. Needs /dev/userfaultfd; without it the tests
//! end at once and say so.

#![allow(clippy::unwrap_used, unsafe_code)] // a test; it maps memory as a VMM does

#[path = "common/node.rs"]
#[allow(dead_code)] // shared with other tests
mod node;
#[path = "common/own.rs"]
mod own;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use node::{BYTES, Node, PATIENCE, be_predecessor, left_at};
use own::Own;
use rustix::fs::MemfdFlags;
use slipway_pool::{Pool, Stats, Template, TemplateName};
use slipway_pool_wire::{Lease, Page, Request};

const PAGE: usize = Template::GRANULE;
/// The pages that forks need.
const AHEAD: [std::ops::Range<u64>; 2] = [3..5, 1000..1001];

/// Returns byte `at` of the template, all of whose pages are there.
fn byte(at: usize) -> u8 {
    (at / PAGE * 7 + at % PAGE * 3) as u8 | 1
}

fn saved() -> OwnedFd {
    let file = rustix::fs::memfd_create("saved", MemfdFlags::CLOEXEC).unwrap();
    let bytes: Vec<u8> = (0..BYTES as usize).map(byte).collect();
    let mut at = 0;
    while at < bytes.len() {
        at += rustix::io::pwrite(&file, &bytes[at..], at as u64).unwrap();
    }
    file
}

fn name() -> TemplateName {
    TemplateName::new("web").unwrap()
}

fn request() -> Request {
    Request { bytes: BYTES, page: Page::Base, near: None, template: Some(name()) }
}

/// Returns the bytes that forks need.
fn ahead() -> Vec<std::ops::Range<u64>> {
    let page = PAGE as u64;
    AHEAD.iter().map(|range| range.start * page..range.end * page).collect()
}

/// Adds the template, of which so many memories are to be ready.
fn add(pool: &Pool, count: usize) {
    pool.add_template(name(), Template::copy_of(saved().as_fd()).unwrap()).unwrap();
    assert!(pool.copy_ahead(name(), &ahead()) && pool.keep_ready(name(), count));
}

/// Asks for memory of a fork, and gives it up at once.
fn ask(socket: &Path) {
    drop(Lease::ask(socket, request()).unwrap());
}

/// Waits until the figures of a pool are so.
fn until(pool: &Pool, are_so: impl Fn(&Stats) -> bool) -> Stats {
    let mut waited = Duration::ZERO;
    loop {
        let stats = pool.stats();
        if are_so(&stats) {
            return stats;
        }
        assert!(waited < PATIENCE, "{stats:?}");
        std::thread::sleep(Duration::from_millis(5));
        waited += Duration::from_millis(5);
    }
}

/// Returns the device and inode number of the file of a fork's memory.
fn identity(own: &Own) -> (u64, u64) {
    let status = rustix::fs::fstat(&own.lease.file).unwrap();
    (status.st_dev, status.st_ino)
}

#[test]
fn a_fork_is_given_memory_that_has_what_forks_need() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, true);
    add(&pool, 1);
    let _server = pool.listen(&node.socket()).unwrap();
    assert_eq!(pool.stats().spare_forks, 0, "the template is not in use");
    ask(&node.socket());
    let stats = until(&pool, |stats| stats.spare_forks == 1);
    assert_eq!((stats.spare_fork_bytes, stats.copied_ahead), (3 * PAGE as u64, 3));
    assert_eq!((stats.spare_forks_given, stats.lent, stats.forks), (0, 0, 0));
    let one = Own::take(&node, request());
    assert_eq!(pool.stats().spare_forks_given, 1);
    assert_eq!(pool.copied(identity(&one)).unwrap(), ahead());
    // The next one is made while this one begins; what was copied for it is not copied again.
    let stats = until(&pool, |stats| stats.spare_forks == 1 && stats.copied_ahead == 6);
    assert_eq!((stats.forks, stats.fork_bytes), (1, 3 * PAGE as u64));
    one.store(3 * PAGE, 0);
    let two = Own::take(&node, request());
    for at in (0..BYTES as usize).filter(|at| *at != 3 * PAGE) {
        assert_eq!((one.load(at), two.load(at)), (byte(at), byte(at)), "{at}");
    }
    assert_eq!((one.load(3 * PAGE), two.load(3 * PAGE)), (0, byte(3 * PAGE)));
    assert_eq!(pool.stats().spare_forks_given, 2);
}

/// Without a keeper all of a fork's memory is copied before it is given.
#[test]
fn without_a_keeper_the_rest_is_copied_when_it_is_given() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, false);
    add(&pool, 1);
    let _server = pool.listen(&node.socket()).unwrap();
    ask(&node.socket());
    until(&pool, |stats| stats.spare_forks == 1);
    let own = Own::take(&node, request());
    assert_eq!(pool.stats().spare_forks_given, 1);
    assert!((0..BYTES as usize).all(|at| own.load(at) == byte(at)));
}

#[test]
fn what_is_ready_is_bounded_and_goes_with_its_template() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, true);
    add(&pool, 3);
    let _server = pool.listen(&node.socket()).unwrap();
    ask(&node.socket());
    until(&pool, |stats| stats.spare_forks == 3);
    assert!(pool.keep_ready(name(), 1));
    assert_eq!(pool.stats().spare_forks, 1);
    assert!(pool.remove_template(name()) && !pool.keep_ready(name(), 1));
    let stats = pool.stats();
    assert_eq!((stats.spare_forks, stats.spare_fork_bytes), (0, 0));
    // Of a template whose forks need all of it, the pool has room for one.
    pool.add_template(name(), Template::copy_of(saved().as_fd()).unwrap()).unwrap();
    assert!(pool.copy_ahead(name(), std::slice::from_ref(&(0..BYTES))));
    assert!(pool.keep_ready(name(), 2));
    ask(&node.socket());
    until(&pool, |stats| stats.spare_forks == 1);
    std::thread::sleep(Duration::from_millis(50));
    let stats = pool.stats();
    assert_eq!((stats.spare_forks, stats.spare_fork_bytes), (1, BYTES));
}

#[test]
fn what_is_learnt_later_is_copied_when_the_memory_is_given() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, true);
    add(&pool, 1);
    let _server = pool.listen(&node.socket()).unwrap();
    ask(&node.socket());
    until(&pool, |stats| stats.spare_forks == 1);
    let mut more = ahead();
    more.push(7 * PAGE as u64..8 * PAGE as u64);
    assert!(pool.copy_ahead(name(), &more));
    let own = Own::take(&node, request());
    assert_eq!(pool.stats().spare_forks_given, 1);
    // A page of it, and four of the memory that is ready for the next fork.
    until(&pool, |stats| stats.copied_ahead == 3 + 1 + 4);
    assert_eq!((own.load(7 * PAGE), own.load(8 * PAGE)), (byte(7 * PAGE), byte(8 * PAGE)));
}

#[test]
fn a_successor_finds_forks_that_run_and_nothing_of_what_was_ready() {
    let Some(node) = Node::new() else { return };
    let mut predecessor = node.predecessor();
    // What was ready, or would have been: its pages are those that forks need.
    let own = Own::take(&node, request());
    predecessor.kill().unwrap();
    predecessor.wait().unwrap();
    let pool = node.pool(false, true);
    let stats = pool.stats();
    assert_eq!((stats.forks, stats.lent, stats.spare_forks), (1, 1, 0));
    assert_eq!(pool.copied(identity(&own)).unwrap(), ahead());
    own.store(3 * PAGE, 0);
    assert!((0..BYTES as usize).all(|at| own.load(at) == byte(at) || at == 3 * PAGE));
    assert_eq!(own.load(3 * PAGE), 0);
}

#[test]
fn a_successor_finds_nothing_of_memory_that_was_never_given() {
    let Some(node) = Node::new() else { return };
    let mut predecessor = node.predecessor();
    // A keeper without clients that holds nothing ends.
    let keeper = node.connect();
    predecessor.kill().unwrap();
    predecessor.wait().unwrap();
    assert!(left_at(&keeper).is_empty());
}

/// The predecessor itself: has memory ready, and gives memory until it is killed.
#[test]
fn predecessor() {
    be_predecessor(|pool, socket| {
        add(pool, 1);
        ask(socket);
        until(pool, |stats| stats.spare_forks == 1);
    });
}
