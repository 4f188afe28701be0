//! A pool and processes that have memory of it. Needs /dev/userfaultfd; without it the tests end at
//! once and say so.
//!
//! A process that plays a launcher and its VMM is this program again, as the test `user`.

#![allow(clippy::unwrap_used, unsafe_code)] // a test; it maps memory as a VMM does

#[path = "common/huge_pages.rs"]
mod huge_pages;
#[path = "common/node.rs"]
mod node;
#[path = "common/own.rs"]
mod own;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use huge_pages::HugePages;
use node::{BYTES, Node, all_back, be_predecessor};
use own::Own;
use rustix::mm::{MapFlags, ProtFlags};
use slipway_peer::Bin;
use slipway_pool::{Pool, SLOTS, Settings, Shelves};
use slipway_pool_spec::{SERVED, faults};
use slipway_pool_wire::{HandOver, Lease, Page, Range, Request, WireError, receive, send};
use slipway_ram::{DmaMap, GRANULE, Granules, LateFiles, Permissions, Region};

/// A process that has memory of the pool.
struct User {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl User {
    /// Starts a process that takes memory of the pool at `path`.
    fn start(path: &Path) -> Self {
        Self::start_with(path, Page::Base)
    }

    fn start_with(path: &Path, page: Page) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["user", "--exact", "--nocapture"]).env("POOL", path);
        if page == Page::Huge {
            command.env("HUGE", "1");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        // The test harness prints lines of its own first.
        let mut line = String::new();
        while !line.contains("ready") {
            line.clear();
            assert!(answers.read_line(&mut line).unwrap() > 0, "the user ended");
        }
        Self { child, answers }
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{what}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
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

/// The process itself: obeys words on standard input.
#[test]
fn user() {
    let Some(path) = std::env::var_os("POOL") else { return };
    let huge = std::env::var_os("HUGE").is_some();
    let page = if huge { Page::Huge } else { Page::Base };
    let lease =
        Lease::ask(Path::new(&path), Request { bytes: BYTES, page, near: None, template: None })
            .unwrap();
    let hand_over = HandOver::begin(lease.connection).unwrap();
    let (prot, len) = (ProtFlags::READ | ProtFlags::WRITE, BYTES as usize);
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &lease.file, 0)
    };
    let base = base.unwrap().cast::<u8>();
    // Two ranges, as of a machine with memory above its window; base pages, not at a boundary of
    // 2 MiB.
    let half = BYTES / 2 + if huge { 0 } else { 4096 };
    let range = |offset, len| Range { address: base.addr() as u64 + offset, len, offset };
    let ranges = [range(0, half), range(half, BYTES - half)];
    let (connection, token) = hand_over.finish(&ranges).unwrap();
    drop(lease.file);
    let mut connection = Some(connection);
    println!("ready");
    for line in std::io::stdin().lines() {
        // SAFETY: the mapping, which only this loop uses.
        let memory = unsafe { std::slice::from_raw_parts_mut(base, len) };
        match line.unwrap().as_str() {
            "stale" => println!("{}", memory.iter().filter(|byte| **byte != 0).count()),
            "fill" => {
                memory.fill(0xaa);
                println!("filled");
            }
            "last" => println!("{}", memory[len - 1]),
            "write" => {
                memory[5 << 20] = 0xaa;
                println!("written");
            }
            "hang up" => {
                connection.take();
                println!("hung up");
            }
            "token" => {
                let mut byte = [0];
                let read = rustix::io::pread(&token, &mut byte, 0).is_ok();
                // By another way than faults, bytes would reach granules that count as zeros.
                let written = rustix::io::pwrite(&token, &byte, 0).is_ok();
                let hole =
                    rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
                let punched = rustix::fs::fallocate(&token, hole, 0, 4096).is_ok();
                let (any, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
                // SAFETY: a fresh mapping, which is never used.
                let map = |prot| unsafe { rustix::mm::mmap(any, len, prot, flags, &token, 0) };
                let mapped = map(ProtFlags::READ).is_ok() || map(prot).is_ok();
                println!("{}", read || written || punched || mapped);
            }
            other => panic!("{other}"),
        }
    }
}

const BASE_PAGES: Request = Request { bytes: BYTES, page: Page::Base, near: None, template: None };

/// Returns all of the memory `file` as a device has it.
fn region(files: &LateFiles, file: &OwnedFd) -> Region {
    let file = (file.as_fd(), files.added());
    files.region(file, 0, BYTES, Permissions::READ_WRITE, &Bin::new()).unwrap()
}

#[test]
fn memory_of_a_process_that_ended_is_zeros_for_the_next() {
    for (ahead, kept) in [(false, true), (true, true), (false, false)] {
        let Some(node) = Node::new() else { return };
        let pool = node.pool(ahead, kept);
        let _server = pool.listen(&node.socket()).unwrap();
        for _ in 0..3 {
            let mut user = User::start(&node.socket());
            assert_eq!(user.ask("stale"), "0");
            assert_eq!(user.ask("fill"), "filled");
            assert_eq!(user.ask("last"), "170");
            assert_eq!(user.ask("token"), "false");
            user.end();
            all_back(&pool);
        }
        assert!(ahead || !kept || pool.stats().faults > 0);
    }
}

/// New memory has no pages, and the kernel makes them without a fault that the pool sees.
#[test]
fn a_device_reads_what_a_process_wrote_into_new_memory() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, true);
    let _server = pool.listen(&node.socket()).unwrap();
    let lease = Lease::ask(&node.socket(), BASE_PAGES).unwrap();
    rustix::io::pwrite(&lease.file, &[7; 4], 5 << 20).unwrap();
    let mut map = DmaMap::new();
    map.add(0, region(&node.files, &lease.file)).unwrap();
    let mut bytes = [1; 8];
    map.memory().read((5 << 20) - 4, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 0, 0, 0, 7, 7, 7, 7]);
}

