//! Processes whose memory begins as a template. Needs /dev/userfaultfd; without it the tests end at
//! once and say so.
//!
//! A process that plays a launcher and its VMM is this program again, as the test `user`.

#![allow(clippy::unwrap_used, unsafe_code)] // a test; it maps memory as a VMM does

#[path = "common/node.rs"]
#[allow(dead_code)] // shared with other tests
mod node;
#[path = "common/own.rs"]
mod own;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use node::{BYTES, Node, PATIENCE, be_predecessor};
use own::Own;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use slipway_peer::Bin;
use slipway_pool::{Pool, Settings, Template, TemplateName};
use slipway_pool_wire::{Completion, HandOver, Lease, Page, Range, Request, WireError, complete};
use slipway_ram::{DmaMap, Permissions};

const PAGE: usize = Template::GRANULE;
const PAGES: usize = BYTES as usize / PAGE;
/// Pages that the template lacks, in one part.
const HOLE: std::ops::Range<usize> = 1000..1500;

/// Returns whether a page of the template is not there: a few of one page, and a large part.
fn is_hole(page: usize) -> bool {
    page % 5 == 4 || HOLE.contains(&page)
}

/// Returns byte `at` of the template.
fn byte(at: usize) -> u8 {
    let page = at / PAGE;
    if is_hole(page) { 0 } else { (page * 7 + at % PAGE * 3) as u8 | 1 }
}

fn saved() -> OwnedFd {
    let file = rustix::fs::memfd_create("saved", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, BYTES).unwrap();
    for page in (0..PAGES).filter(|page| !is_hole(*page)) {
        let bytes: Vec<u8> = (page * PAGE..(page + 1) * PAGE).map(byte).collect();
        rustix::io::pwrite(&file, &bytes, (page * PAGE) as u64).unwrap();
    }
    file
}

fn name() -> TemplateName {
    TemplateName::new("web").unwrap()
}

fn request(template: Option<TemplateName>) -> Request {
    Request { bytes: BYTES, page: Page::Base, near: None, template }
}

/// A process that has memory of the pool.
struct User {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl User {
    fn start(node: &Node) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["user", "--exact", "--nocapture"]).env("POOL", node.socket());
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

    fn say(&mut self, what: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{what}").unwrap();
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn ask(&mut self, what: &str) -> String {
        self.say(what);
        self.answer()
    }

    fn read(&mut self, at: usize) -> u8 {
        self.ask(&format!("read {at}")).parse().unwrap()
    }

    fn write(&mut self, at: usize, value: u8) {
        assert_eq!(self.ask(&format!("write {at} {value}")), "written");
    }

    /// Returns the number of bytes that are not the template's.
    fn others(&mut self) -> String {
        self.ask("others")
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
    let lease = Lease::ask(Path::new(&path), request(Some(name()))).unwrap();
    let hand_over = HandOver::begin(lease.connection).unwrap();
    let (prot, len, any) =
        (ProtFlags::READ | ProtFlags::WRITE, BYTES as usize, std::ptr::null_mut());
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe { rustix::mm::mmap(any, len, prot, MapFlags::SHARED, &lease.file, 0) };
    let base = base.unwrap().cast::<u8>();
    // Two ranges, as of a machine with memory above its window, which part at a page.
    let half = BYTES / 2 + PAGE as u64;
    let range = |offset, len| Range { address: base.addr() as u64 + offset, len, offset };
    let _kept = hand_over.finish(&[range(0, half), range(half, BYTES - half)]).unwrap();
    drop(lease.file);
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<usize>().unwrap();
        // SAFETY: within the mapping, which devices write as well: the accesses are volatile.
        let load = |at| unsafe { base.add(at).read_volatile() };
        match words[0] {
            "read" => println!("{}", load(number(1))),
            "write" => {
                // SAFETY: as above.
                unsafe { base.add(number(1)).write_volatile(number(2) as u8) };
                println!("written");
            }
            "others" => println!("{}", (0..len).filter(|at| load(*at) != byte(*at)).count()),
            "touch" => {
                let one = |page| load(page * PAGE) == byte(page * PAGE);
                println!("{}", (number(1)..number(2)).all(one));
            }
            "give" => {
                let page = base.wrapping_add(number(1) * PAGE).cast();
                // SAFETY: the page is the mapping's, and is zeros afterwards.
                unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxRemove) }.unwrap();
                println!("given");
            }
            other => panic!("{other}"),
        }
    }
}

