//! A program in the place of a VMM that is started ahead.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::net::{RecvFlags, SendFlags};
use slipway_machine::spare;
use slipway_peer::{Bin, receive};

/// Returns the command line of a VMM: `own`, or the one that comes over the socket of a spare which
/// `own` names. A spare whose launcher is gone ends.
pub(crate) fn for_arguments(own: String) -> String {
    let Some((_, rest)) = own.split_once("--spare fd:") else { return own };
    let number = rest.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: the launcher passed this descriptor for this program to own.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::net::send(&socket, &[spare::READY], SendFlags::NOSIGNAL).unwrap();
    let mut bytes = vec![0; spare::MAX_BYTES];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let received = receive(&socket, &mut parts, &Bin::new(), RecvFlags::empty()).unwrap();
    if received.bytes == 0 {
        std::process::exit(0);
    }
    let words = spare::decode(&bytes[..received.bytes]).unwrap();
    for (file, number) in received.files.iter().zip([1, 2].into_iter().chain(spare::FIRST_FILE..)) {
        // SAFETY: nothing in this process has the number, or it is a standard stream.
        let placed = unsafe { libc::dup2(file.as_fd().as_raw_fd(), number) };
        assert_eq!(placed, number);
    }
    let words = words.into_iter().map(|word| word.into_string().unwrap());
    words.collect::<Vec<_>>().join(" ")
}
