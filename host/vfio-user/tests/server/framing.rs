use std::os::fd::AsFd;

use crate::common::*;

#[test]
fn a_message_may_come_byte_by_byte() {
    let served = serve();
    let mut raw = served.client();
    let payload = [access(0, 0x10, 4).as_bytes(), &0x1234u32.to_le_bytes()].concat();
    let header = raw.header(Command::RegionWrite as u16, payload.len());
    for byte in [header.as_bytes(), &payload].concat() {
        raw.send(&[byte], &[]);
    }
    raw.reply().ok();
    assert_eq!(raw.read_u32(0x10), 0x1234);
}

#[test]
fn many_messages_may_come_at_once() {
    let served = serve();
    let mut raw = served.client();
    let mut bytes = Vec::new();
    for value in 0..500u32 {
        let payload = [access(0, 0x10, 4).as_bytes(), &value.to_le_bytes()].concat();
        let header = raw.header(Command::RegionWrite as u16, payload.len());
        bytes.extend([header.as_bytes(), &payload].concat());
    }
    raw.send(&bytes, &[]);
    for _ in 0..500 {
        raw.reply().ok();
    }
    assert_eq!(raw.read_u32(0x10), 499);
}

#[test]
fn descriptors_belong_to_the_message_they_came_with() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x1000);
    // The descriptor comes with a byte in the middle of the message.
    let header = raw.header(Command::DmaMap as u16, 32);
    let bytes = [header.as_bytes(), dma_map(0, 0x1000).as_bytes()].concat();
    raw.send(&bytes[..20], &[]);
    raw.send(&bytes[20..21], &[guest.as_fd()]);
    raw.send(&bytes[21..], &[]);
    raw.reply().ok();
    assert!(raw.is_alive());
}

#[test]
fn unknown_commands_get_an_errno() {
    let served = serve();
    let mut raw = served.client();
    for code in [0, 19, 100, u16::MAX] {
        let header = raw.header(code, 8);
        raw.send(&[header.as_bytes(), &[0; 8]].concat(), &[]);
        assert_eq!(raw.reply().err(), Errno::INVAL, "command {code}");
    }
    for command in [Command::DirtyPages, Command::DeviceFeature] {
        assert_eq!(raw.call(command, &[0; 32]).err(), Errno::NOTSUP);
    }
    assert_eq!(raw.call(Command::DmaRead, &[0; 16]).err(), Errno::INVAL);
    assert_eq!(raw.call(Command::DmaWrite, &[0; 16]).err(), Errno::INVAL);
}

#[test]
fn a_size_that_cannot_be_ends_the_connection() {
    let served = serve();
    for size in [0, 15, (1 << 20) + 4097, u32::MAX] {
        let mut raw = served.client();
        let mut header = raw.header(Command::RegionRead as u16, 0);
        header.size = U32::new(size);
        raw.send(header.as_bytes(), &[]);
        assert!(raw.try_reply().is_none());
        eventually("cleared away", || served.control.stats().client.is_none());
    }
}

#[test]
fn replies_and_unknown_types_end_the_connection() {
    let served = serve();
    for flags in [1, 2, 0xf] {
        let mut raw = served.client();
        let mut header = raw.header(Command::RegionRead as u16, 0);
        header.flags = U32::new(flags);
        raw.send(header.as_bytes(), &[]);
        assert!(raw.try_reply().is_none());
        eventually("cleared away", || served.control.stats().client.is_none());
    }
}

#[test]
fn too_many_descriptors_are_refused_and_closed() {
    let served = serve();
    let mut raw = served.client();
    // When the last descriptor of a pipe's writing end is closed, the reading end shows it.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let flood = vec![writer.as_fd(); 200];
    let request = dma_map(0, 0x1000);
    let reply = raw.call_with(Command::DmaMap, request.as_bytes(), &flood);
    assert_eq!(reply.err(), Errno::INVAL);
    // The descriptors come in several portions, none of them too large.
    let header = raw.header(Command::DmaMap as u16, 32);
    let bytes = [header.as_bytes(), request.as_bytes()].concat();
    for byte in &bytes {
        raw.send(&[*byte], &[writer.as_fd(); 10]);
    }
    assert_eq!(raw.reply().err(), Errno::INVAL);
    // The descriptors come with a request that accepts none.
    let reply = raw.call_with(Command::RegionRead, access(0, 0, 4).as_bytes(), &[writer.as_fd()]);
    assert_eq!(reply.err(), Errno::INVAL);
    assert!(raw.is_alive());
    drop(writer);
    let mut byte = [0];
    assert_eq!(rustix::io::read(&reader, &mut byte).unwrap(), 0, "the server kept one");
}

#[test]
fn who_does_not_read_its_replies_is_hung_up_on() {
    let served = serve_with(|config| config.max_queued_bytes = 64 << 10);
    let mut raw = served.client();
    let header = raw.header(Command::RegionRead as u16, 16);
    let request = [header.as_bytes(), access(spec::region::CONFIG, 0, 4096).as_bytes()].concat();
    let mut sent = 0;
    while raw.try_send(&request, &[]).is_ok() {
        sent += 1;
        assert!(sent < 100_000, "the server queues without end");
    }
    eventually("cleared away", || served.control.stats().client.is_none());
    assert!(served.client().is_alive());
}
