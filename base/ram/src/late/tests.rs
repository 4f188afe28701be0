use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::{Access, DmaMap, Fault, LateFiles, Memory, Region, View};

fn file(granules: usize) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("late", flags).unwrap();
    rustix::fs::ftruncate(&file, (granules * GRANULE) as u64).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    file
}

/// Memory that an earlier user has filled with 0xaa.
fn recycled(granules: usize) -> Arc<LateMemory> {
    let mut memory = LateMemory::new(file(granules)).unwrap();
    memory.take(0, memory.len()).unwrap();
    for at in (0..memory.len()).step_by(GRANULE) {
        assert!(memory.alias.write(at, &[0xaa; GRANULE]));
    }
    memory.recycle().unwrap();
    Arc::new(memory)
}

fn mapped(memory: &Arc<LateMemory>, permissions: Permissions) -> (DmaMap, Memory) {
    let bin = slipway_peer::Bin::new();
    let region = Region::late(memory, 0, memory.len() as u64, permissions, &bin).unwrap();
    let mut map = DmaMap::new();
    map.add(0, region).unwrap();
    let view = map.memory();
    (map, view)
}

fn stale(memory: &LateMemory) -> Vec<usize> {
    let mut bytes = vec![0; memory.len()];
    assert!(memory.alias.read(0, &mut bytes));
    (0..memory.granules).filter(|at| bytes[at * GRANULE..][..GRANULE].contains(&0xaa)).collect()
}

#[test]
fn a_read_of_what_nobody_was_given_finds_zeros_and_changes_nothing() {
    let late = recycled(4);
    let (_map, memory) = mapped(&late, Permissions::READ_WRITE);
    let mut bytes = vec![1; 3 * GRANULE];
    memory.read(GRANULE as u64 / 2, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert_eq!(late.count(), Granules { dirty: 4, ..Granules::default() });
}

#[test]
fn memory_that_was_all_given_is_late_again_for_the_next_user() {
    let late = recycled(4);
    let (map, memory) = mapped(&late, Permissions::READ_WRITE);
    late.take_all().unwrap();
    assert_eq!(stale(&late), []);
    for round in [1, 2] {
        // The first access finds that all was given, the second one does not ask.
        memory.write(GRANULE as u64, &[round; 2 * GRANULE]).unwrap();
    }
    assert_eq!(late.count(), Granules { clean: 4, ..Granules::default() });
    drop((map, memory));
    let mut late = Arc::into_inner(late).unwrap();
    late.recycle().unwrap();
    let late = Arc::new(late);
    let (_map, memory) = mapped(&late, Permissions::READ_WRITE);
    let mut bytes = vec![1; 4 * GRANULE];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert_eq!(late.count(), Granules { dirty: 4, ..Granules::default() });
}

#[test]
fn hardware_is_given_no_stale_byte() {
    let (late, bin) = (recycled(4), slipway_peer::Bin::new());
    let (start, len) = (GRANULE as u64, 2 * GRANULE as u64);
    let region = Region::late(&late, start, len, Permissions::READ_ONLY, &bin).unwrap();
    assert!(!late.had_hardware());
    assert_eq!(region.give_to_hardware().unwrap().written, len);
    assert_eq!(stale(&late), [0, 3]);
    assert!(late.had_hardware());
    drop(region);
    let mut late = Arc::into_inner(late).unwrap();
    late.recycle().unwrap();
    assert!(!late.had_hardware());
}

/// A device on the bus reads pages as `stale` does: past the table. Zeros at the first touch, as
/// FastIOV has them, come after it.
#[test]
fn zeros_at_the_first_touch_are_too_late_for_hardware() {
    let (late, bin) = (recycled(4), slipway_peer::Bin::new());
    let (_map, memory) = mapped(&late, Permissions::READ_WRITE);
    memory.write(0, &[1]).unwrap();
    let mut bytes = vec![1; 3 * GRANULE];
    memory.read(GRANULE as u64, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "a device of this process finds zeros");
    assert_eq!(stale(&late), [1, 2, 3], "hardware that is mapped now finds the last user's bytes");
    let all = late.len() as u64;
    let region = Region::late(&late, 0, all, Permissions::READ_WRITE, &bin).unwrap();
    assert_eq!(region.give_to_hardware().unwrap().written, 3 * GRANULE as u64);
    assert_eq!(stale(&late), []);
}

#[test]
fn what_is_zeroed_ahead_costs_nothing_when_hardware_is_given_it() {
    let (late, bin) = (recycled(4), slipway_peer::Bin::new());
    for granule in 1..4 {
        assert_eq!(late.zero_ahead(granule), Ok(true));
    }
    let all = late.len() as u64;
    let region = Region::late(&late, 0, all, Permissions::READ_WRITE, &bin).unwrap();
    assert_eq!(region.give_to_hardware().unwrap().written, GRANULE as u64);
    assert_eq!(region.give_to_hardware().unwrap().written, 0);
    assert_eq!(stale(&late), []);
}

#[test]
fn a_write_takes_the_granules_that_it_touches() {
    let late = recycled(4);
    let (_map, memory) = mapped(&late, Permissions::READ_WRITE);
    memory.write(2 * GRANULE as u64 - 1, &[5, 6]).unwrap();
    assert_eq!(stale(&late), [0, 3]);
    let mut bytes = [9; 4];
    memory.read(2 * GRANULE as u64 - 2, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 5, 6, 0]);
    assert_eq!(late.count(), Granules { dirty: 2, clean: 2, ..Granules::default() });
}

