//! A function that Slipway's server presents.

use std::os::fd::AsFd;

use slipway_vfio_user::DoorbellMode;
use slipway_vfio_user::testing::{DONE, DOORBELLS, FAULT, ID, NOTIFIED, PIN_OFF, PIN_ON, VECTORS};
use slipway_vfio_user_client::{ConnectionState, FunctionError};
use slipway_vfio_user_spec::{irq, region};

use crate::common::*;

#[test]
fn its_shape_is_known() {
    let served = serve(DoorbellMode::Mapped);
    let function = served.connect();
    let regions = function.regions();
    assert_eq!(regions.len(), region::COUNT as usize);
    assert_eq!((regions[0].size, regions[0].areas.as_slice()), (0x4000, &[(0x1000, 0x1000)][..]));
    assert_eq!((regions[1].size, regions[region::CONFIG as usize].size), (0, 4096));
    assert_eq!((function.vectors().count, function.pin().count), (u32::from(VECTORS), 1));
    assert_eq!(function.state(), ConnectionState::Connected);
    assert_eq!(function.connections(), 1);
    assert!(!is_readable(&function));
    let (file, offset) = function.file(0).unwrap().unwrap();
    assert!(rustix::fs::fstat(&file).unwrap().st_size as u64 >= offset + 0x2000);
    assert!(function.file(1).unwrap().is_none());
}

#[test]
fn every_thread_reads_what_it_wrote() {
    let served = serve(DoorbellMode::Trapped);
    let function = &served.connect();
    std::thread::scope(|scope| {
        for thread in 0..8_u32 {
            scope.spawn(move || {
                let at = 8 + 4 * u64::from(thread);
                for round in 0..200 {
                    write_u32(function, at, round << 8 | thread);
                    function.post(0, at, &(round << 8 | thread).to_le_bytes()).unwrap();
                    assert_eq!(read_u32(function, at), round << 8 | thread);
                }
            });
        }
    });
}

#[test]
fn only_what_is_named_is_mapped() {
    let served = serve(DoorbellMode::Trapped);
    let function = served.connect();
    let ram = memory(0x3000);
    rustix::io::pwrite(&ram, b"named", 0x1000).unwrap();
    assert_eq!(copy(&function, 0x10_0000, 0x10_1000, 5), FAULT);
    function.map_ram(0x10_0000, 0x2000, ram.as_fd(), 0x1000).unwrap();
    assert_eq!(copy(&function, 0x10_0000, 0x10_1000, 5), DONE);
    let mut bytes = [0; 5];
    rustix::io::pread(&ram, &mut bytes, 0x2000).unwrap();
    assert_eq!(&bytes, b"named");
    // Overlaps.
    let again = function.map_ram(0x10_1000, 0x1000, ram.as_fd(), 0);
    assert!(matches!(again, Err(FunctionError::Refused(_))), "{again:?}");
    function.unmap(0x10_0000, 0x2000).unwrap();
    assert_eq!(copy(&function, 0x10_0000, 0x10_1000, 5), FAULT);
}

#[test]
fn vectors_and_the_pin_are_routed() {
    let served = serve(DoorbellMode::Trapped);
    let function = served.connect();
    let files: Vec<_> = (0..VECTORS).map(|_| event()).collect();
    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    function.route(0, &borrowed).unwrap();
    for (vector, file) in files.iter().enumerate() {
        write_u32(&function, 0x58, vector as u32);
        assert_eq!(count(file), 1);
    }
    function.unroute(1..3).unwrap();
    (0..4).for_each(|vector| write_u32(&function, 0x58, vector));
    assert_eq!(files.iter().map(count).collect::<Vec<_>>(), [1, 0, 0, 1]);
    assert!(matches!(function.route(1, &borrowed), Err(FunctionError::Refused(_))));
    assert!(matches!(function.route(u32::MAX, &borrowed), Err(FunctionError::Refused(_))));

    let (pin, unmask) = (event(), event());
    function.route_pin(Some(pin.as_fd())).unwrap();
    write_u32(&function, 0x58, PIN_ON);
    assert_eq!(count(&pin), 1);
    function.unmask_pin().unwrap();
    assert_eq!(count(&pin), 1, "it is still asserted");
    function.unmask_pin_by(Some(unmask.as_fd())).unwrap();
    rustix::io::write(&unmask, &1_u64.to_ne_bytes()).unwrap();
    eventually("it is unmasked", || count(&pin) == 1);
    write_u32(&function, 0x58, PIN_OFF);
    function.route_pin(None).unwrap();
}

