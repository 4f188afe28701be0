//! Pages that a process whose memory begins as a template gives back. Needs /dev/userfaultfd;
//! without it the tests end at once and say so.

#![allow(clippy::unwrap_used, unsafe_code)] // a test; it maps memory as a VMM does

#[path = "common/node.rs"]
#[allow(dead_code)] // shared with other tests
mod node;
#[path = "common/own.rs"]
mod own;

use std::os::fd::AsFd;

use node::{BYTES, Node};
use own::Own;
use rustix::fs::MemfdFlags;
use slipway_peer::Bin;
use slipway_pool::{Pool, Server, Template, TemplateName};
use slipway_pool_wire::{Page, Request};
use slipway_ram::{DmaMap, Permissions};

const PAGE: usize = Template::GRANULE;
/// The bytes that a VMM gives back at a time.
const PIECE: usize = 2 << 20;
const LEN: usize = BYTES as usize;

/// Returns byte `at` of the template, every fifth page of which is a hole.
fn byte(at: usize) -> u8 {
    let page = at / PAGE;
    if page % 5 == 4 { 0 } else { (page * 7 + at % PAGE * 3) as u8 | 1 }
}

/// Makes a pool with the template, and what serves its socket.
fn pool(node: &Node) -> (Pool, Server) {
    let saved = rustix::fs::memfd_create("saved", MemfdFlags::CLOEXEC).unwrap();
    let bytes: Vec<u8> = (0..LEN).map(byte).collect();
    assert_eq!(rustix::io::pwrite(&saved, &bytes, 0).unwrap(), LEN);
    let pool = node.pool(false, true);
    let template = pool.freeze(saved.as_fd()).unwrap();
    pool.add_template(TemplateName::new("web").unwrap(), template).unwrap();
    let server = pool.listen(&node.socket()).unwrap();
    (pool, server)
}

fn fork(node: &Node) -> Own {
    let template = TemplateName::new("web");
    Own::take(node, Request { bytes: BYTES, page: Page::Base, near: None, template })
}

/// Returns a device's view of a fork's memory.
fn device(node: &Node, fork: &Own) -> DmaMap {
    let (mut map, file) = (DmaMap::new(), (fork.lease.file.as_fd(), node.files.added()));
    let region = node.files.region(file, 0, BYTES, Permissions::READ_WRITE, &Bin::new()).unwrap();
    map.add(0, region).unwrap();
    map
}

/// Returns the bytes that a device finds, which the guest finds, too.
fn found(map: &DmaMap, fork: &Own) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    map.memory().read(0, &mut bytes).unwrap();
    for (at, byte) in bytes.iter().enumerate() {
        assert_eq!(fork.load(at), *byte, "{at:#x}");
    }
    bytes
}

#[test]
fn copies_go_back_and_what_is_still_the_templates_costs_nothing() {
    let Some(node) = Node::new() else { return };
    let (pool, _server) = pool(&node);
    let fork = fork(&node);
    let map = device(&node, &fork);
    for page in PIECE / PAGE..2 * PIECE / PAGE {
        fork.store(page * PAGE + 9, 7);
    }
    let alone = 2 * PIECE / PAGE + 1;
    map.memory().write((alone * PAGE) as u64, &[7]).unwrap();
    let pages = (PIECE / PAGE + 1) as u64;
    assert_eq!(pool.stats().fork_bytes, pages * PAGE as u64);
    for piece in 0..3 {
        fork.give_back(piece * PIECE, PIECE);
    }
    assert_eq!(pool.stats().fork_bytes, 0, "piece 0 had nothing to give back, and copied nothing");
    let was_copied = |at| at / PIECE == 1 || at / PAGE == alone;
    let bytes = found(&map, &fork);
    for (at, found) in bytes.iter().enumerate() {
        assert_eq!(*found, if was_copied(at) { 0 } else { byte(at) }, "{at:#x}");
    }
    // Both use the memory again.
    map.memory().write(PIECE as u64 + 5, &[3]).unwrap();
    fork.store(PIECE + 6, 4);
    assert_eq!(found(&map, &fork)[PIECE + 4..PIECE + 8], [0, 3, 4, 0]);
}

#[test]
fn what_a_fork_gives_back_no_other_misses() {
    let Some(node) = Node::new() else { return };
    let (_pool, _server) = pool(&node);
    let (first, second) = (fork(&node), fork(&node));
    let map = device(&node, &second);
    for page in 0..LEN / PAGE {
        first.store(page * PAGE, 7);
        second.store(page * PAGE + 1, 8);
    }
    for piece in 0..LEN / PIECE {
        first.give_back(piece * PIECE, PIECE);
    }
    for (at, found) in found(&map, &second).iter().enumerate() {
        assert_eq!(*found, if at % PAGE == 1 { 8 } else { byte(at) }, "{at:#x}");
    }
    let third = fork(&node);
    assert!((0..LEN).all(|at| third.load(at) == byte(at)), "the template is as it was");
}

/// Memory is given back while its pages are copied, by faults of the guest and writes of a device.
#[test]
fn a_guest_a_device_and_a_report_race_for_every_page() {
    let Some(node) = Node::new() else { return };
    let (_pool, _server) = pool(&node);
    let fork = fork(&node);
    let map = device(&node, &fork);
    let gate = std::sync::Barrier::new(3);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let memory = map.memory();
            gate.wait();
            for page in (0..LEN / PAGE).rev() {
                memory.write((page * PAGE + 100) as u64, &[201]).unwrap();
            }
        });
        scope.spawn(|| {
            gate.wait();
            for piece in (0..LEN / PIECE).cycle().take(40) {
                fork.give_back(piece * PIECE, PIECE);
            }
        });
        gate.wait();
        for page in 0..LEN / PAGE {
            fork.store(page * PAGE + 300, 203);
            let at = page * PAGE + 301;
            assert!([0, byte(at)].contains(&fork.load(at)), "{at:#x}");
        }
    });
    for (at, found) in found(&map, &fork).iter().enumerate() {
        let written = match at % PAGE {
            100 => 201,
            300 => 203,
            _ => 0,
        };
        assert!([0, written, byte(at)].contains(found), "{at:#x}: {found}");
    }
}
