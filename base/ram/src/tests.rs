//! Tests of the DMA map and of mappings of real files.
//!
//! Over 500 lines: tests of one contract, for memory that a peer may take away.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::*;

const PAGE: usize = 4096;

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let fd = fd.unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn mapped(fd: &OwnedFd, offset: u64, len: usize) -> Region {
    Region::mapped(fd.as_fd(), offset, len as u64, Permissions::READ_WRITE).unwrap()
}

fn map(regions: impl IntoIterator<Item = (u64, Region)>) -> DmaMap {
    let mut map = DmaMap::new();
    for (iova, region) in regions {
        map.add(iova, region).unwrap();
    }
    map
}

/// Message-only memory that fills reads with the address's low byte and records writes.
#[derive(Default)]
struct Echo(std::sync::Mutex<Vec<(u64, Vec<u8>)>>);

impl MessageMemory for Echo {
    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Fault> {
        into.fill(iova as u8);
        Ok(())
    }

    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Fault> {
        self.0.lock().unwrap().push((iova, from.to_vec()));
        Ok(())
    }
}

#[test]
fn copies_cross_regions_of_every_kind() {
    let (sealed, open) = (memfd(8192, SealFlags::SHRINK), memfd(8192, SealFlags::empty()));
    let echo = Arc::new(Echo::default());
    let map = map([
        (0x1000, Region::heap(0x1000)),
        (0x2000, mapped(&sealed, 0, 0x1000)),
        (0x3000, mapped(&open, 0x1000, 0x1000)),
        (0x4000, Region::remote(echo.clone(), 0x1000, Permissions::READ_WRITE)),
    ]);
    let data: Vec<u8> = (0..0x3000).map(|at| (at / 7) as u8).collect();
    map.memory().write(0x1800, &data).unwrap();
    let mut back = vec![0; 0x2800];
    map.memory().read(0x1800, &mut back).unwrap();
    assert!(back == data[..0x2800]);
    assert_eq!(*echo.0.lock().unwrap(), [(0x4000, data[0x2800..].to_vec())]);
    let mut last = [0; 8];
    map.memory().read(0x4ff8, &mut last).unwrap();
    assert_eq!(last, [0xf8; 8]);
}

#[test]
fn accesses_outside_regions_fault_at_the_first_missing_byte() {
    let map = map([(0x1000, Region::heap(0x1000))]);
    let memory = map.memory();
    let mut byte = [0];
    for iova in [0, 0xfff, 0x2000, u64::MAX] {
        assert_eq!(memory.read(iova, &mut byte), Err(Fault::Unmapped { iova, len: 1 }));
        assert_eq!(memory.write(iova, &byte), Err(Fault::Unmapped { iova, len: 1 }));
    }
    let beyond = memory.read(0x1fff, &mut [0; 3]);
    assert_eq!(beyond, Err(Fault::Unmapped { iova: 0x2000, len: 2 }));
    assert_eq!(memory.read(u64::MAX, &mut []), Ok(()), "nothing is everywhere");
    assert_eq!(memory.pin(0, 0, Access::Read, &mut Vec::new()), Ok(()));
}

#[test]
fn a_region_may_end_with_the_last_byte_of_the_address_space() {
    let top = 0u64.wrapping_sub(0x1000);
    let mut map = map([(top, Region::heap(0x1000)), (0, Region::heap(0x1000))]);
    assert_eq!(map.add(top, Region::heap(1)), Err(MapError::Overlap));
    assert_eq!(map.add(top + 1, Region::heap(0x1000)), Err(MapError::BadRange));
    assert_eq!(map.add(u64::MAX, Region::heap(1)), Err(MapError::Overlap));
    let memory = map.memory();
    memory.write(u64::MAX, &[9]).unwrap();
    memory.write(0, &[8]).unwrap();
    let mut two = [0; 2];
    memory.read(u64::MAX - 1, &mut two).unwrap();
    assert_eq!(two, [0, 9]);
    let wrapped = memory.read(u64::MAX, &mut two);
    assert!(matches!(wrapped, Err(Fault::Unmapped { .. })), "the address space does not wrap");
    let mut spans = Vec::new();
    memory.pin(top, 0x1000, Access::Write, &mut spans).unwrap();
    assert_eq!(spans[0].slice(0x1000, 0).len(), 0);
    assert!(memory.pin(u64::MAX, 2, Access::Write, &mut spans).is_err());
    assert!(map.remove(top, 0x1000).is_ok());
}

