//! Tests of the copy routines against files whose owner takes pages away.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags};

use crate::{Access, DmaMap, Fault, Mapping, Memory, Permissions, Region};

const PAGE: usize = 4096;

fn unsealed(len: usize, flags: MemfdFlags) -> Option<OwnedFd> {
    let file = rustix::fs::memfd_create("copy", MemfdFlags::CLOEXEC | flags).ok()?;
    rustix::fs::ftruncate(&file, len as u64).ok()?;
    Some(file)
}

fn mapped(file: &OwnedFd, len: usize) -> (DmaMap, Memory) {
    let mut map = DmaMap::new();
    let region = Region::mapped(file.as_fd(), 0, len as u64, Permissions::READ_WRITE).unwrap();
    map.add(0, region).unwrap();
    let memory = map.memory();
    (map, memory)
}

#[test]
fn every_length_is_copied_and_nothing_around_it() {
    let file = unsealed(2 * PAGE, MemfdFlags::empty()).unwrap();
    let (_map, memory) = mapped(&file, 2 * PAGE);
    for len in (0..700).chain([1023, 4095, 4096]) {
        let data: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8 | 1).collect();
        let at = 100 + (len as u64 & 15);
        memory.write(0, &[0; 2 * PAGE]).unwrap();
        memory.write(at, &data).unwrap();
        let mut all = vec![9; 2 * PAGE];
        memory.read(0, &mut all).unwrap();
        let (before, rest) = all.split_at(at as usize);
        assert!(before.iter().chain(&rest[len..]).all(|byte| *byte == 0), "around {len}");
        assert_eq!(rest[..len], data);
        let mut back = vec![0; len + 2];
        memory.read(at, &mut back[1..=len]).unwrap();
        assert_eq!((back[0], back[len + 1]), (0, 0), "around the copy of {len}");
        assert_eq!(back[1..=len], data);
    }
}

#[test]
fn zeros_are_written_and_nothing_around_them() {
    let file = unsealed(4 * PAGE, MemfdFlags::empty()).unwrap();
    let (both, bin) = (Permissions::READ_WRITE, crate::pages::own());
    let mapping = Mapping::file(file.as_fd(), 0, 4 * PAGE, both, bin).unwrap();
    for (at, len) in [(1, 0), (7, 1), (PAGE - 3, 500), (PAGE, 2 * PAGE)] {
        assert!(mapping.write(0, &[9; 4 * PAGE]));
        assert!(mapping.zero(at, len));
        let mut all = vec![0; 4 * PAGE];
        assert!(mapping.read(0, &mut all));
        let zeros = |byte: usize| (at..at + len).contains(&byte);
        assert!(all.iter().enumerate().all(|(at, byte)| *byte == if zeros(at) { 0 } else { 9 }));
    }
    rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
    assert!(mapping.zero(0, PAGE) && !mapping.zero(0, PAGE + 1));
}

#[test]
fn sixteen_bytes_are_published_wherever_they_lie() {
    let file = unsealed(PAGE, MemfdFlags::empty()).unwrap();
    let (mut map, memory) = mapped(&file, PAGE);
    map.add(PAGE as u64, Region::heap(PAGE)).unwrap();
    let entry: [u8; 16] = std::array::from_fn(|at| at as u8 + 1);
    let bits = u128::from_le_bytes(entry);
    for at in [0, 16, 33, PAGE as u64 - 8, PAGE as u64 - 16, PAGE as u64, PAGE as u64 - 2] {
        memory.publish(at, bits).unwrap();
        let mut back = [0; 16];
        memory.read(at, &mut back).unwrap();
        assert_eq!(back, entry, "at {at}");
    }
    assert!(memory.publish(2 * PAGE as u64 - 15, bits).is_err());
    let mut spans = Vec::new();
    memory.pin(0, PAGE, Access::Write, &mut spans).unwrap();
    spans[0].publish(32, bits).unwrap();
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert_eq!(spans[0].publish(32, bits), Err(Fault::Gone { iova: 32 }));
    assert_eq!(memory.publish(64, bits), Err(Fault::Gone { iova: 64 }));
}

/// Makes copies of every kind on `memory` of `len` bytes until `stop`; counts successful ones in
/// `counts[0]` and gone ones in `counts[1]`.
fn copy_until(stop: &AtomicBool, memory: &Memory, len: usize, counts: &[AtomicU64; 2]) {
    let mut bytes = vec![1; len];
    let mut spans = Vec::new();
    memory.pin(0, len, Access::Write, &mut spans).unwrap();
    let last = len as u64 - 16;
    while !stop.load(Ordering::Relaxed) {
        let outcomes = [
            memory.write(0, &bytes),
            memory.read(0, &mut bytes),
            memory.read(last, &mut bytes[..16]),
            memory.write(last - 100, &bytes[..100]),
            memory.read(last - 7, &mut bytes[..7]),
            memory.load_u32(last).map(drop),
            memory.store_u32(last + 4, 5),
            memory.publish(last, 3),
            spans[0].read(0, &mut bytes),
            spans[0].write(0, &bytes),
        ];
        for outcome in outcomes {
            match outcome {
                Ok(()) => counts[0].fetch_add(1, Ordering::Relaxed),
                Err(Fault::Gone { .. }) => counts[1].fetch_add(1, Ordering::Relaxed),
                Err(other) => panic!("{other}"),
            };
        }
    }
}