/// A pool with the template, and what serves its socket.
fn pool(node: &Node, kept: bool) -> (Pool, slipway_pool::Server) {
    let pool = node.pool(false, kept);
    pool.add_template(name(), pool.freeze(saved().as_fd()).unwrap()).unwrap();
    let server = pool.listen(&node.socket()).unwrap();
    (pool, server)
}

/// Waits until no sandbox has memory of the pool.
fn none_lent(pool: &Pool) {
    let mut waited = Duration::ZERO;
    while pool.stats().lent > 0 {
        assert!(waited < PATIENCE, "{:?}", pool.stats());
        std::thread::sleep(Duration::from_millis(5));
        waited += Duration::from_millis(5);
    }
}

/// Returns a device's view of a sandbox's memory.
fn device(node: &Node, lease: &Lease) -> DmaMap {
    let (mut map, file) = (DmaMap::new(), (lease.file.as_fd(), node.files.added()));
    let region = node.files.region(file, 0, BYTES, Permissions::READ_WRITE, &Bin::new()).unwrap();
    map.add(0, region).unwrap();
    map
}

#[test]
fn forks_begin_with_the_template_and_do_not_see_each_other() {
    for kept in [true, false] {
        let Some(node) = Node::new() else { return };
        let (pool, _server) = pool(&node, kept);
        let (mut one, mut two) = (User::start(&node), User::start(&node));
        // Without a keeper all is copied first.
        let copied = if kept { 0 } else { 2 * pool.stats().templates[0].held };
        assert_eq!(pool.stats().fork_bytes, copied);
        assert_eq!(one.read(5 * PAGE + 9), byte(5 * PAGE + 9));
        one.write(5 * PAGE + 9, 0);
        one.write(HOLE.start * PAGE, 1);
        one.write(4 * PAGE, 1);
        assert_eq!((one.others(), two.others()), ("3".into(), "0".into()));
        let stats = pool.stats();
        assert_eq!((stats.forks, stats.lent, stats.templates[0].forks), (2, 2, 2));
        one.end();
        // The template outlives its name as long as a fork needs it.
        assert!(pool.remove_template(name()) && pool.stats().templates.is_empty());
        assert_eq!(two.others(), "0");
        two.end();
        none_lent(&pool);
        assert_eq!(pool.stats().free_bytes, 0);
    }
}

#[test]
fn only_pages_that_are_needed_are_copied() {
    let Some(node) = Node::new() else { return };
    let (pool, _server) = pool(&node, true);
    let mut user = User::start(&node);
    assert_eq!(pool.stats().fork_bytes, 0);
    for page in [0, 1, 7, HOLE.start - 2] {
        assert_eq!(user.read(page * PAGE + 5), byte(page * PAGE + 5));
    }
    assert_eq!(pool.stats().fork_bytes, 4 * PAGE as u64);
    // Holes, a small one and one that is the kernel's.
    assert_eq!((user.read(4 * PAGE), user.read(1200 * PAGE)), (0, 0));
    assert_eq!(pool.stats().fork_bytes, 6 * PAGE as u64);
    let template = pool.stats().templates[0];
    let data = (0..PAGES).filter(|page| !is_hole(*page)).count() * PAGE;
    assert_eq!((template.bytes, template.held, template.ahead), (BYTES, data as u64, 0));
}

