use std::os::fd::AsFd;

use crate::common::*;
use spec::IrqSetFlags as F;

fn request(flags: F, index: u32, start: u32, count: u32) -> spec::IrqSet {
    spec::IrqSet {
        argsz: U32::new(20),
        flags: U32::new(flags.bits()),
        index: U32::new(index),
        start: U32::new(start),
        count: U32::new(count),
    }
}

const ROUTE: F = F::DATA_EVENTFD.union(F::TRIGGER);
const MSIX: u32 = spec::irq::MSIX;

#[test]
fn vectors_are_routed_triggered_masked_and_taken_down() {
    let served = serve();
    let mut raw = served.client();
    let files = [event(), event()];
    let both = [files[0].as_fd(), files[1].as_fd()];
    raw.call_with(Command::DeviceSetIrqs, request(ROUTE, MSIX, 1, 2).as_bytes(), &both).ok();
    let mut set = |flags: F, start, count, booleans: &[u8]| {
        let payload = [request(flags, MSIX, start, count).as_bytes(), booleans].concat();
        raw.call(Command::DeviceSetIrqs, &payload).ok();
        (super::common::count(&files[0]), super::common::count(&files[1]))
    };
    assert_eq!(set(F::DATA_NONE | F::TRIGGER, 0, 4, &[]), (1, 1));
    assert_eq!(set(F::DATA_BOOL | F::TRIGGER, 1, 2, &[0, 1]), (0, 1));
    assert_eq!(set(F::DATA_NONE | F::MASK, 1, 1, &[]), (0, 0));
    assert_eq!(set(F::DATA_NONE | F::TRIGGER, 1, 2, &[]), (0, 1));
    assert_eq!(set(F::DATA_BOOL | F::UNMASK, 1, 2, &[7, 0]), (1, 0), "what waited comes now");
    assert_eq!(set(ROUTE, 1, 1, &[]), (0, 0), "no descriptors: the route goes");
    assert_eq!(set(F::DATA_NONE | F::TRIGGER, 0, 4, &[]), (0, 1));
    assert_eq!(set(F::DATA_NONE | F::TRIGGER, 0, 0, &[]), (0, 0), "tear-down");
    assert_eq!(set(F::DATA_NONE | F::TRIGGER, 0, 4, &[]), (0, 0));
}

#[test]
fn the_function_signals_through_the_routes() {
    let served = serve();
    let mut raw = served.client();
    let file = event();
    raw.call_with(Command::DeviceSetIrqs, request(ROUTE, MSIX, 3, 1).as_bytes(), &[file.as_fd()])
        .ok();
    assert!(served.control.stats().first_route_at.is_some());
    raw.write_u32(0x58, 3);
    assert_eq!(count(&file), 1);
    raw.write_u32(0x58, 2);
    raw.write_u32(0x58, 77);
    assert_eq!(count(&file), 0);
}

#[test]
fn error_and_request_types_take_one_route() {
    let served = serve();
    let mut raw = served.client();
    for index in [spec::irq::ERR, spec::irq::REQ] {
        let file = event();
        let message = request(ROUTE, index, 0, 1);
        raw.call_with(Command::DeviceSetIrqs, message.as_bytes(), &[file.as_fd()]).ok();
        let trigger = request(F::DATA_NONE | F::TRIGGER, index, 0, 1);
        raw.call(Command::DeviceSetIrqs, trigger.as_bytes()).ok();
        assert_eq!(count(&file), 1);
        let mask = request(F::DATA_NONE | F::MASK, index, 0, 1);
        assert_eq!(raw.call(Command::DeviceSetIrqs, mask.as_bytes()).err(), Errno::INVAL);
    }
}

#[test]
fn types_without_interrupts_can_be_taken_down_only() {
    let served = serve();
    let mut raw = served.client();
    let down = request(F::DATA_NONE | F::TRIGGER, spec::irq::MSI, 0, 0);
    raw.call(Command::DeviceSetIrqs, down.as_bytes()).ok();
    let one = request(F::DATA_NONE | F::TRIGGER, spec::irq::MSI, 0, 1);
    assert_eq!(raw.call(Command::DeviceSetIrqs, one.as_bytes()).err(), Errno::INVAL);
}

#[test]
fn bad_requests_are_refused() {
    let served = serve();
    let mut raw = served.client();
    let none = F::DATA_NONE | F::TRIGGER;
    let cases = [
        (request(F::TRIGGER, MSIX, 0, 1), "no data flag"),
        (request(F::DATA_NONE, MSIX, 0, 1), "no action"),
        (request(F::DATA_NONE | F::DATA_BOOL | F::TRIGGER, MSIX, 0, 1), "two data flags"),
        (request(F::DATA_NONE | F::MASK | F::TRIGGER, MSIX, 0, 1), "two actions"),
        (request(F::from_bits_retain(0x61), MSIX, 0, 1), "an unknown flag"),
        (request(none, 5, 0, 1), "no such type"),
        (request(none, MSIX, 4, 1), "past the end"),
        (request(none, MSIX, 3, 2), "across the end"),
        (request(none, MSIX, u32::MAX, u32::MAX), "overflow"),
        (request(none, MSIX, 1, 0), "tear-down of a part"),
        (request(F::DATA_NONE | F::MASK, MSIX, 0, 0), "tear-down by masking"),
        (request(F::DATA_BOOL | F::TRIGGER, MSIX, 0, 2), "booleans missing"),
    ];
    for (case, what) in cases {
        let reply = raw.call(Command::DeviceSetIrqs, case.as_bytes());
        assert_eq!(reply.err(), Errno::INVAL, "{what}");
    }
    let mut small = request(none, MSIX, 0, 1);
    small.argsz = U32::new(19);
    assert_eq!(raw.call(Command::DeviceSetIrqs, small.as_bytes()).err(), Errno::INVAL);
    let long = [request(none, MSIX, 0, 1).as_bytes(), &[1]].concat();
    assert_eq!(raw.call(Command::DeviceSetIrqs, &long).err(), Errno::INVAL);
    assert_eq!(raw.call(Command::DeviceSetIrqs, &[0; 19]).err(), Errno::INVAL);
}

#[test]
fn descriptors_must_match() {
    let served = serve();
    let mut raw = served.client();
    let (file, pipe) = (event(), rustix::pipe::pipe().unwrap());
    let mut call = |message: spec::IrqSet, files: &[std::os::fd::BorrowedFd<'_>]| {
        raw.call_with(Command::DeviceSetIrqs, message.as_bytes(), files).err()
    };
    let fd = file.as_fd();
    assert_eq!(call(request(ROUTE, MSIX, 0, 2), &[fd]), Errno::INVAL, "too few");
    assert_eq!(call(request(ROUTE, MSIX, 0, 1), &[fd, fd]), Errno::INVAL, "too many");
    let none = F::DATA_NONE | F::TRIGGER;
    assert_eq!(call(request(none, MSIX, 0, 1), &[fd]), Errno::INVAL, "not asked for");
    let pipes = [pipe.0.as_fd(), fd];
    assert_eq!(call(request(ROUTE, MSIX, 0, 2), &pipes), Errno::INVAL, "a pipe");
    let masks = F::DATA_EVENTFD | F::MASK;
    assert_eq!(call(request(masks, MSIX, 0, 1), &[fd]), Errno::NOTSUP);
    raw.write_u32(0x58, 0);
    assert_eq!(count(&file), 0, "nothing of it was taken");
    drop((file, pipe));
}