/// Calls `take`, which takes pages away, `rounds` times under copies on three threads. Returns the
/// numbers of successful and of gone copies.
fn storm(file: &OwnedFd, len: usize, rounds: u32, take: impl Fn()) -> (u64, u64) {
    let (_map, memory) = mapped(file, len);
    let stop = AtomicBool::new(false);
    let counts = [AtomicU64::new(0), AtomicU64::new(0)];
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| copy_until(&stop, &memory, len, &counts));
        }
        for _ in 0..rounds {
            take();
            std::thread::yield_now();
        }
        // Makes sure of at least one outcome of each kind, however the threads were scheduled.
        rustix::fs::ftruncate(file, 0).unwrap();
        while counts[1].load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        rustix::fs::ftruncate(file, len as u64).unwrap();
        let whole = counts[0].load(Ordering::Relaxed);
        while counts[0].load(Ordering::Relaxed) == whole {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Relaxed);
    });
    let [whole, gone] = counts;
    (whole.into_inner(), gone.into_inner())
}

#[test]
fn a_file_truncated_under_running_copies_is_an_error_of_theirs() {
    const LEN: usize = 32 * PAGE;
    let file = unsealed(LEN, MemfdFlags::empty()).unwrap();
    let (whole, gone) = storm(&file, LEN, 2_000, || {
        rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
        rustix::fs::ftruncate(&file, LEN as u64).unwrap();
    });
    println!("{whole} copies whole, {gone} gone");
}

#[test]
fn a_huge_page_taken_away_under_running_copies_is_an_error_of_theirs() {
    const LEN: usize = 2 << 20;
    let file = unsealed(LEN, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
    // Needs an allocated page: otherwise every touch is a fault and there is no race.
    let free = file.as_ref().is_some_and(|file| {
        rustix::fs::fallocate(file, FallocateFlags::empty(), 0, LEN as u64).is_ok()
    });
    let (Some(file), true) = (file, free) else {
        println!("SKIPPED: a_huge_page_taken_away: needs a free huge page (vm.nr_hugepages)");
        return;
    };
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let (whole, gone) = storm(&file, LEN, 300, || {
        rustix::fs::fallocate(&file, punch, 0, LEN as u64).unwrap();
        rustix::fs::ftruncate(&file, 0).unwrap();
        rustix::fs::ftruncate(&file, LEN as u64).unwrap();
    });
    println!("{whole} copies whole, {gone} gone");
}

/// Environment variable that is set in a child that is to die of a signal it raises itself.
const CHILD: &str = "SLIPWAY_RAM_DIES";

/// Runs the test `name` of this binary again, in a child process with [`CHILD`] set.
fn child(name: &str) -> std::process::ExitStatus {
    let binary = std::env::current_exe().unwrap();
    let name = format!("copy::tests::{name}");
    let mut command = std::process::Command::new(binary);
    let command = command.args([&name, "--exact", "--nocapture"]).env(CHILD, "1");
    let silent = std::process::Stdio::null;
    command.stdout(silent()).stderr(silent()).status().unwrap()
}

/// A bus error outside the copy routines ends the process as without a handler.
#[test]
fn a_fault_of_other_code_still_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    if std::env::var_os(CHILD).is_none() {
        let status = child("a_fault_of_other_code_still_ends_the_process");
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
        return;
    }
    let file = unsealed(PAGE, MemfdFlags::empty()).unwrap();
    let (_map, memory) = mapped(&file, PAGE);
    let mut spans = Vec::new();
    memory.pin(0, PAGE, Access::Write, &mut spans).unwrap();
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert!(memory.read(0, &mut [0]).is_err());
    // SAFETY: mapped and readable as far as the compiler knows; the child dies here of SIGBUS.
    unsafe { std::ptr::read_volatile(spans[0].io_vector().0) };
}

/// A sent SIGBUS ends the process, too. (The standard library's handler, which was installed
/// before, reacts to the first one by restoring the default action.)
#[test]
fn a_signal_that_was_sent_still_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    if std::env::var_os(CHILD).is_none() {
        let status = child("a_signal_that_was_sent_still_ends_the_process");
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
        return;
    }
    let file = unsealed(PAGE, MemfdFlags::empty()).unwrap();
    let _mapped = mapped(&file, PAGE);
    for _ in 0..3 {
        // SAFETY: sends a signal to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGBUS) };
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}
