use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use slipway_vfio_user::testing::{DONE, FAULT};
use slipway_vfio_user::{Admission, MemoryFile, RegionKind};

use crate::common::*;

/// Returns the identity of a file.
pub fn identity(file: impl AsFd) -> MemoryFile {
    let status = rustix::fs::fstat(file).unwrap();
    MemoryFile { device: status.st_dev, inode: status.st_ino }
}

/// Has the function copy, and returns its status.
pub fn copy(raw: &mut Raw, from: u64, to: u64, len: u32) -> u32 {
    for (offset, value) in [(0x40, from), (0x48, to)] {
        let payload = [access(0, offset, 8).as_bytes(), &value.to_le_bytes()].concat();
        raw.call(Command::RegionWrite, &payload).ok();
    }
    raw.write_u32(0x50, len);
    raw.write_u32(0x54, 1);
    raw.read_u32(0x54)
}

#[test]
fn the_device_reaches_what_is_mapped_and_nothing_else() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x4000);
    pwrite(&guest, 0x1000, b"payload");
    raw.map(0x10_0000, 0x4000, guest.as_fd()).ok();
    assert_eq!(copy(&mut raw, 0x10_1000, 0x10_3000, 7), DONE);
    assert_eq!(pread(&guest, 0x3000, 7), b"payload");
    assert_eq!(copy(&mut raw, 0x10_1000, 0x10_3ffc, 7), FAULT, "past the end");
    assert_eq!(copy(&mut raw, 0, 0x10_3000, 7), FAULT);
    let stats = served.control.stats();
    let region = stats.regions[0];
    assert_eq!((region.iova, region.len, region.kind), (0x10_0000, 0x4000, RegionKind::Mapped));
    assert!(stats.dma_map_ns > 0);
    assert_eq!(stats.first_dma_map_at, stats.last_dma_map_at);
}

#[test]
fn rights_and_offsets_hold() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x3000);
    pwrite(&guest, 0x1000, b"readable");
    let mut readable = dma_map(0, 0x1000);
    readable.flags = U32::new(1);
    readable.offset = U64::new(0x1000);
    raw.call_with(Command::DmaMap, readable.as_bytes(), &[guest.as_fd()]).ok();
    let mut writable = dma_map(0x1000, 0x1000);
    writable.flags = U32::new(2);
    writable.offset = U64::new(0x2000);
    raw.call_with(Command::DmaMap, writable.as_bytes(), &[guest.as_fd()]).ok();
    assert_eq!(copy(&mut raw, 0, 0x1000, 8), DONE);
    assert_eq!(pread(&guest, 0x2000, 8), b"readable");
    assert_eq!(copy(&mut raw, 0, 0, 8), FAULT);
    assert_eq!(copy(&mut raw, 0x1000, 0x1000, 8), FAULT);
}

#[test]
fn memory_that_is_taken_away_is_the_clients_fault_alone() {
    let served = serve();
    let mut raw = served.client();
    let file = rustix::fs::memfd_create("shrinks", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 0x2000).unwrap();
    raw.map(0, 0x2000, file.as_fd()).ok();
    assert_eq!(served.control.stats().regions[0].kind, RegionKind::Guarded);
    assert_eq!(copy(&mut raw, 0, 0x1000, 64), DONE);
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert_eq!(copy(&mut raw, 0, 0x1000, 64), FAULT);
    assert!(raw.is_alive());
}

#[test]
fn bad_requests_are_refused() {
    let served = serve_with(|config| config.max_dma_bytes = 1 << 30);
    let mut raw = served.client();
    let guest = memory(0x2000);
    raw.map(0x1000, 0x2000, guest.as_fd()).ok();
    let mut case = |what: &str, errno, change: &dyn Fn(&mut spec::DmaMap)| {
        let mut request = dma_map(0x10_0000, 0x1000);
        change(&mut request);
        let reply = raw.call_with(Command::DmaMap, request.as_bytes(), &[guest.as_fd()]);
        assert_eq!(reply.err(), errno, "{what}");
    };
    case("argsz", Errno::INVAL, &|r| r.argsz = U32::new(31));
    case("no right", Errno::INVAL, &|r| r.flags = U32::new(0));
    case("unknown flag", Errno::INVAL, &|r| r.flags = U32::new(0x13));
    case("file I/O only", Errno::NOTSUP, &|r| r.flags = U32::new(0xb));
    case("empty", Errno::INVAL, &|r| r.size = U64::new(0));
    case("address unaligned", Errno::INVAL, &|r| r.address = U64::new(0x10_0800));
    case("size unaligned", Errno::INVAL, &|r| r.size = U64::new(0x1001));
    case("offset unaligned", Errno::INVAL, &|r| r.offset = U64::new(1));
    case("address wraps", Errno::INVAL, &|r| r.address = U64::new(!0xfff));
    case("size wraps", Errno::INVAL, &|r| r.size = U64::new(!0xfff));
    case("offset wraps", Errno::INVAL, &|r| r.offset = U64::new(!0xfff));
    case("starts past the file", Errno::INVAL, &|r| r.offset = U64::new(0x2000));
    case("ends past the file", Errno::INVAL, &|r| r.size = U64::new(0x3000));
    case("same range", Errno::EXIST, &|r| {
        (r.address, r.size) = (U64::new(0x1000), U64::new(0x2000));
    });
    case("overlaps the end", Errno::EXIST, &|r| r.address = U64::new(0x2000));
    case("huge", Errno::NOMEM, &|r| r.size = U64::new(1 << 40));
    for bad in [&[0; 31][..], &[0; 33], &[]] {
        assert_eq!(raw.call(Command::DmaMap, bad).err(), Errno::INVAL);
    }
    assert_eq!(served.control.stats().regions.len(), 1);
}