#[test]
fn a_region_is_found_by_each_of_its_addresses() {
    let top = 0u64.wrapping_sub(0x1000);
    let map = map([(0x2000, Region::heap(0x1000)), (top, Region::heap(0x1000))]);
    let found = |iova| map.region_at(iova).map(|(start, region)| (start, region.len()));
    for iova in [0x2000, 0x2fff] {
        assert_eq!(found(iova), Some((0x2000, 0x1000)));
    }
    for iova in [top, u64::MAX] {
        assert_eq!(found(iova), Some((top, 0x1000)));
    }
    for iova in [0, 0x1fff, 0x3000, top - 1] {
        assert_eq!(found(iova), None);
    }
}

#[test]
fn regions_do_not_overlap_and_leave_whole() {
    let mut map = map([(0x2000, Region::heap(0x1000))]);
    for (iova, len) in [(0x1000, 0x1001), (0x2000, 1), (0x2fff, 1), (0x1000, 0x3000)] {
        assert_eq!(map.add(iova, Region::heap(len)), Err(MapError::Overlap));
    }
    assert_eq!(map.add(0x5000, Region::heap(0)), Err(MapError::BadRange));
    map.add(0x1000, Region::heap(0x1000)).unwrap();
    map.add(0x3000, Region::heap(0x1000)).unwrap();
    for (iova, len) in [(0x2000, 0xfff), (0x2000, 0x2000), (0x2001, 0xfff), (0x9000, 1)] {
        assert!(matches!(map.remove(iova, len), Err(MapError::NotMapped)));
    }
    assert!(map.remove(0x2000, 0x1000).is_ok());
    let kept: Vec<u64> = map.regions().iter().map(|(iova, _)| *iova).collect();
    assert_eq!(kept, [0x1000, 0x3000]);
    assert_eq!(map.clear().len(), 2);
    assert!(map.memory().read(0x1000, &mut [0]).is_err());
}

#[test]
fn the_number_of_regions_is_bounded() {
    let mut map = DmaMap::new();
    for index in 0..MAX_REGIONS as u64 {
        map.add(index * 16, Region::heap(8)).unwrap();
    }
    assert_eq!(map.add(1 << 40, Region::heap(8)), Err(MapError::TooMany));
}

#[test]
fn permissions_bind_copies_words_and_spans() {
    let fd = memfd(8192, SealFlags::SHRINK);
    let region = |permissions| Region::mapped(fd.as_fd(), 0, 4096, permissions).unwrap();
    let write_only = Permissions { read: false, write: true };
    let map = map([(0, region(Permissions::READ_ONLY)), (0x1000, region(write_only))]);
    let memory = map.memory();
    let denied = Err(Fault::Denied { iova: 0x1000 });
    assert_eq!(memory.write(0, &[1]), Err(Fault::Denied { iova: 0 }));
    assert_eq!(memory.store_u32(0, 1), Err(Fault::Denied { iova: 0 }));
    assert_eq!(memory.read(0xfff, &mut [0; 2]), denied);
    assert_eq!(memory.load_u32(0x1000).map(drop), denied);
    assert_eq!(memory.pin(0x1000, 1, Access::Read, &mut Vec::new()), denied);
    memory.store_u32(0x1000, 7).unwrap();
    assert_eq!(memory.load_u32(0), Ok(7));
    let mut spans = Vec::new();
    memory.pin(0, 8, Access::Read, &mut spans).unwrap();
    assert_eq!(spans[0].write(4, &[1]), Err(Fault::Denied { iova: 4 }));
}

#[test]
fn words_are_loaded_from_anywhere() {
    let open = memfd(4096, SealFlags::empty());
    let map = map([(0, Region::heap(0x1000)), (0x1000, mapped(&open, 0, 4096))]);
    let memory = map.memory();
    for iova in [0, 1, 2, 3, 4, 0xffe, 0x1000, 0x1001, 0x1ffc] {
        memory.store_u32(iova, 0x0403_0201 + iova as u32).unwrap();
        assert_eq!(memory.load_u32(iova), Ok(0x0403_0201 + iova as u32));
        let mut bytes = [0; 4];
        memory.read(iova, &mut bytes).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), 0x0403_0201 + iova as u32);
    }
    assert!(memory.load_u32(0x1ffd).is_err());
    assert!(memory.store_u32(u64::MAX, 0).is_err());
}