#[test]
fn words_entries_and_spans_are_taken_first() {
    let late = recycled(5);
    let (_map, memory) = mapped(&late, Permissions::READ_WRITE);
    let at = |granule: usize| (granule * GRANULE) as u64;
    assert_eq!(memory.load_u32(at(0)), Ok(0));
    memory.store_u32(at(1) + 8, 7).unwrap();
    memory.publish(at(2), u128::MAX).unwrap();
    let mut spans = Vec::new();
    memory.pin(at(3) + 5, 1, Access::Read, &mut spans).unwrap();
    assert!(stale(&late) == [4]);
    View::new(memory).pin([(at(4), 9)].into_iter(), Access::Write, &mut spans).unwrap();
    assert!(stale(&late).is_empty());
    let mut bytes = [1; 9];
    spans[0].read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 9]);
}

/// A region that devices may not write is zeroed all the same.
#[test]
fn permissions_of_a_region_do_not_matter_to_its_zeros() {
    let late = recycled(1);
    let (_map, memory) = mapped(&late, Permissions::READ_ONLY);
    let mut spans = Vec::new();
    memory.pin(0, 8, Access::Read, &mut spans).unwrap();
    let mut bytes = [1; 8];
    spans[0].read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 8]);
    assert!(matches!(memory.write(0, &[1]), Err(Fault::Denied { .. })));
}

#[test]
fn who_may_come_back_does_not_wait_for_a_busy_granule() {
    let late = recycled(2);
    let (_map, memory) = mapped(&late, Permissions::READ_WRITE);
    assert!(states::begin_ahead(&late.states()[1]));
    let mut view = View::new(memory.clone());
    let mut spans = Vec::new();
    let ranges = || [(0, 2 * GRANULE)].into_iter();
    assert_eq!(view.pin(ranges(), Access::Write, &mut spans), Err(Fault::Busy { iova: 0 }));
    let mut byte = [1];
    memory.read(GRANULE as u64, &mut byte).unwrap();
    assert_eq!(byte, [0]);
    assert_eq!(late.zero_ahead(1), Ok(false), "another thread is at it");
    let other = std::thread::spawn(move || memory.write(GRANULE as u64, &[3]));
    late.fill(1..2, states::UNTOUCHED).unwrap();
    assert_eq!(other.join().unwrap(), Ok(()));
    assert_eq!(view.pin(ranges(), Access::Write, &mut spans), Ok(()));
    spans[0].read(GRANULE, &mut byte).unwrap();
    assert_eq!((byte, stale(&late)), ([3], vec![]));
}

#[test]
fn what_was_not_given_needs_no_zeros_again() {
    let late = recycled(3);
    assert_eq!(late.zero_ahead(0), Ok(true));
    assert_eq!(late.zero_ahead(1), Ok(true));
    assert_eq!(late.zero_ahead(1), Ok(false));
    late.take(GRANULE, 1).unwrap();
    let mut late = Arc::into_inner(late).unwrap();
    late.recycle().unwrap();
    assert_eq!(late.count(), Granules { dirty: 2, untouched: 1, ..Granules::default() });
    assert_eq!(stale(&late), [2]);
}