/// The kernel makes pages that the last process never touched without a fault that the pool sees.
#[test]
fn a_write_beside_a_page_of_the_last_process_stays() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, true);
    let _server = pool.listen(&node.socket()).unwrap();
    let mut user = User::start(&node.socket());
    assert_eq!(user.ask("write"), "written");
    user.end();
    all_back(&pool);
    let own = Own::take(&node, BASE_PAGES);
    own.store((5 << 20) + 4096, 7);
    assert_eq!((own.load(5 << 20), own.load((5 << 20) + 4096)), (0, 7));
    let mut map = DmaMap::new();
    map.add(0, region(&node.files, &own.lease.file)).unwrap();
    let mut bytes = [1; 2];
    map.memory().read((5 << 20) + 4095, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 7]);
}

#[test]
fn a_part_of_free_memory_is_zeroed_when_asked_for() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, false);
    let _server = pool.listen(&node.socket()).unwrap();
    let all = BYTES as usize / GRANULE;
    for (percent, zeroed) in [(0, 0), (50, all / 2), (100, all), (1000, all)] {
        let mut user = User::start(&node.socket());
        assert_eq!((user.ask("stale"), user.ask("fill")), ("0".into(), "filled".into()));
        user.end();
        all_back(&pool);
        pool.zero_free(percent);
        let dirty = all - zeroed;
        let expected = Granules { untouched: zeroed, dirty, ..Granules::default() };
        assert_eq!(pool.stats().granules, expected);
    }
    assert_eq!(User::start(&node.socket()).ask("stale"), "0");
}

