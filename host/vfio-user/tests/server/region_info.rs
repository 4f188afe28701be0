use crate::common::*;

fn ask(raw: &mut Raw, index: u32, argsz: u32) -> Reply {
    let request =
        spec::RegionInfo { argsz: U32::new(argsz), index: U32::new(index), ..Default::default() };
    raw.call(Command::DeviceGetRegionInfo, request.as_bytes())
}

#[test]
fn every_region_is_described() {
    let served = serve();
    let mut raw = served.client();
    for index in 0..spec::region::COUNT {
        let (size, flags) = match index {
            0 => (0x4000, 3),
            spec::region::CONFIG => (4096, 3),
            _ => (0, 0),
        };
        let reply = ask(&mut raw, index, 32);
        assert!(reply.files.is_empty(), "trapped doorbells are not mapped");
        let info: spec::RegionInfo = reply.read();
        assert_eq!((info.size.get(), info.flags.get()), (size, flags), "region {index}");
        assert_eq!((info.argsz.get(), info.index.get()), (32, index));
        assert_eq!(info.cap_offset.get(), 0);
    }
    assert_eq!(ask(&mut raw, spec::region::COUNT, 32).err(), Errno::INVAL);
    assert_eq!(ask(&mut raw, u32::MAX, 32).err(), Errno::INVAL);
    assert_eq!(ask(&mut raw, 0, 31).err(), Errno::INVAL);
    assert_eq!(raw.call(Command::DeviceGetRegionInfo, &[0; 31]).err(), Errno::INVAL);
}

/// SPDK sends a request that is as long as the reply may be.
#[test]
fn a_request_may_be_as_long_as_the_reply() {
    let served = serve_with(|config| config.doorbells = DoorbellMode::Mapped);
    let mut raw = served.client();
    let request = spec::RegionInfo { argsz: U32::new(4064), ..Default::default() };
    let long = [request.as_bytes(), &[0; 4032]].concat();
    let reply = raw.call(Command::DeviceGetRegionInfo, &long);
    assert_eq!((reply.files.len(), reply.payload.len()), (1, 64));
    assert_eq!(reply.payload, ask(&mut raw, 0, 64).payload);
}

#[test]
fn mapped_doorbells_come_as_a_sparse_area_with_a_descriptor() {
    let served = serve_with(|config| config.doorbells = DoorbellMode::Mapped);
    let mut raw = served.client();
    // With too little room, the reply holds the required size and no descriptor.
    let reply = ask(&mut raw, 0, 32);
    assert!(reply.files.is_empty());
    let info: spec::RegionInfo = reply.read();
    assert_eq!((info.argsz.get(), info.flags.get(), info.cap_offset.get()), (64, 15, 32));
    let reply = ask(&mut raw, 0, 64);
    assert_eq!((reply.files.len(), reply.payload.len()), (1, 64));
    drop(reply);

    let mut client = {
        drop(raw);
        eventually("cleared away", || served.control.stats().client.is_none());
        Client::connect(&served.path, PATIENCE).unwrap()
    };
    let region = client.region(0).unwrap();
    assert_eq!(region.areas, [(0x1000, 0x1000)]);
    let file = region.file.unwrap();
    assert!(rustix::fs::ftruncate(&file, 0).is_err(), "sealed");

    // A store rings the doorbell: the function copies and interrupts.
    let (guest, interrupt) = (memory(0x2000), event());
    pwrite(&guest, 0, b"by doorbell");
    client.map(0, 0x2000, guest.as_fd(), 0, true).unwrap();
    client.route_irqs(spec::irq::MSIX, 0, 1, &[interrupt.as_fd()]).unwrap();
    client.write(0, 0x40, &0u64.to_le_bytes()).unwrap();
    client.write(0, 0x48, &0x1000u64.to_le_bytes()).unwrap();
    client.write(0, 0x50, &11u32.to_le_bytes()).unwrap();
    pwrite(&file, region.file_offset + 0x1000, &5u32.to_le_bytes());
    eventually("the interrupt", || count(&interrupt) > 0);
    assert_eq!(pread(&guest, 0x1000, 11), b"by doorbell");
}

#[test]
fn a_client_rings_through_a_window_where_it_may_map_one() {
    let trapped = serve();
    let mut client = Client::connect(&trapped.path, PATIENCE).unwrap();
    assert!(client.window(0, 0x1000).unwrap().is_none());

    let served = serve_with(|config| config.doorbells = DoorbellMode::Mapped);
    let mut client = Client::connect(&served.path, PATIENCE).unwrap();
    assert!(client.window(0, 0).unwrap().is_none(), "registers beside the area");
    assert!(client.window(0, 0x2000).unwrap().is_none(), "behind the area");
    let window = client.window(0, 0x1000).unwrap().unwrap();
    let (guest, interrupt) = (memory(0x2000), event());
    client.map(0, 0x2000, guest.as_fd(), 0, true).unwrap();
    client.route_irqs(spec::irq::MSIX, 0, 1, &[interrupt.as_fd()]).unwrap();
    window.store_u32(0x1000, 5);
    eventually("the interrupt", || count(&interrupt) > 0);
    assert_eq!(window.load_u32(0x1000), 5);
    for bad in [0xffc, 0x1001, 0x2000, 0x1ffe, u64::MAX - 3] {
        let outside = std::panic::AssertUnwindSafe(|| window.load_u32(bad));
        assert!(std::panic::catch_unwind(outside).is_err(), "{bad:#x}");
    }
}

use std::os::fd::AsFd;
