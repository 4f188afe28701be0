//! Memory that begins as a template.

use super::*;
use crate::{Access, DmaMap, Fault, LateFiles, Memory, Region, View};

const PAGE: usize = Template::GRANULE;

/// The bytes of a template: two pages of a value each, a hole of a page, two more pages.
fn template_bytes() -> Vec<u8> {
    let page = |value| vec![value; PAGE];
    [page(11), page(12), page(0), page(14), page(15)].concat()
}

fn template() -> Arc<Template> {
    let file = rustix::fs::memfd_create("saved", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::pwrite(&file, &template_bytes(), 0).unwrap();
    Arc::new(Template::copy_of(file.as_fd()).unwrap())
}

fn empty(len: usize) -> OwnedFd {
    let file = rustix::fs::memfd_create("fork", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len as u64).unwrap();
    file
}

fn fork(template: &Arc<Template>) -> Arc<LateMemory> {
    Arc::new(LateMemory::fork(empty(template.len()), template).unwrap())
}

fn mapped(memory: &Arc<LateMemory>) -> (DmaMap, Memory) {
    let (mut map, bin) = (DmaMap::new(), Bin::new());
    let len = memory.len() as u64;
    map.add(0, Region::late(memory, 0, len, Permissions::READ_WRITE, &bin).unwrap()).unwrap();
    let view = map.memory();
    (map, view)
}

/// The bytes of pages that the file has: the memory that a fork takes.
fn held(memory: &LateMemory) -> u64 {
    rustix::fs::fstat(memory.file()).unwrap().st_blocks.unsigned_abs() * 512
}

/// The states of the template's five pages: a hole is absent until it is taken.
fn count(shared: usize, clean: usize) -> Granules {
    Granules { absent: 5 - shared - clean, shared, clean, ..Granules::default() }
}

#[test]
fn a_read_finds_the_template_and_copies_nothing() {
    let template = template();
    let fork = fork(&template);
    let (_map, memory) = mapped(&fork);
    let mut bytes = vec![9; 5 * PAGE];
    memory.read(0, &mut bytes[..2 * PAGE]).unwrap();
    memory.read(3 * PAGE as u64, &mut bytes[3 * PAGE..]).unwrap();
    assert_eq!(held(&fork), 0);
    // Of a hole the kernel makes a page of zeros.
    memory.read(2 * PAGE as u64, &mut bytes[2 * PAGE..3 * PAGE]).unwrap();
    assert!(bytes == template_bytes());
    let mut bytes = vec![9; PAGE + 2];
    memory.read(PAGE as u64 - 1, &mut bytes).unwrap();
    assert!(bytes == template_bytes()[PAGE - 1..][..PAGE + 2]);
    assert_eq!((fork.count(), held(&fork)), (count(4, 0), PAGE as u64));
    assert_eq!(template.held(), 4 * PAGE, "the hole was read and is one still");
    let blocks = rustix::fs::fstat(template.file()).unwrap().st_blocks;
    assert_eq!(blocks as usize * 512, 4 * PAGE);
}

/// A copy can wait for holes that the fork makes in its memory, and for nobody else.
#[test]
fn a_copy_from_the_template_counts_as_a_call_that_may_wait() {
    let template = template();
    let fork = fork(&template);
    let (_map, memory) = mapped(&fork);
    let noted = slipway_peer::waits::count;
    let before = noted();
    memory.read(0, &mut [0; PAGE]).unwrap();
    assert_eq!(noted(), before);
    memory.write(0, &[1]).unwrap();
    assert_eq!(noted(), before + 1);
    memory.write(1, &[1]).unwrap();
    assert_eq!(noted(), before + 1, "the page is there");
}

#[test]
fn a_write_copies_the_rest_of_its_pages_first() {
    let template = template();
    let (fork, other) = (fork(&template), fork(&template));
    let (_map, memory) = mapped(&fork);
    memory.write(2 * PAGE as u64 - 1, &[1, 2]).unwrap();
    memory.store_u32(3 * PAGE as u64 + 4, u32::MAX).unwrap();
    let mut expected = template_bytes();
    expected[2 * PAGE - 1..2 * PAGE + 1].copy_from_slice(&[1, 2]);
    expected[3 * PAGE + 4..3 * PAGE + 8].fill(0xff);
    let mut bytes = vec![9; 5 * PAGE];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes == expected);
    assert_eq!((fork.count(), held(&fork)), (count(2, 3), 3 * PAGE as u64));
    let (_map, memory) = mapped(&other);
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes == template_bytes(), "what one fork writes, no other sees");
}

