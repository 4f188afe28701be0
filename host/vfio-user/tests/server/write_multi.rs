use crate::common::*;

fn entry(region: u32, offset: u64, data: &[u8]) -> spec::WriteMultiEntry {
    let mut entry = spec::WriteMultiEntry {
        offset: U64::new(offset),
        region: U32::new(region),
        count: U32::new(data.len() as u32),
        data: [0; 8],
    };
    entry.data[..data.len()].copy_from_slice(data);
    entry
}

fn message(count: u64, entries: &[spec::WriteMultiEntry]) -> Vec<u8> {
    [&count.to_le_bytes(), entries.as_bytes()].concat()
}

#[test]
fn writes_are_done_in_order() {
    let served = serve();
    let mut raw = served.client();
    let entries = [
        entry(0, 0x10, &1u32.to_le_bytes()),
        entry(0, 0x18, &2u64.to_le_bytes()),
        entry(spec::region::CONFIG, 4, &[2, 0]),
        entry(0, 0x10, &3u32.to_le_bytes()),
    ];
    let reply = raw.call(Command::RegionWriteMulti, &message(4, &entries)).ok();
    assert_eq!(reply, 4u64.to_le_bytes());
    assert_eq!((raw.read_u32(0x10), raw.read_u32(0x18)), (3, 2));
}

#[test]
fn bad_requests_do_nothing() {
    let served = serve();
    let mut raw = served.client();
    let good = entry(0, 0x10, &7u32.to_le_bytes());
    let mut wide = entry(0, 0x18, &[0; 8]);
    wide.count = U32::new(9);
    let cases = [
        message(0, &[]),
        message(2, &[good]),
        message(u64::MAX, &[good]),
        message(2, &[good, wide]),
        message(2, &[good, entry(1, 0, &[1])]),
        message(2, &[good, entry(0, 0x4000, &[1])]),
        message(1, &[good])[..31].to_vec(),
        vec![1, 0, 0],
    ];
    for case in cases {
        assert_eq!(raw.call(Command::RegionWriteMulti, &case).err(), Errno::INVAL);
    }
    assert_eq!(raw.read_u32(0x10), 0);
}

#[test]
fn it_must_have_been_agreed_on() {
    let served = serve();
    let mut raw = served.connect();
    raw.call(Command::Version, &[0, 0, 1, 0]).ok();
    let good = message(1, &[entry(0, 0x10, &[7])]);
    assert_eq!(raw.call(Command::RegionWriteMulti, &good).err(), Errno::NOTSUP);
}
