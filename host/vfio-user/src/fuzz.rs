//! The fuzz target on the message stream: no reactor, no threads.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use slipway_pci::Access;
use slipway_peer::Foreign;
use slipway_vfio_user_spec::{Command, HEADER_LEN, Header, U16, U32};
use zerocopy::{FromBytes, IntoBytes};

use crate::channel::Channel;
use crate::device::Device;
use crate::server::{Session, SessionTurn};
use crate::testing::{DOORBELLS, ID, Scratch};
use crate::{Config, EndpointParts};
use slipway_vfio_user_wire::Wire;

/// Feeds `data` to a server over a socket pair.
///
/// The first byte selects the mode. Bit 0: the client has negotiated already. Bit 1: `data` is a
/// sequence of (length, command, payload), each sent as a well-formed message, instead of raw
/// bytes. For any input, the server neither panics nor blocks, every reply is well-formed, and the
/// next client finds a function that was reset and runs.
///
/// # Panics
/// If a reply is malformed, the function is not fit for another client, or no descriptors are left.
pub fn fuzz(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let Ok((ours, theirs)) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    ) else {
        return;
    };
    let config = Config {
        reply_deadline: Duration::ZERO,
        remote_deadline: Duration::ZERO,
        ..Config::at("")
    };
    let mut parts = EndpointParts::new(&config);
    let Ok(doorbells) = parts.doorbells(DOORBELLS) else { return };
    let function = Scratch::new(parts.memory(), &parts.interrupts(), doorbells, Arc::default());
    let Ok(mut device) = Device::new(parts, Box::new(function)) else { return };
    let wire = Wire::new(Foreign::new(ours, &device.bin), &device.bin, config.max_queued_bytes);
    let channel = Channel::new(wire, config.remote_deadline);
    let mut session = Session::new(channel, Arc::new(config), Arc::default());

    let mut stream = Vec::new();
    if mode & 1 != 0 {
        message(&mut stream, Command::Version as u16, &[0, 0, 1, 0]);
    }
    if mode & 2 != 0 {
        framed(&mut stream, data);
    } else {
        stream.extend_from_slice(data);
    }
    let mut unread = Vec::new();
    for chunk in stream.chunks(4096) {
        if rustix::net::send(&theirs, chunk, SendFlags::NOSIGNAL).is_err() {
            break;
        }
        if !turns(&mut session, &mut device) {
            break;
        }
        check_replies(&theirs, &mut unread);
    }
    drop(session);
    check_next(&mut device);
}

/// Checks that the function is fit for the next client.
fn check_next(device: &mut Device) {
    assert!(device.renew().is_ok() && device.runs(), "the function does not run");
    let mut bytes = [0xff; 0x54];
    assert_eq!(device.function.read(0, 0, &mut bytes), Access::Done);
    assert_eq!(bytes[..8], u64::from(ID).to_le_bytes());
    assert!(bytes[8..].iter().all(|byte| *byte == 0), "the function was not reset");
}

/// Takes turns until no message is left. Returns false if the connection has ended.
fn turns(session: &mut Session, device: &mut Device) -> bool {
    loop {
        match session.turn(device, Instant::now()) {
            Ok(SessionTurn::Drained) => return true,
            Ok(SessionTurn::More | SessionTurn::Pending) => {}
            // There is no thread to move to; half of the moves are taken to succeed.
            Ok(SessionTurn::Move) => {
                let moved = device.pace.progress().is_multiple_of(2);
                if session.settle_on_thread(device, moved).is_err() {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
}

fn framed(stream: &mut Vec<u8>, mut data: &[u8]) {
    while let [len, command, rest @ ..] = data {
        let (payload, after) = rest.split_at(rest.len().min(usize::from(*len)));
        message(stream, u16::from(*command), payload);
        data = after;
    }
}

fn message(stream: &mut Vec<u8>, command: u16, payload: &[u8]) {
    let header = Header {
        id: U16::new(stream.len() as u16),
        command: U16::new(command),
        size: U32::new((HEADER_LEN + payload.len()) as u32),
        ..Header::default()
    };
    stream.extend_from_slice(header.as_bytes());
    stream.extend_from_slice(payload);
}

/// Reads the replies that have arrived and checks every complete one; `unread` keeps the beginning
/// of the next.
fn check_replies(theirs: &OwnedFd, unread: &mut Vec<u8>) {
    let mut buffer = [0; 4096];
    #[allow(clippy::disallowed_methods, reason = "the fuzzer is its own peer")]
    while let Ok((count @ 1.., _)) = rustix::net::recv(theirs, &mut buffer[..], RecvFlags::empty())
    {
        unread.extend_from_slice(&buffer[..count]);
    }
    while let Ok((header, rest)) = Header::read_from_prefix(unread) {
        let size = header.size.get() as usize;
        assert!(size >= HEADER_LEN, "a message shorter than its header");
        if size - HEADER_LEN > rest.len() {
            return;
        }
        match header.errno() {
            Some(errno) => assert!(errno > 0 && size == HEADER_LEN, "an error without an errno"),
            None => assert!(header.is_reply() || header.is_command()),
        }
        unread.drain(..size);
    }
}