#[test]
fn words_of_spans_are_those_of_the_memory() {
    let file = memfd(4096, SealFlags::empty());
    for (region, guarded) in [(Region::heap(4096), false), (mapped(&file, 0, 4096), true)] {
        assert_eq!(region.is_guarded(), guarded);
        let map = map([(0x1000, region)]);
        let memory = map.memory();
        let mut spans = Vec::new();
        memory.pin(0x1004, 64, Access::Write, &mut spans).unwrap();
        spans[0].store_u32(4, 0x0403_0201).unwrap();
        assert_eq!(memory.load_u32(0x1008), Ok(0x0403_0201));
        memory.write(0x100d, &[9, 8, 7, 6]).unwrap();
        assert_eq!(spans[0].load_u32(9), Ok(0x0607_0809));
        let past = std::panic::AssertUnwindSafe(|| spans[0].load_u32(61));
        assert!(std::panic::catch_unwind(past).is_err());
    }
}

#[test]
fn spans_are_joined_where_they_follow() {
    let fd = memfd(0x4000, SealFlags::SHRINK);
    let map = map([(0x1000, mapped(&fd, 0, 0x2000)), (0x3000, mapped(&fd, 0x2000, 0x2000))]);
    let memory = map.memory();
    let mut spans = Vec::new();
    memory.pin(0x1800, 0x400, Access::Write, &mut spans).unwrap();
    memory.pin(0x1c00, 0x400, Access::Write, &mut spans).unwrap();
    assert_eq!(format!("{spans:?}"), "[Span(0x1800+0x800)]");
    memory.pin(0x2000, 0x2000, Access::Write, &mut spans).unwrap();
    assert_eq!(format!("{spans:?}"), "[Span(0x1800+0x1800), Span(0x3000+0x1000)]");
    spans[1].slice(0x10, 2).write(1, &[5]).unwrap();
    let mut byte = [0];
    memory.read(0x3011, &mut byte).unwrap();
    assert_eq!(byte, [5]);
}

#[test]
fn message_only_memory_has_no_spans() {
    let write_only = Permissions { read: false, write: true };
    let echo: Arc<Echo> = Arc::default();
    let map = map([(0, Region::heap(16)), (16, Region::remote(echo, 16, write_only))]);
    let memory = map.memory();
    let pinned = memory.pin(0, 32, Access::Write, &mut Vec::new());
    assert_eq!(pinned, Err(Fault::Remote { iova: 16 }));
    assert!(memory.is_remote(8, 16) && memory.is_remote(16, 1), "whatever its permissions");
    assert!(!memory.is_remote(0, 16) && !memory.is_remote(32, 8));
}

#[test]
fn removed_memory_is_idle_when_the_last_span_is_gone() {
    let fd = memfd(8192, SealFlags::SHRINK);
    let mut map = map([(0, mapped(&fd, 0, 8192))]);
    let memory = map.memory();
    let mut spans = Vec::new();
    memory.pin(4096, 4096, Access::Write, &mut spans).unwrap();
    let removed = map.remove(0, 8192).unwrap();
    assert!(!removed.is_idle());
    assert!(memory.read(4096, &mut [0]).is_err(), "new accesses fault");
    spans[0].write(0, &[3]).unwrap();
    let part = spans[0].slice(0, 1);
    spans.clear();
    assert!(!removed.is_idle(), "a part counts");
    drop(part);
    assert!(removed.is_idle());
}