#[test]
fn words_entries_and_spans_are_copied_first() {
    let fork = fork(&template());
    let (_map, memory) = mapped(&fork);
    assert_eq!(memory.load_u32(0), Ok(u32::from_le_bytes([11; 4])));
    memory.publish(PAGE as u64, 7).unwrap();
    let mut spans = Vec::new();
    memory.pin(3 * PAGE as u64 + 8, 8, Access::Read, &mut spans).unwrap();
    View::new(memory.clone())
        .pin([(4 * PAGE as u64, PAGE)].into_iter(), Access::Write, &mut spans)
        .unwrap();
    let mut bytes = [0; 8];
    spans[0].read(0, &mut bytes).unwrap();
    assert_eq!((bytes, fork.count()), ([15; 8], count(0, 4)));
}

#[test]
fn who_may_come_back_does_not_wait_for_a_page_that_is_being_copied() {
    let fork = fork(&template());
    let (_map, memory) = mapped(&fork);
    let busy = &fork.states()[1];
    assert_eq!(states::take(busy), TakeOutcome::Mine);
    let (mut view, mut spans) = (View::new(memory.clone()), Vec::new());
    let ranges = || [(0, 2 * PAGE)].into_iter();
    assert_eq!(view.pin(ranges(), Access::Write, &mut spans), Err(Fault::Busy { iova: 0 }));
    let mut byte = [9];
    memory.read(PAGE as u64, &mut byte).unwrap();
    assert_eq!(byte, [12], "a reader has the template's");
    let other = std::thread::spawn(move || memory.write(PAGE as u64, &[3]));
    fork.fill(1..2, states::CLEAN).unwrap();
    assert_eq!(other.join().unwrap(), Ok(()));
    assert_eq!(view.pin(ranges(), Access::Write, &mut spans), Ok(()));
    let mut bytes = [9; 2];
    spans[0].read(PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, [3, 12]);
}

/// The thread that copies waits while the fork's process makes a hole: a reactor goes on without a
/// task that sleeps.
#[test]
fn who_waits_long_for_a_page_that_is_being_copied_sleeps() {
    let fork = fork(&template());
    let (_map, memory) = mapped(&fork);
    assert_eq!(states::take(&fork.states()[1]), TakeOutcome::Mine);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            memory.write(PAGE as u64, &[7])
        });
        let thread = told.recv().unwrap().as_raw_nonzero();
        let stat = format!("/proc/self/task/{thread}/stat");
        let is_asleep = || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
        };
        // More often than a thread sleeps that only begins.
        let limit = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let mut asleep = 0;
        while asleep < 100 && std::time::Instant::now() < limit {
            asleep += usize::from(is_asleep());
            std::thread::yield_now();
        }
        fork.fill(1..2, states::CLEAN).unwrap();
        assert_eq!(writer.join().unwrap(), Ok(()));
        assert_eq!(asleep, 100);
    });
    assert_eq!(fork.count(), count(3, 1));
}

#[test]
fn a_successor_copies_again_what_was_being_copied() {
    let template = template();
    let fork = fork(&template);
    fork.take(0, 1).unwrap();
    assert_eq!(states::take(&fork.states()[3]), TakeOutcome::Mine);
    assert!(fork.alias.write(3 * PAGE, &[99; 7]), "its process ended in between");
    let again = |file: BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
    let parts = || (again(fork.file()), again(fork.table().unwrap()));
    let (file, table) = parts();
    let without = LateMemory::of_predecessor(file, table, None);
    // Not a whole granule of 64 KiB, either.
    assert!(without.is_err(), "zeros would be shown for the template");
    let (file, table) = parts();
    let sixteen = Template::copy_of(empty(16 * PAGE).as_fd()).unwrap();
    assert!(LateMemory::of_predecessor(file, table, Some(Arc::new(sixteen))).is_err());
    let (file, table) = parts();
    let fork = LateMemory::of_predecessor(file, table, Some(template)).unwrap();
    assert_eq!(fork.count(), count(3, 1));
    let fork = Arc::new(fork);
    let (_map, memory) = mapped(&fork);
    memory.write(3 * PAGE as u64 + 9, &[1]).unwrap();
    let mut bytes = [0; 10];
    memory.read(3 * PAGE as u64, &mut bytes).unwrap();
    assert_eq!(bytes, [14, 14, 14, 14, 14, 14, 14, 14, 14, 1]);
}