#[test]
#[ignore = "raises vm.nr_overcommit_hugepages of the host: make soak"]
fn huge_pages_of_a_process_that_ended_are_zeros_for_the_next() {
    let Some(_pages) = HugePages::allow() else { return };
    for ahead in [false, true] {
        let Some(node) = Node::new() else { return };
        let pool = node.pool(ahead, true);
        let _server = pool.listen(&node.socket()).unwrap();
        let request = Request { bytes: BYTES, page: Page::Huge, near: None, template: None };
        if let Err(error) = Lease::ask(&node.socket(), request) {
            assert!(error.to_string().contains("of huge pages (vm.nr_hugepages)"), "{error}");
            eprintln!("needs huge pages: {error}");
            return;
        }
        for _ in 0..3 {
            let mut user = User::start_with(&node.socket(), Page::Huge);
            assert_eq!(user.ask("stale"), "0");
            assert_eq!(user.ask("fill"), "filled");
            assert_eq!((user.ask("last"), user.ask("token")), ("170".into(), "false".into()));
            user.end();
            all_back(&pool);
        }
        let stats = pool.stats();
        assert_eq!(stats.huge_bytes, stats.free_bytes + stats.lent_bytes);
        assert!(ahead || stats.faults > 0);
    }
}

#[test]
fn a_device_meets_zeros_and_what_the_process_wrote() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, true);
    let _server = pool.listen(&node.socket()).unwrap();
    let mut user = User::start(&node.socket());
    user.ask("fill");
    user.end();
    all_back(&pool);
    let lease = Lease::ask(&node.socket(), BASE_PAGES).unwrap();
    // The file shows what the last process wrote, so a lease whose VMM never came is not reused.
    let mut byte = [0];
    rustix::io::pread(&lease.file, &mut byte, 0).unwrap();
    assert_eq!(byte, [0xaa]);
    let mut map = DmaMap::new();
    map.add(0, region(&node.files, &lease.file)).unwrap();
    let mut bytes = vec![1; BYTES as usize];
    map.memory().read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    drop(lease);
    drop(map);
    let mut user = User::start(&node.socket());
    assert_eq!(user.ask("stale"), "0");
    user.end();
    all_back(&pool);
    let stats = pool.stats();
    assert_eq!((stats.free_bytes, stats.huge_bytes), (BYTES, 0));
    let dirty = (BYTES as usize) / GRANULE;
    assert_eq!(stats.granules, Granules { dirty, ..Granules::default() });
}

#[test]
fn memory_is_zeros_when_it_is_given_if_zeroing_is_not_late() {
    for zero_first in [false, true] {
        let Some(node) = Node::new() else { return };
        let shelves = Some(Shelves::new(node.keeper().0, 0..SLOTS * 16));
        let settings = Settings { limit: BYTES, shelves, zero_first, ..Settings::default() };
        let pool = Pool::new(settings).unwrap();
        let _server = pool.listen(&node.socket()).unwrap();
        let mut user = User::start(&node.socket());
        user.ask("fill");
        user.end();
        all_back(&pool);
        // The file shows what is zeroed only when it is touched.
        let lease = Lease::ask(&node.socket(), BASE_PAGES).unwrap();
        let mut bytes = vec![1; BYTES as usize];
        rustix::io::pread(&lease.file, &mut bytes[..], 0).unwrap();
        let expected = if zero_first { 0 } else { 0xaa };
        assert!(bytes.iter().all(|byte| *byte == expected), "{zero_first}");
    }
}

/// The memory stays with a process that only ends its connection.
#[test]
fn memory_is_not_given_again_while_its_process_lives() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, true);
    let _server = pool.listen(&node.socket()).unwrap();
    let mut hostile = User::start(&node.socket());
    hostile.ask("fill");
    hostile.ask("hang up");
    let mut next = User::start(&node.socket());
    assert_eq!(next.ask("stale"), "0");
    assert_eq!(next.ask("write"), "written");
    assert_eq!(hostile.ask("last"), "170");
    assert_eq!(pool.stats().lent, 2);
    hostile.end();
    next.end();
    all_back(&pool);
}