#[test]
fn a_view_sees_changes_and_lets_go_when_told() {
    let fd = memfd(8192, SealFlags::SHRINK);
    let mut map = map([(0, mapped(&fd, 0, 4096))]);
    let mut view = View::new(map.memory());
    let mut spans = Vec::new();
    let before = map.memory().version();
    view.pin([(0, 2048), (2048, 2048)].into_iter(), Access::Read, &mut spans).unwrap();
    assert_eq!(format!("{spans:?}"), "[Span(0x0+0x1000)]");
    view.pin([(2048, 8), (0, 8)].into_iter(), Access::Read, &mut spans).unwrap();
    assert_eq!(format!("{spans:?}"), "[Span(0x800+0x8), Span(0x0+0x8)]");
    view.pin([(16, 8)].into_iter(), Access::Read, &mut spans).unwrap();
    assert_eq!(format!("{spans:?}"), "[Span(0x10+0x8)]");
    spans.clear();
    assert_eq!(map.memory().version(), before, "looking changes nothing");
    let removed = map.remove(0, 4096).unwrap();
    assert!(!removed.is_idle(), "the view keeps it");
    view.release();
    assert!(removed.is_idle());
    let gone = view.pin([(0, 1)].into_iter(), Access::Read, &mut spans);
    assert_eq!(gone, Err(Fault::Unmapped { iova: 0, len: 1 }));
    map.add(0, mapped(&fd, 4096, 4096)).unwrap();
    assert!(map.memory().version() > before);
    view.pin([(0, 4096)].into_iter(), Access::Write, &mut spans).unwrap();
    spans[0].write(0, &[4]).unwrap();
    let mut byte = [0];
    rustix::io::pread(&fd, &mut byte, 4096).unwrap();
    assert_eq!(byte, [4]);
}

#[test]
fn a_sealed_memfd_is_unguarded_and_only_when_it_holds_the_range() {
    if crate::backing::overcommit_is_strict() {
        println!("SKIPPED: a_sealed_memfd_is_unguarded: needs vm.overcommit_memory other than 2");
        return;
    }
    let fd = memfd(8192, SealFlags::SHRINK);
    assert!(!mapped(&fd, 0, 8192).is_guarded());
    assert!(mapped(&fd, 4096, 8192).is_guarded());
    assert!(mapped(&memfd(8192, SealFlags::empty()), 0, 8192).is_guarded());
    assert!(mapped(&memfd(8192, SealFlags::GROW), 0, 8192).is_guarded());
}

#[test]
fn files_of_a_mounted_tmpfs_are_guarded_and_those_of_disks_refused() {
    for directory in ["/dev/shm", "/tmp", "/var/tmp"] {
        let Ok(file) = tempfile::tempfile_in(directory) else {
            println!("SKIPPED: guarded file in {directory}: needs to write there");
            continue;
        };
        file.set_len(8192).unwrap();
        match Region::mapped(file.as_fd(), 0, 8192, Permissions::READ_WRITE) {
            Ok(region) => assert!(region.is_guarded()),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::Unsupported),
        }
    }
}

#[test]
fn what_is_no_file_of_memory_is_refused() {
    let mapped = |fd: &dyn AsFd, offset, len| {
        Region::mapped(fd.as_fd(), offset, len, Permissions::READ_WRITE).err().map(|e| e.kind())
    };
    use std::io::ErrorKind::{InvalidInput, Unsupported};
    let zero = std::fs::OpenOptions::new().read(true).write(true).open("/dev/zero").unwrap();
    let proc = std::fs::File::open("/proc/self/status").unwrap();
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    for fd in [&zero as &dyn AsFd, &proc, &pipe] {
        assert_eq!(mapped(fd, 0, 4096), Some(Unsupported));
    }
    let fd = memfd(8192, SealFlags::SHRINK);
    assert_eq!(mapped(&fd, 0, 0), Some(InvalidInput));
    for (offset, len) in [(0, u64::MAX), (u64::MAX, 1), (u64::MAX, u64::MAX), (1 << 62, 1 << 62)] {
        assert!(mapped(&fd, offset, len).is_some(), "{offset:#x}+{len:#x}");
    }
}

