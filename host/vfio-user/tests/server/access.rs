use slipway_vfio_user::testing::{ID, IDENTIFIERS};

use crate::common::*;

fn read(raw: &mut Raw, region: u32, offset: u64, count: u32) -> Reply {
    raw.call(Command::RegionRead, access(region, offset, count).as_bytes())
}

fn write(raw: &mut Raw, region: u32, offset: u64, data: &[u8]) -> Reply {
    let payload = [access(region, offset, data.len() as u32).as_bytes(), data].concat();
    raw.call(Command::RegionWrite, &payload)
}

#[test]
fn registers_and_configuration_space_are_read_and_written() {
    let served = serve();
    let mut raw = served.client();
    assert_eq!(raw.read_u32(0), ID);
    let config = read(&mut raw, spec::region::CONFIG, 0, 4).ok();
    assert_eq!(config[16..18], IDENTIFIERS.0.to_le_bytes());
    assert_eq!(config[18..20], IDENTIFIERS.1.to_le_bytes());
    assert_eq!(config[..16], *access(spec::region::CONFIG, 0, 4).as_bytes());
    assert_eq!(read(&mut raw, spec::region::CONFIG, 0, 4096).ok().len(), 16 + 4096);
    let reply = write(&mut raw, spec::region::CONFIG, 4, &[6, 0]).ok();
    assert_eq!(reply, access(spec::region::CONFIG, 4, 2).as_bytes());
    assert_eq!(read(&mut raw, spec::region::CONFIG, 4, 2).ok()[16..], [6, 0]);
    for width in [1, 2, 4, 8] {
        let data = &[0xa1, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8][..width];
        write(&mut raw, 0, 0x10, data).ok();
        assert_eq!(read(&mut raw, 0, 0x10, width as u32).ok()[16..], *data);
    }
    let stats = served.control.stats();
    assert!(stats.region_reads >= 8 && stats.region_writes >= 5);
}

#[test]
fn long_accesses_are_cut_to_register_width() {
    let served = serve();
    let mut raw = served.client();
    let data: Vec<u8> = (0..37).collect();
    write(&mut raw, 0, 0x09, &data).ok();
    assert_eq!(read(&mut raw, 0, 0x09, 37).ok()[16..], *data);
}

#[test]
fn what_lies_outside_is_refused() {
    let served = serve();
    let mut raw = served.client();
    for (region, offset, count) in [
        (0, 0x4000, 1),
        (0, 0x3fff, 2),
        (0, u64::MAX, 4),
        (0, 0, 0),
        (0, 0, u32::MAX),
        (spec::region::CONFIG, 4093, 4),
        (1, 0, 4),
        (spec::region::ROM, 0, 4),
        (9, 0, 4),
        (u32::MAX, 0, 4),
    ] {
        assert_eq!(read(&mut raw, region, offset, count).err(), Errno::INVAL);
        let payload = [access(region, offset, count).as_bytes(), &[0; 4]].concat();
        assert_eq!(raw.call(Command::RegionWrite, &payload).err(), Errno::INVAL);
    }
    assert_eq!(read(&mut raw, 0, 0x60, 4).err(), Errno::IO, "refused by the bus");
    assert_eq!(write(&mut raw, 0, 0x60, &[0; 4]).err(), Errno::IO);
    let errors = served.control.stats().errors;
    assert_eq!(errors, [(Errno::IO.raw_os_error(), 2), (Errno::INVAL.raw_os_error(), 20)]);
}

#[test]
fn lengths_must_agree() {
    let served = serve();
    let mut raw = served.client();
    let long = [access(0, 8, 4).as_bytes(), &[0; 5]].concat();
    let short = [access(0, 8, 4).as_bytes(), &[0; 3]].concat();
    for bad in [&long[..], &short, &[0; 15], &[]] {
        assert_eq!(raw.call(Command::RegionWrite, bad).err(), Errno::INVAL);
        assert_eq!(raw.call(Command::RegionRead, bad).err(), Errno::INVAL);
    }
}

#[test]
fn without_a_reply_neither_success_nor_error_is_told() {
    let served = serve();
    let mut raw = served.client();
    for (offset, value) in [(0x10u64, 0x55u32), (0x4000, 0)] {
        let payload = [access(0, offset, 4).as_bytes(), &value.to_le_bytes()].concat();
        let mut header = raw.header(Command::RegionWrite as u16, payload.len());
        header.flags = U32::new(spec::flag::NO_REPLY);
        raw.send(&[header.as_bytes(), &payload].concat(), &[]);
    }
    assert_eq!(raw.read_u32(0x10), 0x55, "done before the next request is answered");
}
