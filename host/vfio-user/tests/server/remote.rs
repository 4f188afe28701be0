//! Message-only memory: `VFIO_USER_DMA_READ` and `VFIO_USER_DMA_WRITE`.

use std::sync::atomic::Ordering;
use std::time::Duration;

use slipway_vfio_user::RegionKind;
use slipway_vfio_user::testing::{DONE, FAULT};

use super::dma_map::copy;
use crate::common::*;

/// Has the function copy between message-only addresses, while the client serves the accesses.
fn copy_remote(client: &mut Client, from: u64, to: u64, len: u32) -> u32 {
    client.write(0, 0x40, &from.to_le_bytes()).unwrap();
    client.write(0, 0x48, &to.to_le_bytes()).unwrap();
    client.write(0, 0x50, &len.to_le_bytes()).unwrap();
    client.write(0, 0x54, &[1, 0, 0, 0]).unwrap();
    client.read_u32(0, 0x54).unwrap()
}

#[test]
fn it_is_read_and_written_by_messages() {
    let served = serve();
    let mut client = Client::connect(&served.path, PATIENCE).unwrap();
    let mut content = vec![0; 0x40_0000];
    content[..0x10_0000].copy_from_slice(&[0x5a; 0x10_0000]);
    client.map_remote(0x1000, content, true).unwrap();
    let stats = served.control.stats();
    assert!(stats.client.unwrap().private, "on a thread of its own");
    assert_eq!(stats.regions[0].kind, RegionKind::Remote);
    assert_eq!(copy_remote(&mut client, 0x1000, 0x20_1000, 0x10_0000), DONE);
    assert_eq!(client.remote(0x1000).unwrap()[0x20_0000..0x30_0000], [0x5a; 0x10_0000]);
    let back = client.unmap_remote(0x1000, 0x40_0000).unwrap().unwrap();
    assert_eq!(back.len(), 0x40_0000);
    assert_eq!(copy_remote(&mut client, 0x1000, 0x20_1000, 64), FAULT);
    drop(client);
    eventually("home again", || served.control.stats().client.is_none());
    assert!(served.client().is_alive());
    assert!(!served.control.stats().client.is_some_and(|client| client.private));
}

#[test]
fn a_region_that_nothing_can_write_stays_and_faults() {
    let served = serve();
    let mut client = Client::connect(&served.path, PATIENCE).unwrap();
    client.map_remote(0x10_0000, vec![1; 0x10_0000], false).unwrap();
    client.map_remote(0, vec![1; 0x1000], true).unwrap();
    assert!(!served.control.stats().client.unwrap().private);
    assert_eq!(copy_remote(&mut client, 0x10_0000, 0, 64), FAULT);
    // Once there is a larger region, all of them work.
    client.map_remote(0x20_0000, vec![0; 0x2000], true).unwrap();
    assert_eq!(copy_remote(&mut client, 0x10_0000, 0, 64), DONE);
    assert_eq!(client.remote(0).unwrap()[..64], [1; 64]);
}

/// Connects a raw client with message-only memory and starts a copy.
fn copying(served: &Served) -> (Raw, Header) {
    let mut raw = served.client();
    raw.call(Command::DmaMap, dma_map(0, 0x10_0000).as_bytes()).ok();
    raw.write_u32(0x50, 64);
    let payload = [access(0, 0x54, 4).as_bytes(), &[1, 0, 0, 0]].concat();
    let header = raw.header(Command::RegionWrite as u16, payload.len());
    raw.send(&[header.as_bytes(), &payload].concat(), &[]);
    let request = raw.reply();
    assert_eq!(request.header.command.get(), Command::DmaRead as u16);
    assert!(request.header.is_command());
    let asked = spec::DmaAccess::read_from_bytes(&request.payload).unwrap();
    assert_eq!((asked.address.get(), asked.count.get()), (0, 64));
    (raw, request.header)
}

#[test]
fn a_refusal_is_the_devices_fault_status() {
    let served = serve();
    let (mut raw, request) = copying(&served);
    raw.send(request.error_reply(14).as_bytes(), &[]);
    raw.reply().ok();
    assert_eq!(raw.read_u32(0x54), FAULT);
}

#[test]
fn commands_that_come_meanwhile_are_kept() {
    let served = serve();
    let (mut raw, request) = copying(&served);
    let early = raw.header(Command::RegionRead as u16, 16);
    raw.send(&[early.as_bytes(), access(0, 0, 4).as_bytes()].concat(), &[]);
    raw.send(request.error_reply(14).as_bytes(), &[]);
    assert_eq!(raw.reply().header.command.get(), Command::RegionWrite as u16);
    assert_eq!(raw.reply().header.id.get(), early.id.get());
    assert_eq!(copy(&mut raw, 0x20_0000, 0, 4), FAULT);
}

#[test]
fn a_command_that_comes_during_an_idle_poll_is_answered() {
    let served = serve();
    let mut raw = served.client();
    raw.call(Command::DmaMap, dma_map(0, 0x10_0000).as_bytes()).ok();
    served.knobs.fetching.store(true, Ordering::SeqCst);
    served.control.poke();
    let request = raw.reply().header;
    assert_eq!(request.command.get(), Command::DmaRead as u16);
    served.knobs.fetching.store(false, Ordering::SeqCst);
    let early = raw.header(Command::RegionRead as u16, 16);
    raw.send(&[early.as_bytes(), access(0, 0, 4).as_bytes()].concat(), &[]);
    raw.send(request.error_reply(14).as_bytes(), &[]);
    assert_eq!(raw.reply().header.id.get(), early.id.get());
}

#[test]
fn wrong_replies_end_the_connection() {
    let served = serve();
    let spoil: [fn(&mut Header); 3] = [
        |header| header.id = spec::U16::new(header.id.get() ^ 1),
        |header| header.command = spec::U16::new(Command::DmaWrite as u16),
        |_| {}, // no data
    ];
    for spoil in spoil {
        let (mut raw, request) = copying(&served);
        let mut reply = request.reply(0);
        spoil(&mut reply);
        raw.send(reply.as_bytes(), &[]);
        while raw.try_reply().is_some() {}
        eventually("cleared away", || served.control.stats().client.is_none());
    }
    assert!(served.client().is_alive());
}

#[test]
fn a_client_that_does_not_answer_is_dropped_and_blocks_nobody() {
    let first = serve_with(|config| config.remote_deadline = Duration::from_millis(300));
    let second = serve_on(first.reactor.clone(), |_| {});
    let (mut stuck, _) = copying(&first);
    let mut other = second.client();
    for _ in 0..100 {
        assert!(other.is_alive());
    }
    assert!(first.control.stats().client.is_some(), "the first is still waited for");
    while stuck.try_reply().is_some() {}
    eventually("cleared away", || first.control.stats().client.is_none());
    let why = first.control.stats().last_disconnect.unwrap();
    assert_eq!(why, "the client did not answer a memory access in time");
    assert!(first.client().is_alive());
}

#[test]
fn too_many_commands_meanwhile_end_the_connection() {
    let served = serve();
    let (mut raw, _) = copying(&served);
    let header = raw.header(Command::DeviceReset as u16, 0);
    for _ in 0..100 {
        if raw.try_send(header.as_bytes(), &[]).is_err() {
            break;
        }
    }
    while raw.try_reply().is_some() {}
    eventually("cleared away", || served.control.stats().client.is_none());
}
