//! A peer sends TCP sockets whose closing lasts an hour.
#![allow(clippy::unwrap_used)]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use slipway_peer::testing::lingering;
use slipway_peer::{Bin, MAX_FILES, receive};

const LONG: Duration = Duration::from_secs(60);

/// Sends `count` descriptors of one lingering socket, closes its own, and returns the socket's
/// other end.
fn send(to: &UnixStream, count: usize) -> TcpStream {
    let (socket, other) = lingering().unwrap();
    let files = vec![socket.as_fd(); count];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    rustix::net::sendmsg(to, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
    other
}

/// Runs `act` on a thread of its own. Returns whether `act` ends within a minute.
fn ends(act: impl FnOnce() + Send + 'static) -> bool {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        act();
        let _ = done.send(());
    });
    is_done.recv_timeout(LONG).is_ok()
}

#[test]
fn received_descriptors_are_closed_elsewhere() {
    let (here, there) = UnixStream::pair().unwrap();
    let bin = Bin::new();
    let _other = send(&there, MAX_FILES);
    assert!(ends(move || {
        let mut byte = [0];
        let parts = &mut [IoSliceMut::new(&mut byte)];
        let received = receive(&here, parts, &bin, RecvFlags::empty()).unwrap();
        assert_eq!((received.bytes, received.files.len()), (1, MAX_FILES));
    }));
}

#[test]
fn a_connection_with_unread_descriptors_is_closed_elsewhere() {
    let (here, there) = UnixStream::pair().unwrap();
    let _other = send(&there, 1);
    assert!(ends(move || Bin::new().discard(here)));
}

/// The attack that the tests above defend against: without a bin the thread sleeps.
#[test]
fn a_plain_close_waits() {
    let (socket, other) = lingering().unwrap();
    let (done, is_done) = channel();
    let thread = std::thread::spawn(move || {
        drop(socket);
        let _ = done.send(());
    });
    assert!(is_done.recv_timeout(Duration::from_millis(200)).is_err(), "this kernel never lingers");
    drop(other);
    thread.join().unwrap();
}

#[test]
fn a_kernel_that_can_refuse_descriptors_does() {
    let (here, there) = UnixStream::pair().unwrap();
    if !slipway_peer::refuse_descriptors(&here) {
        println!(
            "SKIPPED: a_kernel_that_can_refuse_descriptors_does: needs SO_PASSRIGHTS (Linux 6.16)"
        );
        return;
    }
    let files = [there.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let sent =
        rustix::net::sendmsg(&there, &[IoSlice::new(b"x")], &mut control, SendFlags::empty());
    assert_eq!(sent.unwrap_err(), rustix::io::Errno::PERM);
}