#[test]
fn a_file_without_pages_is_zeros() {
    let late = LateMemory::new(file(3)).unwrap();
    late.populate(1).unwrap();
    late.take(2 * GRANULE, 1).unwrap();
    let count = Granules { absent: 1, untouched: 1, clean: 1, ..Granules::default() };
    assert_eq!(late.count(), count);
    assert_eq!(late.zero_ahead(0), Ok(false));
    assert!(LateMemory::new(file(0)).is_err());
    let odd = rustix::fs::memfd_create("late", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&odd, 4096).unwrap();
    assert_eq!(LateMemory::new(odd).unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

/// The kernel makes pages of holes without a fault that this process sees.
#[test]
fn bytes_that_a_user_wrote_into_a_hole_are_read_and_do_not_reach_the_next_user() {
    let mut late = LateMemory::new(file(4)).unwrap();
    late.populate(3).unwrap();
    late.give_holes();
    let count = Granules { untouched: 1, clean: 3, ..Granules::default() };
    assert_eq!(late.count(), count);
    rustix::io::pwrite(late.file(), &[7; GRANULE], GRANULE as u64).unwrap();
    // A thread that makes pages of free memory may have begun before the memory was given.
    late.populate(1).unwrap();
    let late_too = Arc::new(late);
    let (map, memory) = mapped(&late_too, Permissions::READ_WRITE);
    let mut bytes = [0; 8];
    memory.read(2 * GRANULE as u64 - 4, &mut bytes).unwrap();
    assert_eq!(bytes, [7, 7, 7, 7, 0, 0, 0, 0]);
    drop((map, memory));
    late = Arc::into_inner(late_too).unwrap();
    late.recycle().unwrap();
    let count = Granules { absent: 1, dirty: 2, untouched: 1, ..Granules::default() };
    assert_eq!(late.count(), count);
}

/// The kernel makes a page that is missing without a fault, so that nobody knows it is not zero.
#[test]
fn recycled_granules_have_all_of_their_pages_or_none() {
    let mut late = LateMemory::new(file(6)).unwrap();
    late.give_holes();
    let page = rustix::param::page_size();
    // The last page of a granule and the first of the next, and one within a granule.
    for at in [2 * GRANULE - page, 2 * GRANULE, 4 * GRANULE + page] {
        rustix::io::pwrite(late.file(), &vec![0xaa; page], at as u64).unwrap();
    }
    late.recycle().unwrap();
    assert_eq!(late.count(), Granules { absent: 3, dirty: 3, ..Granules::default() });
    let held = rustix::fs::fstat(late.file()).unwrap().st_blocks.unsigned_abs() * 512;
    assert_eq!(held, 3 * GRANULE as u64);
    late.take(0, late.len()).unwrap();
    assert_eq!(stale(&late), []);
}

/// The kernel's own choice of a node is tested with two of them, by the pool (*lab/numa*).
#[test]
fn memory_with_a_home_is_used_as_any_other() {
    let mut late = LateMemory::new(file(2)).unwrap();
    assert_eq!(late.home(), None);
    let nowhere = NumaNode::new(1023).unwrap();
    assert!(late.set_home(nowhere).is_err());
    assert_eq!(late.home(), None);
    let home = NumaNode::new(0).unwrap();
    if let Err(error) = late.set_home(home) {
        println!("SKIPPED: memory_with_a_home_is_used_as_any_other: needs NUMA: {error}");
        return;
    }
    assert_eq!(late.home(), Some(home));
    late.populate(1).unwrap();
    let late = Arc::new(late);
    let (_map, memory) = mapped(&late, Permissions::READ_WRITE);
    memory.write(0, &[7; 2 * GRANULE]).unwrap();
    assert_eq!(late.count(), Granules { clean: 2, ..Granules::default() });
}

#[test]
fn a_successor_goes_on_with_the_table() {
    let late = recycled(4);
    late.take(0, 1).unwrap();
    assert!(states::begin_ahead(&late.states()[2]));
    late.zero_ahead(3).unwrap();
    let again = |file: BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
    let (file, table) = (again(late.file()), again(late.table().unwrap()));
    drop(late);
    let other = Lasting::new("table", 1 << 20).unwrap();
    let wrong = LateMemory::of_predecessor(again(file.as_fd()), again(other.file().unwrap()), None);
    assert_eq!(wrong.unwrap_err().kind(), io::ErrorKind::InvalidData);
    let late = LateMemory::of_predecessor(file, table, None).unwrap();
    let count = Granules { dirty: 2, untouched: 1, clean: 1, ..Granules::default() };
    assert_eq!((late.count(), stale(&late)), (count, vec![1, 2]));
}

#[test]
fn memory_is_found_by_a_descriptor_that_cannot_read_it() {
    use std::os::fd::AsRawFd;
    let late = recycled(2);
    let path = format!("/proc/self/fd/{}", late.file().as_raw_fd());
    let token: OwnedFd = std::fs::OpenOptions::new().write(true).open(path).unwrap().into();
    let (files, bin) = (LateFiles::default(), slipway_peer::Bin::new());
    let map = |file: BorrowedFd<'_>, len| {
        files.region((file, files.added()), 0, len, Permissions::READ_WRITE, &bin)
    };
    assert!(map(token.as_fd(), 4096).is_err(), "it can be mapped by those who know the file only");
    files.add(&late);
    assert!(files.find(file(1).as_fd()).unwrap().is_none());
    assert!(map(token.as_fd(), late.len() as u64 + 1).is_err());
    let region = map(token.as_fd(), late.len() as u64).unwrap();
    let mut dma = DmaMap::new();
    dma.add(0, region).unwrap();
    let mut byte = [1];
    dma.memory().read(0, &mut byte).unwrap();
    assert_eq!(byte, [0]);
    assert!(map(file(1).as_fd(), 4096).is_ok());
    files.add(&late);
    assert!(map(token.as_fd(), 4096).is_ok(), "added twice, it is one file");
    // Another's memory whose file has the same numbers.
    let (again, table) = (late.file().try_clone_to_owned(), late.table().unwrap());
    let table = table.try_clone_to_owned().unwrap();
    let twin = Arc::new(LateMemory::of_predecessor(again.unwrap(), table, None).unwrap());
    files.add(&twin);
    let outcome = map(token.as_fd(), 4096).map(drop);
    assert_eq!(outcome.unwrap_err().raw_os_error(), Some(libc::EACCES), "whose it is is unknown");
    files.remove(&twin);
    files.remove(&late);
    assert!(files.find(token.as_fd()).unwrap().is_none());
}
