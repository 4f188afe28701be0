//! Programs that are started ahead, and get their machine over a socket.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType,
};
use slipway_peer::{Bin, receive};
use slipway_vmm::spare::{READY, encode};

use crate::client::Running;
use crate::common::has_kvm;
use crate::{TestDir, prints_and_powers_off};

/// Starts a spare. Its standard input is the socket.
fn spare() -> (Running, OwnedFd) {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let pair = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None);
    let (ours, theirs) = pair.unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_slipway-vmm"));
    command.args(["--spare", "fd:0"]).stdin(theirs).stdout(Stdio::null()).stderr(Stdio::piped());
    (Running(command.spawn().unwrap()), ours)
}

/// Waits until the spare has its virtual machine.
fn await_ready(socket: &OwnedFd) {
    let mut bytes = [0; 2];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = receive(socket, &mut parts, &Bin::new(), RecvFlags::empty()).unwrap();
    assert_eq!((received.bytes, bytes[0]), (1, READY));
}

fn send(socket: &OwnedFd, message: &[u8], files: &[OwnedFd]) {
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(80))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || attached.push(SendAncillaryMessage::ScmRights(&files)));
    let bytes = [IoSlice::new(message)];
    rustix::net::sendmsg(socket, &bytes, &mut attached, SendFlags::NOSIGNAL).unwrap();
}

fn message(words: &[&str]) -> Vec<u8> {
    let words: Vec<_> = words.iter().map(OsString::from).collect();
    encode(&words).unwrap()
}

fn null() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

/// Returns the exit status of a spare that was sent this, and what it printed to its errors.
fn answer_to(message: &[u8], files: &[OwnedFd]) -> (Option<i32>, String) {
    let (mut running, socket) = spare();
    await_ready(&socket);
    send(&socket, message, files);
    let mut text = String::new();
    running.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (running.0.wait().unwrap().code(), text)
}

#[test]
fn a_spare_runs_the_machine_that_it_is_given() {
    if !has_kvm("a_spare_runs_the_machine_that_it_is_given") {
        return;
    }
    let place = TestDir::new();
    let kernel = File::open(place.kernel(prints_and_powers_off())).unwrap();
    let (mut running, socket) = spare();
    await_ready(&socket);
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let options = message(&["--kernel", "fd:128", "--memory", "64", "--cmdline", "a b"]);
    send(&socket, &options, &[writer, null(), kernel.into()]);
    // A spare that has its machine does not end with its launcher.
    drop(socket);
    let mut printed = String::new();
    File::from(reader).read_to_string(&mut printed).unwrap();
    assert_eq!(printed, "x");
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
}

#[test]
fn a_spare_ends_with_its_launcher() {
    if !has_kvm("a_spare_ends_with_its_launcher") {
        return;
    }
    for waits in [true, false] {
        let (mut running, socket) = spare();
        if waits {
            await_ready(&socket);
        }
        drop(socket);
        let mut text = String::new();
        running.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!((running.0.wait().unwrap().code(), text.as_str()), (Some(0), ""));
    }
}

#[test]
fn a_spare_refuses_what_is_no_whole_message() {
    if !has_kvm("a_spare_refuses_what_is_no_whole_message") {
        return;
    }
    let whole = message(&["--kernel", "fd:128"]);
    let much = vec![0; 100 << 10];
    for bytes in [&whole[..1], &whole[..whole.len() - 1], &much[..]] {
        let (status, said) = answer_to(bytes, &[null(), null(), null()]);
        assert_eq!(status, Some(1), "{said}");
        assert!(said.starts_with("slipway-vmm: the message to a spare is cut"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    for count in [0, 1, 67] {
        let files: Vec<_> = std::iter::repeat_with(null).take(count).collect();
        let (status, said) = answer_to(&whole, &files);
        assert_eq!(status, Some(1), "{said}");
        assert_eq!(said, format!("slipway-vmm: a spare was sent {count} descriptors\n"));
    }
}

#[test]
fn a_spare_refuses_a_wrong_command_line_as_others_do() {
    if !has_kvm("a_spare_refuses_a_wrong_command_line_as_others_do") {
        return;
    }
    for (options, said) in [
        (&["--cpus", "two"][..], "--cpus"),
        (&["--kernel", "fd:129"][..], "129 was not inherited"),
        (&["--spare", "fd:128"][..], "this VMM was one"),
    ] {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (status, first) = answer_to(&message(options), &[null(), writer, null()]);
        let mut text = String::new();
        File::from(reader).read_to_string(&mut text).unwrap();
        assert_eq!((status, first.as_str()), (Some(2), ""), "{text}");
        assert!(text.contains(said), "{text}");
    }
}