#[test]
fn a_file_may_end_within_the_last_page() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x1800);
    raw.map(0, 0x2000, guest.as_fd()).ok();
    assert_eq!(copy(&mut raw, 0, 0x1000, 64), DONE);
}

#[test]
fn only_memory_is_mapped() {
    let served = serve();
    let mut raw = served.client();
    let pipe = rustix::pipe::pipe().unwrap().0;
    let proc = std::fs::File::open("/proc/self/maps").unwrap();
    let interrupt = event();
    for file in
        [pipe.as_fd(), proc.as_fd(), interrupt.as_fd(), raw.socket.try_clone().unwrap().as_fd()]
    {
        assert_eq!(raw.map(0, 0x1000, file).err(), Errno::INVAL);
    }
    let guest = memory(0x1000);
    let two = [guest.as_fd(), guest.as_fd()];
    let reply = raw.call_with(Command::DmaMap, dma_map(0, 0x1000).as_bytes(), &two);
    assert_eq!(reply.err(), Errno::INVAL);
    use rustix::fs::SealFlags;
    rustix::fs::fcntl_add_seals(&guest, SealFlags::FUTURE_WRITE).unwrap();
    assert_eq!(raw.map(0, 0x1000, guest.as_fd()).err(), Errno::PERM);
}

/// A client that passes one file after the other would have the server charged for each.
#[test]
fn where_one_file_is_named_no_other_is_mapped() {
    let (own, other) = (memory(0x4000), memory(0x4000));
    let served = serve_with(|config| {
        config.memory_file = Some(identity(&own));
        config.max_dma_bytes = 0x6000;
    });
    let mut raw = served.client();
    for iova in [0, 0x4000] {
        assert_eq!(raw.map(iova, 0x4000, other.as_fd()).err(), Errno::ACCESS);
    }
    raw.map(0, 0x4000, own.as_fd()).ok();
    // Mapping the same memory again counts towards the limit, too.
    assert_eq!(raw.map(0x10_0000, 0x4000, own.as_fd()).err(), Errno::NOMEM);
    raw.map(0x10_0000, 0x2000, own.as_fd()).ok();
    assert_eq!(copy(&mut raw, 0, 0x2000, 64), DONE);
    assert_eq!(served.control.stats().regions.len(), 2);
}

/// An endpoint that was made before its client was known admits that client's memory alone.
#[test]
fn an_endpoint_is_opened_for_one_clients_memory() {
    let (own, other) = (memory(0x4000), memory(0x4000));
    let served = serve_with(|config| config.shut = true);
    let admission = Admission {
        owner: None,
        max_dma_bytes: 0x6000,
        memory_file: Some(identity(&own)),
        shared_file: None,
    };
    served.control.open_for(admission).unwrap();
    let mut raw = served.client();
    assert_eq!(raw.map(0, 0x4000, other.as_fd()).err(), Errno::ACCESS);
    raw.map(0, 0x4000, own.as_fd()).ok();
    assert_eq!(raw.map(0x10_0000, 0x4000, own.as_fd()).err(), Errno::NOMEM);
    // For the next client, and not for this one.
    let others = Admission { memory_file: Some(identity(&other)), ..admission };
    served.control.open_for(others).unwrap();
    assert_eq!(raw.map(0x10_0000, 0x1000, other.as_fd()).err(), Errno::ACCESS);
    drop(raw);
    let mut raw = served.client();
    assert_eq!(raw.map(0, 0x4000, own.as_fd()).err(), Errno::ACCESS);
    raw.map(0, 0x4000, other.as_fd()).ok();
}

