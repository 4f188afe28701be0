use crate::common::*;

#[test]
fn there_are_none() {
    let served = serve();
    let mut raw = served.client();
    let mut request = spec::RegionIoFds { argsz: U32::new(4096), ..Default::default() };
    let call = |raw: &mut Raw, request: &spec::RegionIoFds| {
        raw.call(Command::DeviceGetRegionIoFds, request.as_bytes()).err()
    };
    assert_eq!(call(&mut raw, &request), Errno::NOTSUP);
    request.index = U32::new(9);
    assert_eq!(call(&mut raw, &request), Errno::INVAL);
    request.index = U32::new(0);
    request.flags = U32::new(1);
    assert_eq!(call(&mut raw, &request), Errno::INVAL);
    assert_eq!(raw.call(Command::DeviceGetRegionIoFds, &[0; 15]).err(), Errno::INVAL);
}