#[test]
fn offsets_need_no_alignment() {
    let fd = memfd(0x4000, SealFlags::SHRINK);
    rustix::io::pwrite(&fd, &[1, 2, 3, 4], 0x1ffe).unwrap();
    let map = map([(0x5000, mapped(&fd, 0x1ffe, 4))]);
    let mut bytes = [0; 4];
    map.memory().read(0x5000, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
    assert!(map.memory().read(0x5004, &mut [0]).is_err());
}

#[test]
fn truncated_memory_is_gone_and_raises_no_signal() {
    let fd = memfd(4 * PAGE as u64, SealFlags::empty());
    let map = map([(0, mapped(&fd, 0, 4 * PAGE))]);
    let memory = map.memory();
    let mut spans = Vec::new();
    memory.pin(0, 4 * PAGE, Access::Write, &mut spans).unwrap();
    memory.write(0, &[7; 4 * PAGE]).unwrap();
    rustix::fs::ftruncate(&fd, PAGE as u64).unwrap();
    let iova = PAGE as u64;
    let gone = Err(Fault::Gone { iova });
    let mut bytes = [0; 2 * PAGE];
    assert_eq!(memory.read(iova, &mut bytes), gone);
    assert_eq!(memory.write(iova, &bytes), gone);
    assert_eq!(memory.load_u32(iova), Err(Fault::Gone { iova }));
    assert_eq!(memory.store_u32(iova, 1), gone);
    assert_eq!(spans[0].read(PAGE, &mut bytes), gone);
    assert_eq!(spans[0].write(PAGE, &bytes), gone);
    assert_eq!(memory.read(0, &mut bytes), Err(Fault::Gone { iova: 0 }), "half of it is gone");
    memory.read(0, &mut bytes[..PAGE]).unwrap();
    assert_eq!(bytes[..PAGE], [7; PAGE]);
    rustix::fs::ftruncate(&fd, 4 * PAGE as u64).unwrap();
    memory.read(iova, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 2 * PAGE], "grown again it is zeros");
}

#[test]
fn truncation_races_with_copies() {
    const LEN: usize = 64 * PAGE;
    let fd = memfd(LEN as u64, SealFlags::empty());
    let map = map([(0, mapped(&fd, 0, LEN))]);
    let memory = map.memory();
    let stop = AtomicBool::new(false);
    let (mut whole, mut gone) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                rustix::fs::ftruncate(&fd, PAGE as u64).unwrap();
                rustix::fs::ftruncate(&fd, LEN as u64).unwrap();
            }
        });
        let mut bytes = vec![1; LEN];
        for round in 0.. {
            let done = [memory.write(0, &bytes), memory.read(0, &mut bytes)];
            for result in done {
                match result {
                    Ok(()) => whole += 1,
                    Err(Fault::Gone { iova: 0 }) => gone += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            // Enough of both outcomes, or so many rounds that one of them never happens here.
            if round > 200 && (whole > 0 && gone > 0) || round > 20_000 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!("{whole} copies whole, {gone} gone");
    assert!(whole + gone > 400);
}

#[test]
fn holes_of_a_sealed_memfd_read_as_zeros() {
    let fd = memfd(16 * PAGE as u64, SealFlags::SHRINK);
    let map = map([(0, mapped(&fd, 0, 16 * PAGE))]);
    map.memory().write(0, &[1; 16 * PAGE]).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&fd, punch, 0, 8 * PAGE as u64).unwrap();
    let mut bytes = [9; 2];
    map.memory().read(8 * PAGE as u64 - 1, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 1]);
}

#[test]
fn huge_pages_are_guarded_and_need_no_aligned_range() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let size = 2 << 20;
    let fd = rustix::fs::memfd_create("huge", flags | MemfdFlags::HUGE_2MB);
    let Some(fd) = fd.ok().filter(|fd| rustix::fs::ftruncate(fd, size).is_ok()) else {
        println!("SKIPPED: huge_pages_are_guarded: needs hugetlbfs");
        return;
    };
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    let region = Region::mapped(fd.as_fd(), 0x3000, 0x1000, Permissions::READ_WRITE).unwrap();
    assert!(region.is_guarded());
    let map = map([(0, region)]);
    // No page was reserved for the mapping: with the pool empty, a touch is a fault and no SIGBUS.
    if let Err(fault) = map.memory().write(0xffc, &[1, 2, 3, 4]) {
        assert!(matches!(fault, Fault::Gone { .. }), "{fault}");
        println!("SKIPPED: huge_pages_are_guarded: needs a free huge page (vm.nr_hugepages)");
        return;
    }
    let mut bytes = [0; 4];
    map.memory().read(0xffc, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
}