/// Room for more memory is a hole of the template.
#[test]
fn a_successor_makes_no_page_of_the_table_for_a_hole() {
    let file = empty(64 << 20);
    rustix::io::pwrite(&file, &[1], 0).unwrap();
    let template = Arc::new(Template::copy_of(file.as_fd()).unwrap());
    let fork = fork(&template);
    let again = |file: BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
    let (file, table) = (again(fork.file()), again(fork.table().unwrap()));
    let blocks = || rustix::fs::fstat(fork.table().unwrap()).unwrap().st_blocks;
    let before = blocks();
    LateMemory::of_predecessor(file, table, Some(template)).unwrap();
    assert!(before > 0);
    assert_eq!(blocks(), before);
}

#[test]
fn a_table_of_zeros_is_refused() {
    let template = template();
    let fork = fork(&template);
    let empty = Lasting::new("test", fork.granules()).unwrap();
    let again = |file: BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
    let table = again(empty.file().unwrap());
    let error = LateMemory::of_predecessor(again(fork.file()), table, Some(template)).unwrap_err();
    assert_eq!(error.to_string(), "the state of a hole for bytes of the template");
}

#[test]
fn a_table_with_shared_granules_needs_its_template() {
    let saved = vec![1; 16 * PAGE];
    let file = empty(16 * PAGE);
    rustix::io::pwrite(&file, &saved, 0).unwrap();
    let template = Arc::new(Template::copy_of(file.as_fd()).unwrap());
    let fork = fork(&template);
    let again = |file: BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
    let (file, table) = (again(fork.file()), again(fork.table().unwrap()));
    let without = LateMemory::of_predecessor(file, table, None).unwrap_err();
    assert_eq!(without.kind(), io::ErrorKind::InvalidData);
    let late = LateMemory::new(empty(16 * PAGE)).unwrap();
    late.states()[0].store(states::DIRTY, Ordering::Release);
    let (file, table) = (again(late.file()), again(late.table().unwrap()));
    let with = LateMemory::of_predecessor(file, table, Some(template)).unwrap_err();
    assert_eq!(with.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn all_of_it_can_be_copied_and_is_looked_up_no_more() {
    let fork = fork(&template());
    let (_map, memory) = mapped(&fork);
    fork.take_all().unwrap();
    // The hole is not looked at.
    assert_eq!((fork.count(), held(&fork)), (count(0, 4), 4 * PAGE as u64));
    assert!(fork.is_taken(0, 5 * PAGE));
    let mut bytes = vec![9; 5 * PAGE];
    for _ in 0..2 {
        memory.read(0, &mut bytes).unwrap();
        assert!(bytes == template_bytes());
    }
    memory.write(2 * PAGE as u64, &[7]).unwrap();
    rustix::io::pread(fork.file(), &mut bytes[..1], 2 * PAGE as u64).unwrap();
    assert_eq!(bytes[0], 7);
}

#[test]
fn the_pages_that_were_copied_are_told() {
    let fork = fork(&template());
    assert_eq!((fork.copied(), fork.is_taken(0, 1)), (vec![], false));
    let page = |number: u64| number * PAGE as u64;
    fork.take(PAGE, 1).unwrap();
    // A hole, which is no byte of the template.
    fork.take(2 * PAGE, 1).unwrap();
    assert_eq!(fork.copied(), std::slice::from_ref(&(page(1)..page(2))));
    assert!(fork.is_taken(PAGE, 2 * PAGE) && !fork.is_taken(PAGE, 2 * PAGE + 1));
    fork.take(0, 1).unwrap();
    fork.take(4 * PAGE, 1).unwrap();
    assert_eq!(fork.copied(), [0..page(2), page(4)..page(5)]);
}

#[test]
fn what_its_process_wrote_in_a_hole_is_seen() {
    let fork = fork(&template());
    let (_map, memory) = mapped(&fork);
    // No fault tells of it.
    let its = crate::Span::file(fork.file(), 0, 5 * PAGE).unwrap();
    its.write(2 * PAGE + 1, &[8]).unwrap();
    let mut bytes = [9; 2];
    memory.read(2 * PAGE as u64, &mut bytes).unwrap();
    let mut saved = [9; 2];
    assert!(fork.freeze().unwrap().read(2 * PAGE, &mut saved));
    assert_eq!((bytes, saved), ([0, 8], [0, 8]));
}

#[test]
fn what_its_process_gives_back_is_zeros_for_all_and_the_rest_the_template() {
    let template = template();
    let fork = fork(&template);
    let (_map, memory) = mapped(&fork);
    memory.write(0, &[1]).unwrap();
    fork.take(PAGE, 1).unwrap();
    let (copied, len) = (fork.copied(), 5 * PAGE as u64);
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fork.file(), hole, 0, len).unwrap();
    assert_eq!((held(&fork), fork.count(), fork.copied()), (0, count(2, 2), copied));
    let mut expected = template_bytes();
    expected[..2 * PAGE].fill(0);
    let saved = fork.freeze().unwrap();
    let (mut bytes, mut kept) = (vec![9; 5 * PAGE], vec![9; 5 * PAGE]);
    memory.read(0, &mut bytes).unwrap();
    assert!(saved.read(0, &mut kept) && kept == expected && bytes == expected);
    memory.write(PAGE as u64 + 1, &[7]).unwrap();
    memory.write(4 * PAGE as u64, &[8]).unwrap();
    (expected[PAGE + 1], expected[4 * PAGE]) = (7, 8);
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes == expected && template.read(0, &mut kept) && kept == template_bytes());
}