/// Recycled memory is the next user's, whatever messages of the last one were not read yet.
#[test]
fn memory_that_was_given_again_is_not_its_last_users() {
    use slipway_ram::{GRANULE, LateFiles, LateMemory};
    let late = LateFiles::default();
    let (file, len) = (memory(GRANULE as u64), GRANULE as u64);
    let serve = || {
        serve_with(|config| {
            (config.late, config.memory_file) = (late.clone(), Some(identity(&file)));
        })
    };
    let (last, next) = (serve(), serve());
    let lent = Arc::new(LateMemory::new(file.try_clone().unwrap()).unwrap());
    late.add(&lent);
    let mut last = last.client();
    last.map(0, len, file.as_fd()).ok();
    late.remove(&lent);
    late.add(&lent);
    assert_eq!(last.map(len, len, file.as_fd()).err(), Errno::ACCESS);
    next.client().map(0, len, file.as_fd()).ok();
}

/// Makes a file that nobody can change, opened for reading only.
fn image() -> OwnedFd {
    use rustix::fs::SealFlags;
    let image = memory(0x4000);
    pwrite(&image, 0x1000, &[7; 64]);
    let seals = SealFlags::SHRINK | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&image, seals).unwrap();
    std::fs::File::open(format!("/proc/self/fd/{}", image.as_raw_fd())).unwrap().into()
}

/// Returns how often this process has a file in memory mapped.
fn mappings(file: &OwnedFd) -> usize {
    let inode = identity(file).inode.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of_file = |line: &&str| line.split_whitespace().nth(4) == Some(&inode);
    maps.lines().filter(of_file).count()
}

/// Another user's file of huge pages can have the device and inode number of late memory, or of a
/// file that others share. The very files stand for such files here.
#[test]
fn where_no_file_is_named_none_is_known_by_its_numbers() {
    use slipway_ram::{GRANULE, LateFiles, LateMemory};
    let (late, len) = (LateFiles::default(), GRANULE as u64);
    let file = memory(len);
    let lent = Arc::new(LateMemory::new(file.try_clone().unwrap()).unwrap());
    late.add(&lent);
    // It can be mapped by a process that knows the file, and not by this descriptor.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let token: OwnedFd = std::fs::File::options().write(true).open(path).unwrap().into();
    let others = [(); 2].map(|()| serve_with(|config| config.late = late.clone()));
    let mut others = others.each_ref().map(|served| served.client());
    assert_eq!(others[0].map(0, len, token.as_fd()).err(), Errno::ACCESS);
    let named = serve_with(|config| {
        (config.late, config.memory_file) = (late.clone(), Some(identity(&file)));
    });
    named.client().map(0, len, token.as_fd()).ok();
    let image = image();
    let mut request = dma_map(0x10_0000, 0x4000);
    request.flags = U32::new(spec::DmaMapFlags::READ.bits());
    for raw in &mut others {
        raw.call_with(Command::DmaMap, request.as_bytes(), &[image.as_fd()]).ok();
    }
    assert_eq!(mappings(&image), 2, "one for each client");
}

/// Pages that a guest shares with others, and that its devices may read and nothing else.
#[test]
fn a_shared_file_is_read_and_never_written() {
    let (own, image) = (memory(0x4000), image());
    let files = slipway_ram::LateFiles::default();
    let served = [(); 2].map(|()| {
        serve_with(|config| {
            config.memory_file = Some(identity(&own));
            config.shared_file = Some(identity(&image));
            config.late = files.clone();
        })
    });
    let mut clients = served.each_ref().map(|served| served.client());
    let mut request = dma_map(0x10_0000, 0x4000);
    request.flags = U32::new(spec::DmaMapFlags::READ.bits());
    for raw in &mut clients {
        raw.map(0, 0x4000, own.as_fd()).ok();
        let to_be_written = raw.map(0x10_0000, 0x4000, image.as_fd());
        assert_eq!(to_be_written.err(), Errno::ACCESS);
        raw.call_with(Command::DmaMap, request.as_bytes(), &[image.as_fd()]).ok();
        assert_eq!(copy(raw, 0x10_1000, 0x1000, 64), DONE);
        assert_eq!(pread(&own, 0x1000, 64), [7; 64]);
        assert_eq!(copy(raw, 0, 0x10_1000, 64), FAULT);
    }
    assert_eq!(mappings(&image), 1, "by two clients");
    for (raw, served) in clients.iter_mut().zip(&served) {
        raw.call(Command::DmaUnmap, dma_unmap(0x10_0000, 0x4000).as_bytes()).ok();
        assert_eq!(copy(raw, 0x10_1000, 0x1000, 64), FAULT);
        assert_eq!(served.control.stats().regions.len(), 1);
    }
}

#[test]
fn the_number_of_maps_is_bounded() {
    let served = serve();
    let mut raw = served.client();
    let mut mapped = 0u64;
    loop {
        // Read-only and without a descriptor: cheap to make.
        let mut request = dma_map(mapped * 0x1000, 0x1000);
        request.flags = U32::new(1);
        let reply = raw.call(Command::DmaMap, request.as_bytes());
        if reply.header.errno().is_some() {
            assert_eq!(reply.err(), Errno::NOSPC);
            break;
        }
        mapped += 1;
        assert!(mapped < 10_000);
    }
    assert_eq!(mapped, 4096);
}
