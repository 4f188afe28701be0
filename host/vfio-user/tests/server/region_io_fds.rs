use std::os::fd::{AsFd, OwnedFd};

use slipway_vfio_user::testing::NOTIFIED;
use spec::{RegionIoFds, SubRegion, io_fd};

use crate::common::*;

/// The number of the test function's notification registers.
const NOTIFICATIONS: usize = 2;

fn request(index: u32, argsz: u32) -> RegionIoFds {
    RegionIoFds { argsz: U32::new(argsz), index: U32::new(index), ..RegionIoFds::default() }
}

fn ask(raw: &mut Raw, request: &RegionIoFds) -> Reply {
    raw.call(Command::DeviceGetRegionIoFds, request.as_bytes())
}

/// Returns the sub-regions of region 0, and the descriptors.
fn sub_regions(raw: &mut Raw) -> (Vec<SubRegion>, Vec<OwnedFd>) {
    let reply = ask(raw, &request(0, 4096));
    assert_eq!(reply.header.errno(), None);
    let (head, rest) = RegionIoFds::read_from_prefix(&reply.payload).unwrap();
    assert_eq!(head.argsz.get() as usize, reply.payload.len());
    assert_eq!((head.flags.get(), head.index.get()), (0, 0));
    let all: Vec<_> =
        rest.chunks(48).map(|bytes| SubRegion::read_from_bytes(bytes).unwrap()).collect();
    assert_eq!(head.count.get() as usize, all.len());
    (all, reply.files)
}

/// Routes the interrupt of notifications.
fn routed(raw: &mut Raw) -> OwnedFd {
    let file = event();
    let flags = spec::IrqSetFlags::DATA_EVENTFD | spec::IrqSetFlags::TRIGGER;
    let request = spec::IrqSet {
        argsz: U32::new(20),
        flags: U32::new(flags.bits()),
        index: U32::new(spec::irq::MSIX),
        start: U32::new(NOTIFIED as u32),
        count: U32::new(1),
    };
    raw.call_with(Command::DeviceSetIrqs, request.as_bytes(), &[file.as_fd()]).ok();
    file
}

fn raise(file: &OwnedFd) {
    rustix::io::write(file, &1_u64.to_ne_bytes()).unwrap();
}

#[test]
fn notifications_share_one_eventfd() {
    let served = serve();
    let (all, files) = sub_regions(&mut served.client());
    assert_eq!(files.len(), 1);
    let offsets: Vec<_> = all.iter().map(|one| one.offset.get()).collect();
    assert_eq!(offsets, [0x3800, 0x3808]);
    for one in &all {
        let kind = (one.kind.get(), one.fd_index.get(), one.size.get(), one.flags.get());
        assert_eq!(kind, (io_fd::IOEVENTFD, 0, 0, 0));
    }
}

#[test]
fn an_event_is_a_notification() {
    let served = serve();
    let mut raw = served.client();
    let told = routed(&mut raw);
    let (_, files) = sub_regions(&mut raw);
    let messages = served.control.stats().messages;
    for _ in 0..3 {
        raise(&files[0]);
        eventually("the function is told", || count(&told) > 0);
    }
    assert_eq!(served.control.stats().messages, messages);
    assert!(raw.is_alive());
}

#[test]
fn a_second_request_gives_the_same_eventfd() {
    let served = serve();
    let mut raw = served.client();
    let told = routed(&mut raw);
    let (_, first) = sub_regions(&mut raw);
    let (_, second) = sub_regions(&mut raw);
    raise(&first[0]);
    eventually("the function is told", || count(&told) > 0);
    raise(&second[0]);
    eventually("the function is told", || count(&told) > 0);
}

#[test]
fn a_former_clients_eventfd_rings_for_nobody() {
    let served = serve();
    let mut raw = served.client();
    let (_, old) = sub_regions(&mut raw);
    drop(raw);
    eventually("the client is gone", || served.control.stats().client.is_none());
    let mut raw = served.client();
    let told = routed(&mut raw);
    let (_, new) = sub_regions(&mut raw);
    raise(&old[0]);
    raise(&new[0]);
    eventually("the function is told", || count(&told) > 0);
    assert_eq!(count(&old[0]), 1, "nobody has read it");
    assert!(raw.is_alive());
}

/// The endpoint has the same open eventfd: a client that makes it blocking, and empties it at any
/// time, must not make the endpoint wait.
#[test]
fn a_blocking_eventfd_holds_nobody_up() {
    let served = serve();
    let mut raw = served.client();
    let (_, files) = sub_regions(&mut raw);
    rustix::fs::fcntl_setfl(&files[0], rustix::fs::OFlags::RDWR).unwrap();
    for _ in 0..1000 {
        raise(&files[0]);
        rustix::fs::fcntl_setfl(&files[0], rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NONBLOCK)
            .unwrap();
        count(&files[0]);
        rustix::fs::fcntl_setfl(&files[0], rustix::fs::OFlags::RDWR).unwrap();
        assert!(raw.is_alive());
    }
}