#[test]
fn a_fork_of_a_fork_begins_with_its_bytes() {
    let fork = fork(&template());
    let (_map, memory) = mapped(&fork);
    memory.write(PAGE as u64 + 1, &[77]).unwrap();
    memory.write(2 * PAGE as u64, &[78]).unwrap();
    let files = LateFiles::default();
    files.add(&fork);
    let next = files.template(fork.file()).unwrap();
    let mut expected = template_bytes();
    (expected[PAGE + 1], expected[2 * PAGE]) = (77, 78);
    let mut bytes = vec![0; 5 * PAGE];
    assert!(next.read(0, &mut bytes) && bytes == expected);
}

/// The pages of a pool's memory that its user was not given may have another's bytes.
#[test]
fn a_template_has_no_bytes_of_an_earlier_user() {
    let mut late = LateMemory::new(empty(3 * GRANULE)).unwrap();
    late.take(0, 3 * GRANULE).unwrap();
    assert!(late.alias.write(0, &vec![0xaa; 3 * GRANULE]));
    late.recycle().unwrap();
    let late = Arc::new(late);
    let (_map, memory) = mapped(&late);
    memory.write(GRANULE as u64 + 5, &[1]).unwrap();
    assert_eq!(states::take(&late.states()[2]), TakeOutcome::Mine);
    let files = LateFiles::default();
    files.add(&late);
    let template = files.template(late.file()).unwrap();
    assert_eq!(template.data(), std::slice::from_ref(&(GRANULE..GRANULE + PAGE)));
    let mut bytes = vec![9; 3 * GRANULE];
    assert!(template.read(0, &mut bytes));
    assert_eq!(bytes.iter().position(|byte| *byte != 0), Some(GRANULE + 5));
    assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 1);
}

#[test]
#[should_panic(expected = "not recycled")]
fn a_fork_is_not_recycled() {
    let template = template();
    LateMemory::fork(empty(template.len()), &template).unwrap().recycle().unwrap();
}

#[test]
fn memory_of_another_size_than_the_template_is_refused() {
    let template = template();
    for len in [PAGE, 6 * PAGE, 1] {
        let refused = LateMemory::fork(empty(len), &template).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
    }
}
