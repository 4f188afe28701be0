//! Where the pages of a pool's memory are on a host with several NUMA nodes.
//!
//! All that touches a page first runs on another node than the one that the memory should be on:
//! the pool's threads, devices, and the process that plays a launcher and its VMM (this program
//! again, as the test `user`). On a host with one node the tests are skipped. `lab/numa` runs them
//! on an emulated server with two.
#![allow(clippy::unwrap_used, unsafe_code)] // a test; it maps memory as a VMM does

#[path = "common/huge_pages.rs"]
mod huge_pages;
#[path = "common/node.rs"]
mod node;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use huge_pages::HugePages;
use node::{BYTES, Node, PATIENCE, all_back, be_predecessor};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::sched_setaffinity;
use slipway_numa::{NumaNode, Topology};
use slipway_peer::Bin;
use slipway_pool::Pool;
use slipway_pool_wire::{HandOver, Lease, Page, Range, Request};
use slipway_ram::{Access, DmaMap, Permissions};

/// The size of a base page in bytes.
const PAGE: usize = 4096;

/// The number of base pages on each node.
type Places = BTreeMap<i32, usize>;

/// Returns on which node each base page of the mapped range is. The negative number of an error
/// stands for a page that is not there.
fn places(base: *mut u8, len: usize) -> Places {
    let pages: Vec<*mut u8> = (0..len).step_by(PAGE).map(|at| base.wrapping_add(at)).collect();
    let mut status = vec![i32::MIN; pages.len()];
    let nodes = std::ptr::null::<i32>();
    let (count, from, to) = (pages.len(), pages.as_ptr(), status.as_mut_ptr());
    // SAFETY: without nodes to move to, the kernel reads the addresses and writes as many numbers.
    let asked = unsafe { libc::syscall(libc::SYS_move_pages, 0, count, from, nodes, to, 0) };
    assert_eq!(asked, 0, "{}", std::io::Error::last_os_error());
    status.into_iter().fold(Places::new(), |mut places, node| {
        *places.entry(node).or_default() += 1;
        places
    })
}

/// Returns the answer of [`places`] for memory that is all on `node`.
fn all_on(node: NumaNode) -> Places {
    Places::from([(i32::from(node.number()), BYTES as usize / PAGE)])
}

/// Returns the nodes of the host, or `None` after a message if it has one only, and in a process
/// that a test has started.
fn several(test: &str) -> Option<(Topology, Vec<NumaNode>)> {
    let topology = Topology::of_host();
    let nodes: Vec<NumaNode> = topology.nodes().collect();
    if std::env::var_os("POOL").is_some() {
        return None;
    }
    if nodes.len() < 2 {
        eprintln!("SKIPPED: {test}: needs two NUMA nodes with memory and CPUs (lab/numa)");
        return None;
    }
    Some((topology, nodes))
}

/// Has the calling thread, and threads and processes that it starts, run away from `node`.
fn keep_away(topology: &Topology, node: NumaNode) {
    let other = topology.nodes().find(|other| *other != node).unwrap();
    sched_setaffinity(None, topology.cpus(other).unwrap()).unwrap();
}

/// A process that has memory of the pool and has touched all of it.
struct User {
    child: Child,
    home: NumaNode,
    inode: u64,
    places: Places,
}

impl User {
    /// Starts a process that takes memory of the pool at `path`.
    fn start(path: &Path, page: Page, near: Option<NumaNode>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["user", "--exact", "--nocapture"]).env("POOL", path);
        if page == Page::Huge {
            command.env("HUGE", "1");
        }
        if let Some(near) = near {
            command.env("NEAR", near.to_string());
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // The test harness prints lines of its own first.
        let answer = lines.find_map(|line| line.unwrap().strip_prefix("has ").map(str::to_owned));
        let numbers = answer.expect("the user ended");
        let numbers: Vec<i64> = numbers.split(' ').map(|word| word.parse().unwrap()).collect();
        let places = numbers[2..].as_chunks().0.iter();
        Self {
            child,
            home: NumaNode::new(numbers[0] as u64).unwrap(),
            inode: numbers[1] as u64,
            places: places.map(|&[node, count]| (node as i32, count as usize)).collect(),
        }
    }

    fn end(self) {
        drop(self);
    }
}

