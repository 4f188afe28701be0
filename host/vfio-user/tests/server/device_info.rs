use crate::common::*;

#[test]
fn it_is_a_pci_device_that_can_be_reset() {
    let served = serve();
    let mut raw = served.client();
    let request = spec::DeviceInfo { argsz: U32::new(16), ..Default::default() };
    let reply: spec::DeviceInfo = raw.call(Command::DeviceGetInfo, request.as_bytes()).read();
    assert_eq!(reply.argsz.get(), 16);
    assert_eq!(reply.flags.get(), 3);
    assert_eq!((reply.num_regions.get(), reply.num_irqs.get()), (9, 5));
    assert!(served.control.stats().attached_at.is_some());
}

#[test]
fn sizes_are_checked() {
    let served = serve();
    let mut raw = served.client();
    let small = spec::DeviceInfo { argsz: U32::new(15), ..Default::default() };
    for bad in [small.as_bytes(), &[16; 15], &[16; 17], &[]] {
        assert_eq!(raw.call(Command::DeviceGetInfo, bad).err(), Errno::INVAL);
    }
}