#[test]
fn a_successor_serves_the_faults_of_those_that_were_given_memory() {
    let Some(node) = Node::new() else { return };
    // It is killed after the answer to one fault and before most others.
    let mut predecessor = node.predecessor();
    let mut user = User::start(&node.socket());
    assert_eq!(user.ask("write"), "written");
    predecessor.kill().unwrap();
    predecessor.wait().unwrap();
    let pool = node.pool(false, true);
    assert_eq!(pool.stats().lent, 1);
    assert_eq!((user.ask("stale"), user.ask("last")), ("1".into(), "0".into()));
    assert!(pool.stats().faults > 0);
    user.end();
    all_back(&pool);
}

/// The predecessor itself: recycles memory, and gives it until it is killed.
#[test]
fn predecessor() {
    be_predecessor(|pool, socket| {
        let mut user = User::start(socket);
        user.ask("fill");
        user.end();
        all_back(pool);
    });
}

#[test]
fn what_cannot_be_given_is_refused() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, false);
    let _server = pool.listen(&node.socket()).unwrap();
    for bytes in [0, 4096, 1 << 60] {
        let refused = Lease::ask(
            &node.socket(),
            Request { bytes, page: Page::Base, near: None, template: None },
        );
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("whole units of 64 KiB"), "{text}");
    }
    let odd = Lease::ask(
        &node.socket(),
        Request { bytes: 3 << 20, page: Page::Huge, near: None, template: None },
    );
    assert!(odd.unwrap_err().to_string().contains("whole units of 2048 KiB"));
    let many = Lease::ask(
        &node.socket(),
        Request { bytes: 128 << 30, page: Page::Huge, near: None, template: None },
    );
    let text = many.unwrap_err().to_string();
    assert!(text.contains("of huge pages (vm.nr_hugepages)"), "{text}");
    assert_eq!(pool.stats().lent, 0);
}

/// Makes a userfaultfd of this process with `device`, an open `/dev/userfaultfd`.
fn userfaultfd(device: &OwnedFd) -> OwnedFd {
    let flags = u64::from(libc::O_CLOEXEC.unsigned_abs());
    // SAFETY: USERFAULTFD_IOC_NEW takes flags, no address.
    let made = unsafe { libc::ioctl(device.as_raw_fd(), 0xaa00, flags) };
    assert!(made >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel has just made this descriptor for the caller.
    let made = unsafe { OwnedFd::from_raw_fd(made) };
    let mut api = [0xaa_u64, 0, 0];
    // SAFETY: UFFDIO_API reads and writes these three words.
    assert_eq!(unsafe { libc::ioctl(made.as_raw_fd(), 0xc018_aa3f, api.as_mut_ptr()) }, 0);
    made
}

#[test]
fn faults_that_could_not_tell_the_end_of_their_process_are_refused() {
    let Some(node) = Node::new() else { return };
    let pool = node.pool(false, false);
    let _server = pool.listen(&node.socket()).unwrap();
    let answer = |range: Range, is_userfaultfd: bool| {
        let connection = Lease::ask(&node.socket(), BASE_PAGES).unwrap().connection;
        let (_, [_token, device]) = receive(connection.as_fd(), &Bin::new()).unwrap();
        let device = device.into_owned();
        let file = if is_userfaultfd { userfaultfd(&device) } else { device };
        send(connection.as_fd(), &faults::encode(&[range]), &[file.as_fd()]).unwrap();
        receive::<0>(connection.as_fd(), &Bin::new()).map(|(message, _)| message)
    };
    let sound = Range { address: 1 << 40, len: 8192, offset: 4096 };
    for (range, is_userfaultfd) in [
        (sound, false),
        (Range { address: sound.address + 1, ..sound }, true),
        // An address that no process has.
        (Range { address: 1 << 63, ..sound }, true),
        (Range { len: 100, ..sound }, true),
        (Range { offset: 1, ..sound }, true),
        (Range { offset: BYTES - 4096, ..sound }, true),
    ] {
        let refused = answer(range, is_userfaultfd);
        assert!(matches!(refused, Err(WireError::Ended)), "{range:?}: {refused:?}");
        assert_eq!(pool.stats().lent, 0, "{range:?}");
    }
    assert_eq!(answer(sound, true).unwrap(), SERVED);
}