impl Drop for User {
    /// Kills the process. Left alone, it would end by itself and its test harness complain that
    /// nobody reads what it prints.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process itself: prints the memory's home, its file's inode number, and where its pages are.
#[test]
fn user() {
    let Some(path) = std::env::var_os("POOL") else { return };
    let page = if std::env::var_os("HUGE").is_some() { Page::Huge } else { Page::Base };
    let near = std::env::var("NEAR").ok().and_then(|near| NumaNode::new(near.parse().unwrap()));
    let lease =
        Lease::ask(Path::new(&path), Request { bytes: BYTES, page, near, template: None }).unwrap();
    let hand_over = HandOver::begin(lease.connection).unwrap();
    let (prot, len) = (ProtFlags::READ | ProtFlags::WRITE, BYTES as usize);
    let any = std::ptr::null_mut();
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe { rustix::mm::mmap(any, len, prot, MapFlags::SHARED, &lease.file, 0) };
    let base = base.unwrap().cast::<u8>();
    let range = Range { address: base.addr() as u64, len: BYTES, offset: 0 };
    let _kept = hand_over.finish(&[range]).unwrap();
    for at in (0..len).step_by(PAGE) {
        // SAFETY: within the mapping, which nobody else uses.
        unsafe { base.add(at).write_volatile(0xaa) };
    }
    let inode = rustix::fs::fstat(&lease.file).unwrap().st_ino;
    let places = places(base, len);
    let places: String = places.iter().map(|(node, pages)| format!(" {node} {pages}")).collect();
    println!("\nhas {} {inode}{places}", lease.home.unwrap());
    // Until the test ends this process.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Takes memory of `wanted`, new and recycled, while all threads run on another node.
fn memory_is_on(wanted: NumaNode, page: Page, ahead: bool, topology: &Topology) {
    let Some(node) = Node::new() else { return };
    keep_away(topology, wanted);
    let pool = node.pool_of(4 * BYTES, ahead, true);
    let _server = pool.listen(&node.socket()).unwrap();
    let case = format!("node {wanted}, {page:?} pages, ahead: {ahead}");
    let start = |turn| {
        let user = User::start(&node.socket(), page, Some(wanted));
        assert_eq!((user.home, &user.places), (wanted, &all_on(wanted)), "{case}: {turn}");
        user
    };
    let first = start("new");
    // The second user has the spare, whose pages a thread of the pool made.
    let is_made = |pool: &Pool| pool.stats().free_bytes > 0 && pool.stats().granules.absent == 0;
    wait_until(&pool, |pool| !ahead || is_made(pool));
    let second = start("spare");
    let inodes = [first.inode, second.inode];
    first.end();
    second.end();
    all_back(&pool);
    let third = start("recycled");
    assert!(ahead || inodes.contains(&third.inode), "{case}: nothing was recycled");
    third.end();
    all_back(&pool);
    let other = topology.nodes().find(|other| *other != wanted).unwrap();
    let user = User::start(&node.socket(), page, Some(other));
    assert_eq!((user.home, &user.places), (other, &all_on(other)), "{case}: the other node");
    assert!(!inodes.contains(&user.inode), "{case}: recycled memory was on the wrong node");
    user.end();
    println!("passed: {case}");
}

fn wait_until(pool: &Pool, is_so: impl Fn(&Pool) -> bool) {
    let mut waited = Duration::ZERO;
    while !is_so(pool) {
        assert!(waited < PATIENCE, "{:?}", pool.stats());
        std::thread::sleep(Duration::from_millis(5));
        waited += Duration::from_millis(5);
    }
}

#[test]
fn memory_is_on_the_node_that_was_asked_for() {
    let name = "memory_is_on_the_node_that_was_asked_for";
    let Some((topology, nodes)) = several(name) else { return };
    for node in nodes {
        for ahead in [false, true] {
            memory_is_on(node, Page::Base, ahead, &topology);
        }
    }
}

#[test]
#[ignore = "raises limits of huge pages of the host: make soak"]
fn huge_pages_are_on_the_node_that_was_asked_for() {
    let name = "huge_pages_are_on_the_node_that_was_asked_for";
    let Some((topology, nodes)) = several(name) else { return };
    with_huge_pages(&nodes, || {
        for node in &nodes {
            for ahead in [false, true] {
                memory_is_on(*node, Page::Huge, ahead, &topology);
            }
        }
    });
}

/// Does `work` twice: with huge pages that are set aside on each node, of which the right ones have
/// to be chosen, and with some that the kernel makes when they are reserved.
fn with_huge_pages(nodes: &[NumaNode], work: impl Fn()) {
    const ON_EACH: u32 = 32;
    let Some(aside) = HugePages::set_aside(ON_EACH * nodes.len() as u32) else { return };
    for node in nodes {
        let file = "hugepages/hugepages-2048kB/free_hugepages";
        let path = format!("/sys/devices/system/node/node{node}/{file}");
        let free: u32 = std::fs::read_to_string(path).unwrap().trim().parse().unwrap();
        assert!(free >= ON_EACH, "the host has {free} huge pages on node {node}");
    }
    println!("huge pages are set aside");
    work();
    drop(aside);
    let Some(_made) = HugePages::allow() else { return };
    println!("huge pages are made when they are reserved");
    work();
}

/// A device that meets pages first has the kernel make them where the memory's home is.
fn a_device_has_pages_made_on(wanted: NumaNode, page: Page, topology: &Topology) {
    let Some(node) = Node::new() else { return };
    keep_away(topology, wanted);
    let pool = node.pool(false, true);
    let _server = pool.listen(&node.socket()).unwrap();
    let request = Request { bytes: BYTES, page, near: Some(wanted), template: None };
    let lease = Lease::ask(&node.socket(), request).unwrap();
    let file = (lease.file.as_fd(), node.files.added());
    let region = node.files.region(file, 0, BYTES, Permissions::READ_WRITE, &Bin::new()).unwrap();
    let mut map = DmaMap::new();
    map.add(0, region).unwrap();
    map.memory().write(0, &vec![1; BYTES as usize]).unwrap();
    let mut spans = Vec::new();
    map.memory().pin(0, BYTES as usize, Access::Write, &mut spans).unwrap();
    let (base, len) = spans[0].io_vector();
    assert_eq!(places(base, len), all_on(wanted), "node {wanted}, {page:?} pages");
    println!("passed: a device, node {wanted}, {page:?} pages");
}

#[test]
fn a_device_touches_pages_of_the_node_that_was_asked_for() {
    let name = "a_device_touches_pages_of_the_node_that_was_asked_for";
    let Some((topology, nodes)) = several(name) else { return };
    nodes.iter().for_each(|node| a_device_has_pages_made_on(*node, Page::Base, &topology));
}

#[test]
#[ignore = "raises limits of huge pages of the host: make soak"]
fn a_device_touches_huge_pages_of_the_node_that_was_asked_for() {
    let name = "a_device_touches_huge_pages_of_the_node_that_was_asked_for";
    let Some((topology, nodes)) = several(name) else { return };
    with_huge_pages(&nodes, || {
        nodes.iter().for_each(|node| a_device_has_pages_made_on(*node, Page::Huge, &topology));
    });
}

#[test]
fn sandboxes_without_a_wish_are_spread_over_the_nodes() {
    let name = "sandboxes_without_a_wish_are_spread_over_the_nodes";
    let Some((_, nodes)) = several(name) else { return };
    for ahead in [false, true] {
        let Some(node) = Node::new() else { return };
        let pool = node.pool(ahead, true);
        let _server = pool.listen(&node.socket()).unwrap();
        let mut homes: Vec<NumaNode> = Vec::new();
        let users: Vec<User> = (0..2 * nodes.len())
            .map(|_| {
                let user = User::start(&node.socket(), Page::Base, None);
                // The next one is chosen when this one counts.
                wait_until(&pool, |pool| pool.stats().lent as usize > homes.len());
                homes.push(user.home);
                user
            })
            .collect();
        for user in users {
            assert_eq!(user.places, all_on(user.home), "ahead: {ahead}");
            user.end();
        }
        for round in homes.chunks(nodes.len()) {
            let mut round = round.to_vec();
            round.sort_unstable();
            assert_eq!(round, nodes, "{homes:?}, ahead: {ahead}");
        }
        println!("passed: spread over {homes:?}, ahead: {ahead}");
    }
}

#[test]
fn a_successor_knows_the_home_of_memory() {
    let Some((topology, nodes)) = several("a_successor_knows_the_home_of_memory") else { return };
    for wanted in nodes {
        let Some(node) = Node::new() else { return };
        keep_away(&topology, wanted);
        let mut predecessor = node.predecessor();
        let user = User::start(&node.socket(), Page::Base, Some(wanted));
        predecessor.kill().unwrap();
        predecessor.wait().unwrap();
        let pool = node.pool(false, true);
        let _server = pool.listen(&node.socket()).unwrap();
        let inode = user.inode;
        user.end();
        all_back(&pool);
        let next = User::start(&node.socket(), Page::Base, Some(wanted));
        assert_eq!((next.home, next.inode), (wanted, inode));
        next.end();
        println!("passed: a successor, node {wanted}");
    }
}

/// The predecessor itself: serves until it is killed.
#[test]
fn predecessor() {
    be_predecessor(|_, _| ());
}

/// Without a wish, or on a host with one node, nothing is asked of the kernel.
#[test]
fn memory_of_a_host_with_one_node_has_no_home() {
    if !Topology::of_host().is_empty() || std::env::var_os("POOL").is_some() {
        println!("SKIPPED: memory_of_a_host_with_one_node_has_no_home: there are several nodes");
        return;
    }
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, false);
    let _server = pool.listen(&node.socket()).unwrap();
    for near in [None, NumaNode::new(0), NumaNode::new(7)] {
        let request = Request { bytes: BYTES, page: Page::Base, near, template: None };
        assert_eq!(Lease::ask(&node.socket(), request).unwrap().home, None);
    }
}