#[test]
fn writes_are_posted_and_done_in_their_order() {
    let served = serve(DoorbellMode::Trapped);
    let function = served.connect();
    for value in 1..=1000 {
        function.put(0, 8, &u32::to_le_bytes(value)).unwrap();
    }
    assert_eq!(read_u32(&function, 8), 1000);
    // The bus refuses this one, and nobody has waited for it.
    function.put(0, 0x60, &[0; 4]).unwrap();
    assert_eq!(read_u32(&function, 8), 1000);
    assert!(function.put(0, 0x4000, &[0; 4]).is_err(), "outside of the region");
    assert_eq!(function.state(), ConnectionState::Connected);
}

#[test]
fn a_vmm_learns_what_it_needs_in_few_messages() {
    let served = serve(DoorbellMode::Trapped);
    let before = served.control.stats().messages;
    let _function = served.connect();
    // Version, device, regions, interrupt types, identifiers, and the I/O descriptors of one BAR.
    let few = 1 + 1 + u64::from(region::COUNT) + u64::from(irq::COUNT) + 1 + 1;
    assert_eq!(served.control.stats().messages - before, few);
}

#[test]
fn a_reset_is_a_reset() {
    let served = serve(DoorbellMode::Trapped);
    let function = served.connect();
    write_u32(&function, 8, 77);
    function.reset().unwrap();
    assert_eq!(read_u32(&function, 8), 0);
}

#[test]
fn accesses_outside_of_a_region_are_refused_here() {
    let served = serve(DoorbellMode::Trapped);
    let function = served.connect();
    let messages = served.control.stats().messages;
    for (region, offset) in [(0, 0x4000), (0, u64::MAX), (1, 0), (9, 0), (u32::MAX, 0)] {
        let mut bytes = [0; 4];
        let read = function.read(region, offset, &mut bytes);
        assert!(matches!(read, Err(FunctionError::Refused(_))), "{read:?}");
        assert_eq!(bytes, [0xff; 4]);
        assert!(function.write(region, offset, &bytes).is_err());
        assert!(function.post(region, offset, &bytes).is_err());
    }
    assert_eq!(served.control.stats().messages, messages);
    // A register that the bus refuses: the function goes on.
    let mut bytes = [0; 4];
    assert!(matches!(function.read(0, 0x60, &mut bytes), Err(FunctionError::Refused(_))));
    assert_eq!(bytes, [0xff; 4]);
    assert_eq!(read_u32(&function, 0), ID);
}

#[test]
fn notifications_are_eventfds() {
    let served = serve(DoorbellMode::Trapped);
    let function = served.connect();
    let told = event();
    function.route(NOTIFIED as u32, &[told.as_fd()]).unwrap();
    let found = function.notifications(0);
    let offsets: Vec<_> = found.iter().map(|one| (one.offset, one.size, one.datamatch)).collect();
    assert_eq!(offsets, [(0x3800, 0, None), (0x3808, 0, None)]);
    assert!(function.notifications(region::CONFIG).is_empty());
    let messages = served.control.stats().messages;
    assert!(found[1].event.raise());
    eventually("the function is told", || count(&told) > 0);
    assert_eq!(served.control.stats().messages, messages);
    assert!(!function.ring(0, 0x3800, 1), "its value does not matter, but it has no place");
}

#[test]
fn doorbells_are_rung_without_messages() {
    let served = serve(DoorbellMode::Rung);
    let function = served.connect();
    let (ram, told) = (memory(0x2000), event());
    function.map_ram(0, 0x2000, ram.as_fd(), 0).unwrap();
    function.route(0, &[told.as_fd()]).unwrap();
    assert_eq!(copy(&function, 0, 0x1000, 4), DONE);
    let messages = served.control.stats().messages;
    for value in 1..100_u32 {
        match value % 2 {
            0 => assert!(function.ring(0, 0x1000, value)),
            _ => function.post(0, 0x1000, &value.to_le_bytes()).unwrap(),
        }
        eventually("the function copies", || count(&told) == 1);
    }
    assert_eq!(served.control.stats().messages, messages);
    for at in [0, 0xffc, 0x1001, 0x1002, 0x1000 + 4 * DOORBELLS as u64, u64::MAX] {
        assert!(!function.ring(0, at, 1), "{at:#x}");
    }
    assert!(!function.ring(1, 0x1000, 1));
}

#[test]
fn trapped_doorbells_are_messages() {
    let served = serve(DoorbellMode::Trapped);
    let function = served.connect();
    assert!(!function.ring(0, 0x1000, 1));
    let told = event();
    function.route(0, &[told.as_fd()]).unwrap();
    function.post(0, 0x1000, &1_u32.to_le_bytes()).unwrap();
    eventually("the function copies", || count(&told) == 1);
}