#[test]
fn another_process_has_all_of_the_template_in_the_file_of_a_fork() {
    let Some(node) = Node::new() else { return };
    let (pool, _server) = pool(&node, true);
    let own = Own::take(&node, request(Some(name())));
    own.store(PAGE + 5, 7);
    let status = rustix::fs::fstat(&own.lease.file).unwrap();
    let completion = Completion { device: status.st_dev, inode: status.st_ino };
    let file = complete(&node.socket(), completion).unwrap();
    assert!(pool.stats().fork_bytes >= pool.stats().templates[0].held, "{:?}", pool.stats());
    // By the file, as a process that knows no pool.
    let mut bytes = vec![0; BYTES as usize];
    rustix::io::pread(&file, &mut bytes, 0).unwrap();
    for (at, found) in bytes.iter().enumerate() {
        assert_eq!(*found, if at == PAGE + 5 { 7 } else { byte(at) }, "{at}");
    }
    // The fork's faults go on, and it sees what the other process writes.
    let at = HOLE.start * PAGE + 3;
    rustix::io::pwrite(&file, &[9], at as u64).unwrap();
    assert_eq!((own.load(at), own.load(PAGE + 5), own.load(7 * PAGE)), (9, 7, byte(7 * PAGE)));
}

#[test]
fn no_file_of_other_memory_is_handed_out() {
    let Some(node) = Node::new() else { return };
    let (_pool, _server) = pool(&node, true);
    let refused = |device, inode| {
        let refused = complete(&node.socket(), Completion { device, inode });
        matches!(refused, Err(WireError::Refused(why)) if why == "no fork has this memory")
    };
    assert!(refused(0, 0));
    // Recycled memory, which another sandbox has later.
    let (own, fork) = (Own::take(&node, request(None)), Own::take(&node, request(Some(name()))));
    let status = rustix::fs::fstat(&own.lease.file).unwrap();
    assert!(refused(status.st_dev, status.st_ino));
    let status = rustix::fs::fstat(&fork.lease.file).unwrap();
    assert!(!refused(status.st_dev, status.st_ino));
}

#[test]
fn a_page_that_was_given_back_is_zeros_and_not_the_template() {
    let Some(node) = Node::new() else { return };
    let (_pool, _server) = pool(&node, true);
    let mut user = User::start(&node);
    assert_eq!(user.read(PAGE + 5), byte(PAGE + 5));
    assert_eq!(user.ask("give 1"), "given");
    assert_eq!(user.read(PAGE + 5), 0);
    user.write(PAGE + 5, 7);
    assert_eq!((user.read(PAGE + 5), user.read(PAGE + 6)), (7, 0));
}

#[test]
fn a_device_and_a_guest_see_the_same_bytes() {
    let Some(node) = Node::new() else { return };
    let (pool, _server) = pool(&node, true);
    let own = Own::take(&node, request(Some(name())));
    let map = device(&node, &own.lease);
    let memory = map.memory();
    let mut bytes = vec![0; BYTES as usize];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().enumerate().all(|(at, found)| *found == byte(at)));
    // A device's read copies nothing, and has the kernel make pages of holes.
    let holes = (BYTES - pool.stats().templates[0].held, pool.stats().fork_bytes);
    assert_eq!(holes.0, holes.1);
    // A device writes first: the rest of its pages is the template's, or zeros of a hole.
    memory.write(2 * PAGE as u64 - 1, &[0, 0]).unwrap();
    memory.write(4 * PAGE as u64 + 8, &[9]).unwrap();
    memory.write(1200 * PAGE as u64, &[9]).unwrap();
    let found: Vec<u8> = (2 * PAGE - 3..2 * PAGE + 3).map(|at| own.load(at)).collect();
    let near = |at| byte(2 * PAGE + at - 3);
    assert_eq!(found, [near(0), near(1), 0, 0, near(4), near(5)]);
    assert_eq!((own.load(4 * PAGE + 8), own.load(4 * PAGE + 9)), (9, 0));
    assert_eq!((own.load(1200 * PAGE), own.load(1200 * PAGE + 1)), (9, 0));
    // A guest writes first.
    own.store(10 * PAGE + 3, 0);
    own.store(1300 * PAGE, 5);
    memory.read(0, &mut bytes).unwrap();
    let changed = [2 * PAGE - 1, 2 * PAGE, 4 * PAGE + 8, 1200 * PAGE, 10 * PAGE + 3, 1300 * PAGE];
    for (at, found) in bytes.iter().enumerate().filter(|(at, _)| !changed.contains(at)) {
        assert_eq!(*found, byte(at), "{at}");
    }
    assert_eq!(changed.map(|at| bytes[at]), [0, 0, 9, 9, 0, 5]);
}