#[test]
fn another_thread_sees_regions_come_and_go() {
    let mut map = DmaMap::new();
    let memory = map.memory();
    let stop = Arc::new(AtomicBool::new(false));
    let reader = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let mut seen = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let mut word = [0; 8];
                match memory.read(0x1000, &mut word) {
                    Ok(()) => seen += u64::from(word == [0; 8]),
                    Err(fault) => assert_eq!(fault, Fault::Unmapped { iova: 0x1000, len: 8 }),
                }
            }
            seen
        }
    });
    let fd = memfd(4096, SealFlags::SHRINK);
    for _ in 0..2_000 {
        map.add(0x1000, mapped(&fd, 0, 4096)).unwrap();
        let removed = map.remove(0x1000, 4096).unwrap();
        // A reader with the old table may still hold the mapping for a moment.
        while !removed.is_idle() {
            std::thread::yield_now();
        }
    }
    stop.store(true, Ordering::Relaxed);
    reader.join().unwrap();
}

#[test]
fn half_words_of_a_span_are_loaded_and_stored_alone() {
    let open = memfd(4096, SealFlags::empty());
    let map = map([(0, mapped(&open, 0, 4096)), (0x1000, Region::heap(0x1000))]);
    let mut spans = Vec::new();
    map.memory().pin(0, 0x2000, Access::Write, &mut spans).unwrap();
    for span in &spans {
        span.write(0, &[0xee; 8]).unwrap();
        span.store_u16(2, 0x0201).unwrap();
        let mut around = [0; 8];
        span.read(0, &mut around).unwrap();
        assert_eq!(around, [0xee, 0xee, 1, 2, 0xee, 0xee, 0xee, 0xee]);
        assert_eq!(span.load_u16(2), Ok(0x0201));
        assert_eq!(span.load_u16(3), Ok(0xee02));
    }
    rustix::fs::ftruncate(&open, 0).unwrap();
    assert_eq!(spans[0].load_u16(4), Err(Fault::Gone { iova: 4 }));
    assert_eq!(spans[0].store_u16(4, 1), Err(Fault::Gone { iova: 4 }));
}

#[test]
fn a_window_follows_the_map() {
    let mut map = map([(0x1000, Region::heap(0x1000))]);
    let memory = map.memory();
    let mut window = Window::new(0x1800, 0x800, Access::Write);
    assert_eq!(window.span(&memory).unwrap().iova(), 0x1800);
    memory.write(0x1804, &[7]).unwrap();
    let mut byte = [0];
    window.read(&memory, 4, &mut byte).unwrap();
    assert_eq!(byte, [7]);
    window.release();
    assert!(map.remove(0x1000, 0x1000).unwrap().is_idle(), "a window that was released");
    assert!(window.span(&memory).is_none());
    assert!(window.read(&memory, 4, &mut byte).is_err());
    // A window across two regions can be read, but has no single span.
    map.add(0x1000, Region::heap(0x900)).unwrap();
    map.add(0x1900, Region::heap(0x700)).unwrap();
    memory.write(0x1900, &[9]).unwrap();
    window.read(&memory, 0x100, &mut byte).unwrap();
    assert_eq!((byte, window.span(&memory).is_none()), ([9], true));
}

#[test]
fn around_a_span_is_memory_of_its_mapping() {
    const GRANULE: usize = 0x4000;
    let fd = memfd(0xf000, SealFlags::SHRINK);
    let whole = Span::file(fd.as_fd(), 0x1000, 0xd000).unwrap();
    let base = whole.io_vector().0.addr();
    for offset in (0..0xd000).step_by(0x800) {
        let around = whole.slice(offset, 0x800).around(GRANULE).unwrap();
        let (address, len) = around.io_vector();
        let first = (base + offset) / GRANULE * GRANULE;
        assert_eq!(address.addr(), first.max(base));
        assert_eq!(address.addr() + len, (first + GRANULE).min(base + 0xd000));
    }
    // Offset of the first multiple of the granule inside the mapping, wherever the kernel put it.
    let edge = (base + 1).next_multiple_of(GRANULE) - base;
    assert!(whole.slice(edge, GRANULE).around(GRANULE).is_some());
    assert!(whole.slice(edge, GRANULE + 1).around(GRANULE).is_none());
    assert!(whole.slice(edge - 1, 2).around(GRANULE).is_none());
    assert!(Span::heap(64).around(GRANULE).is_none());
    let open = memfd(0x1000, SealFlags::empty());
    let guarded = Span::file(open.as_fd(), 0, 0x1000).unwrap();
    assert!(guarded.around(GRANULE).is_none());
}
