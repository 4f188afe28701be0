use crate::common::*;

#[test]
fn every_type_is_described() {
    let served = serve();
    let mut raw = served.client();
    for (index, flags, count) in [(0, 7, 1), (1, 0, 0), (2, 3, 4), (3, 1, 1), (4, 1, 1)] {
        let request =
            spec::IrqInfo { argsz: U32::new(16), index: U32::new(index), ..Default::default() };
        let reply: spec::IrqInfo = raw.call(Command::DeviceGetIrqInfo, request.as_bytes()).read();
        assert_eq!((reply.flags.get(), reply.count.get()), (flags, count), "type {index}");
        assert_eq!((reply.argsz.get(), reply.index.get()), (16, index));
    }
}

#[test]
fn bad_requests_are_refused() {
    let served = serve();
    let mut raw = served.client();
    for (argsz, index) in [(16, 5), (16, u32::MAX), (15, 2)] {
        let request =
            spec::IrqInfo { argsz: U32::new(argsz), index: U32::new(index), ..Default::default() };
        let reply = raw.call(Command::DeviceGetIrqInfo, request.as_bytes());
        assert_eq!(reply.err(), Errno::INVAL);
    }
    assert_eq!(raw.call(Command::DeviceGetIrqInfo, &[0; 12]).err(), Errno::INVAL);
}