/// Each page has a byte that the guest writes and one that a device writes, at the same time.
#[test]
fn a_guest_and_devices_race_for_every_page() {
    let Some(node) = Node::new() else { return };
    let (_pool, _server) = pool(&node, true);
    let own = Own::take(&node, request(Some(name())));
    let map = device(&node, &own.lease);
    let gate = std::sync::Barrier::new(3);
    let writer = |at: usize, value: u8, reverse: bool| {
        let memory = map.memory();
        gate.wait();
        for page in 0..PAGES {
            let page = if reverse { PAGES - 1 - page } else { page };
            memory.write((page * PAGE + at) as u64, &[value]).unwrap();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| writer(100, 201, false));
        scope.spawn(|| writer(200, 202, true));
        gate.wait();
        for page in 0..PAGES {
            own.store(page * PAGE + 300, 203);
            assert_eq!(own.load(page * PAGE + 301), byte(page * PAGE + 301));
        }
    });
    let mut bytes = vec![0; BYTES as usize];
    map.memory().read(0, &mut bytes).unwrap();
    for (at, found) in bytes.iter().enumerate() {
        let expected = match at % PAGE {
            100 => 201,
            200 => 202,
            300 => 203,
            _ => byte(at),
        };
        assert_eq!((*found, own.load(at)), (expected, expected), "{at}");
    }
}