#[test]
fn room_that_is_too_small_gets_the_size_and_no_descriptor() {
    let served = serve();
    let mut raw = served.client();
    let full = 16 + NOTIFICATIONS as u32 * 48;
    for room in [16, full - 1] {
        let reply = ask(&mut raw, &request(0, room));
        assert!(reply.files.is_empty());
        let head: RegionIoFds = reply.read();
        assert_eq!((head.argsz.get(), head.count.get()), (full, NOTIFICATIONS as u32));
    }
    assert_eq!(ask(&mut raw, &request(0, full)).files.len(), 1);
}

#[test]
fn a_region_without_such_registers_has_none() {
    let served = serve();
    let mut raw = served.client();
    for index in (1..spec::region::COUNT).rev() {
        let reply = ask(&mut raw, &request(index, 4096));
        assert!(reply.files.is_empty());
        let head: RegionIoFds = reply.read();
        assert_eq!((head.argsz.get(), head.count.get(), head.index.get()), (16, 0, index));
    }
}

#[test]
fn bad_requests_are_refused() {
    let served = serve();
    let mut raw = served.client();
    let mut refused = |request: &[u8]| {
        assert_eq!(raw.call(Command::DeviceGetRegionIoFds, request).err(), Errno::INVAL);
    };
    refused(request(spec::region::COUNT, 4096).as_bytes());
    refused(request(u32::MAX, 4096).as_bytes());
    refused(request(0, 15).as_bytes());
    refused(RegionIoFds { flags: U32::new(1), ..request(0, 4096) }.as_bytes());
    refused(RegionIoFds { count: U32::new(1), ..request(0, 4096) }.as_bytes());
    refused(&request(0, 4096).as_bytes()[..15]);
    refused(&[request(0, 4096).as_bytes(), &[0]].concat());
    assert!(raw.is_alive());
}

#[test]
fn a_rung_doorbell_needs_no_message() {
    let served = serve_with(|config| config.doorbells = DoorbellMode::Rung);
    let mut raw = served.client();
    let (all, files) = sub_regions(&mut raw);
    assert_eq!(files.len(), 2, "the eventfd and the page");
    let bells = &all[NOTIFICATIONS..];
    assert_eq!(bells.len(), slipway_vfio_user::testing::DOORBELLS);
    for (at, one) in (0x1000..).step_by(4).zip(bells) {
        assert_eq!((one.offset.get(), one.size.get(), one.flags.get()), (at, 4, 0));
        assert_eq!(one.kind.get(), io_fd::IOEVENTFD_SHADOW);
        assert_eq!((one.fd_index.get(), one.shadow_fd_index.get()), (0, 1));
    }
    let guest = memory(0x2000);
    pwrite(&guest, 0, b"rung");
    raw.map(0, 0x2000, guest.as_fd()).ok();
    for (register, value) in [(0x40, 0), (0x48, 0x1000), (0x50, 4)] {
        raw.write_u32(register, value);
    }
    let messages = served.control.stats().messages;
    pwrite(&files[1], bells[0].shadow_offset.get(), &7_u32.to_le_bytes());
    raise(&files[0]);
    eventually("the doorbell is seen", || pread(&guest, 0x1000, 4) == b"rung");
    assert_eq!(served.control.stats().messages, messages);
    // A client that does not know of the page rings by a message.
    pwrite(&guest, 0, b"told");
    raw.write_u32(0x1000, 8);
    assert_eq!(pread(&guest, 0x1000, 4), b"told");
}

#[test]
fn a_rung_page_is_not_for_the_guest() {
    let served = serve_with(|config| config.doorbells = DoorbellMode::Rung);
    let mut raw = served.client();
    let request = spec::RegionInfo { argsz: U32::new(4096), ..spec::RegionInfo::default() };
    let reply = raw.call(Command::DeviceGetRegionInfo, request.as_bytes());
    assert!(reply.files.is_empty());
    let info: spec::RegionInfo = reply.read();
    assert_eq!(info.flags.get(), (spec::RegionFlags::READ | spec::RegionFlags::WRITE).bits());
}

/// Without a larger limit, a message to the client carries one descriptor (*VFIO_USER_VERSION*).
#[test]
fn a_client_that_takes_one_descriptor_gets_the_notifications_only() {
    let served = serve_with(|config| config.doorbells = DoorbellMode::Rung);
    let mut raw = served.connect();
    raw.call(Command::Version, &[0, 0, 1, 0]).ok();
    let (all, files) = sub_regions(&mut raw);
    assert_eq!((all.len(), files.len()), (NOTIFICATIONS, 1));
}
