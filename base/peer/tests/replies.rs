//! A peer replies and closes its end without reading the request.
#![allow(clippy::unwrap_used)]

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use slipway_peer::{Bin, receive, receive_reply};

/// A connection of which the peer has sent a reply and closed its end.
fn refused(kind: SocketType) -> OwnedFd {
    let unix = AddressFamily::UNIX;
    let (here, there) = rustix::net::socketpair(unix, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::send(&here, b"request", SendFlags::empty()).unwrap();
    rustix::net::send(&there, b"reply", SendFlags::empty()).unwrap();
    here
}

#[test]
fn the_reply_of_a_peer_that_closed_is_received() {
    for kind in [SocketType::SEQPACKET, SocketType::STREAM] {
        let (here, mut bytes) = (refused(kind), [0; 8]);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let received = receive_reply(&here, parts, &Bin::new(), RecvFlags::empty()).unwrap();
        assert_eq!((received.bytes, &bytes[..5]), (5, &b"reply"[..]));
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let end = receive_reply(&here, parts, &Bin::new(), RecvFlags::empty()).unwrap();
        assert_eq!(end.bytes, 0);
    }
}

/// The behaviour of Linux that `receive_reply` exists for.
#[test]
fn a_seqpacket_socket_reports_the_reset_before_the_reply() {
    let (here, mut bytes) = (refused(SocketType::SEQPACKET), [0; 8]);
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let received = receive(&here, parts, &Bin::new(), RecvFlags::empty());
    assert_eq!(received.unwrap_err(), Errno::CONNRESET);
}