#[test]
fn what_one_fork_touched_is_copied_ahead_for_the_next() {
    let Some(node) = Node::new() else { return };
    let (pool, _server) = pool(&node, true);
    let own = Own::take(&node, request(Some(name())));
    let status = rustix::fs::fstat(&own.lease.file).unwrap();
    let identity = (status.st_dev, status.st_ino);
    assert_eq!(pool.copied(identity), Some(vec![]));
    // The device's page, a hole, and pages of the guest, of which two follow each other.
    let map = device(&node, &own.lease);
    map.memory().write(10 * PAGE as u64, &[1]).unwrap();
    for page in [4, 20, 500, 501, 2047] {
        own.load(page * PAGE);
    }
    let page = |page: usize| (page * PAGE) as u64;
    let touched = [10..11, 20..21, 500..502, 2047..2048].map(|one| page(one.start)..page(one.end));
    // 2047 and 4 are holes of a page.
    assert!(is_hole(4) && !is_hole(2047) && !is_hole(500));
    assert_eq!(pool.copied(identity).unwrap(), touched);
    assert_eq!(pool.copied((0, 0)), None);
    assert!(pool.copy_ahead(name(), &touched));
    assert_eq!(pool.stats().templates[0].ahead, page(5));
    let mut next = User::start(&node);
    let mut waited = Duration::ZERO;
    while pool.stats().copied_ahead < 5 {
        assert!(waited < PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
        waited += Duration::from_millis(1);
    }
    let faults = pool.stats().faults;
    assert_eq!(next.ask("touch 10 11"), "true");
    assert_eq!(
        (next.ask("touch 20 21"), next.ask("touch 500 502")),
        ("true".into(), "true".into())
    );
    assert_eq!(pool.stats().faults, faults);
    assert_eq!(next.others(), "0");
}

#[test]
fn a_successor_serves_forks_that_run() {
    let Some(node) = Node::new() else { return };
    let mut predecessor = node.predecessor();
    let (mut one, mut two) = (User::start(&node), User::start(&node));
    one.write(3 * PAGE, 0);
    assert_eq!(two.read(PAGE), byte(PAGE));
    predecessor.kill().unwrap();
    predecessor.wait().unwrap();
    let pool = node.pool(false, true);
    assert_eq!((pool.stats().forks, pool.stats().templates.len()), (2, 0));
    assert_eq!((one.others(), two.others()), ("1".into(), "0".into()));
    one.end();
    two.end();
    none_lent(&pool);
}

/// The touch of a page waits, and never finds zeros.
#[test]
fn without_its_template_a_fork_waits() {
    let Some(node) = Node::new() else { return };
    let mut predecessor = node.predecessor();
    let mut user = User::start(&node);
    assert_eq!(user.read(PAGE), byte(PAGE));
    predecessor.kill().unwrap();
    predecessor.wait().unwrap();
    let (_keeper, mut left) = node.keeper();
    for one in &mut left {
        assert!(one.files.remove(&5).is_some(), "the template's slot");
    }
    let pool = Pool::new(Settings::default()).unwrap();
    pool.resume(left).unwrap();
    assert_eq!(pool.stats().lent, 0);
    user.say(&format!("read {}", 2 * PAGE));
    let path = format!("/proc/{}/task", user.child.id());
    let waits = || {
        let threads = std::fs::read_dir(&path).unwrap();
        let mut wchan =
            threads.map(|one| std::fs::read_to_string(one.unwrap().path().join("wchan")));
        wchan.any(|what| what.unwrap_or_default() == "handle_userfault")
    };
    let mut waited = Duration::ZERO;
    while !waits() {
        assert!(waited < PATIENCE, "the touch does not wait");
        std::thread::sleep(Duration::from_millis(5));
        waited += Duration::from_millis(5);
    }
    user.child.kill().unwrap();
    assert_eq!(user.answer(), "", "it read nothing");
    user.child.wait().unwrap();
}

/// The kernel reports a fault once, here to the test, which reads it in place of the predecessor.
#[test]
fn a_successor_serves_a_fault_that_was_read_and_not_answered() {
    let Some(node) = Node::new() else { return };
    let mut predecessor = node.predecessor();
    let own: &'static Own = Box::leak(Box::new(Own::take(&node, request(Some(name())))));
    predecessor.kill().unwrap();
    predecessor.wait().unwrap();
    let (answer, answered) = std::sync::mpsc::channel();
    std::thread::spawn(move || answer.send(own.load(PAGE)));
    let left = node.keeper().1;
    let faults = &left[0].files[&2];
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let mut polled = [PollFd::new(faults, PollFlags::IN)];
    assert_eq!(poll(&mut polled, Some(&limit)).unwrap(), 1, "the touch faults");
    assert_eq!(rustix::io::read(faults, &mut [0; 32]).unwrap(), 32);
    let _pool = node.pool(false, true);
    assert_eq!(answered.recv_timeout(PATIENCE), Ok(byte(PAGE)));
}

/// The predecessor itself: gives memory until it is killed.
#[test]
fn predecessor() {
    be_predecessor(|pool, _| {
        pool.add_template(name(), Template::copy_of(saved().as_fd()).unwrap()).unwrap();
    });
}

#[test]
fn what_is_no_template_is_refused() {
    let Some(node) = Node::new() else { return };
    let (pool, _server) = pool(&node, true);
    let refused = |request| Lease::ask(&node.socket(), request).unwrap_err().to_string();
    let unknown = refused(request(TemplateName::new("other")));
    assert!(unknown.contains("no template other"), "{unknown}");
    let of = request(Some(name()));
    let text = refused(Request { bytes: BYTES * 2, ..of });
    assert!(text.contains("its template has 8388608"), "{text}");
    assert!(refused(Request { page: Page::Huge, ..of }).contains("in pages of 4 KiB"));
    let again = pool.freeze(saved().as_fd()).unwrap();
    let text = pool.add_template(name(), again).unwrap_err().to_string();
    assert!(text.contains("there is a template web already"), "{text}");
    assert_eq!(pool.stats().lent, 0);
}
