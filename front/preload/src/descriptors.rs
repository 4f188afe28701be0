//! The kernel's reports about this process's descriptors, in `/proc`. All of this runs in a child
//! of vfork(2) too, so nothing here allocates memory.

use std::io::Write;

use libc::{c_int, c_long};
use slipway_socket::hidden::Survivor;

use crate::fds;
use crate::real::{self, sys};

/// The kind of a descriptor, as far as this library cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Eventfd,
    /// A TCP socket that listens.
    Listener,
}

/// A path on the stack, zero-terminated: building it allocates nothing.
struct Path([u8; 64]);

impl Path {
    fn of(text: std::fmt::Arguments<'_>) -> Self {
        let mut bytes = [0; 64];
        // A path that is too long is cut and names no file; the last byte stays zero.
        let _ = (&mut bytes[..63]).write_fmt(text);
        Self(bytes)
    }

    fn read(&self, into: &mut [u8]) -> usize {
        let file =
            sys!(SYS_openat, libc::AT_FDCWD, self.0.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return 0;
        }
        let got = sys!(SYS_read, file, into.as_mut_ptr(), into.len());
        real::close(file as c_int);
        usize::try_from(got).unwrap_or(0)
    }
}

/// Calls `each` with every descriptor that survives execve(2) and may be ours.
pub fn surviving(mut each: impl FnMut(c_int, What)) {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let folder = sys!(SYS_openat, libc::AT_FDCWD, c"/proc/self/fd".as_ptr(), flags) as c_int;
    if folder < 0 {
        return;
    }
    let last = Survivor::first();
    let mut entries = Entries([0; 2048]);
    loop {
        let got = sys!(SYS_getdents64, folder, entries.0.as_mut_ptr(), entries.0.len());
        let Some(got) = usize::try_from(got).ok().filter(|got| *got > 0) else { break };
        numbers(&entries.0[..got], |fd| {
            if fd != folder
                && fd < last
                && let Some(what) = what_survives(folder, fd)
            {
                each(fd, what);
            }
        });
    }
    real::close(folder);
}

/// A buffer with the alignment of the kernel's directory entries.
#[repr(align(8))]
struct Entries([u8; 2048]);

/// Calls `each` with every file name in `entries` that is a number. `entries` is the output of
/// getdents64(2): inode and offset of 8 bytes each, the entry's length of 2, a type of 1, the name.
fn numbers(entries: &[u8], mut each: impl FnMut(c_int)) {
    let mut rest = entries;
    while let Some(length) = rest.get(16..18) {
        let length = usize::from(u16::from_ne_bytes([length[0], length[1]])).max(19);
        let name = rest.get(19..length).unwrap_or_default();
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        if let Some(number) = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok()) {
            each(number);
        }
        rest = rest.get(length..).unwrap_or_default();
    }
}

fn what_survives(folder: c_int, fd: c_int) -> Option<What> {
    let flags = sys!(SYS_fcntl, fd, libc::F_GETFD, 0);
    if flags < 0 || flags & c_long::from(libc::FD_CLOEXEC) != 0 {
        return None;
    }
    let mut link = [0; 32];
    let name = Path::of(format_args!("{fd}"));
    let got = sys!(SYS_readlinkat, folder, name.0.as_ptr(), link.as_mut_ptr(), link.len());
    let link = link.get(..usize::try_from(got).ok()?)?;
    if link.starts_with(b"anon_inode:[eventfd]") {
        return Some(What::Eventfd);
    }
    let listens = link.starts_with(b"socket:[")
        && real::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Some(1)
        && real::tcp_domain(fd).is_some();
    listens.then_some(What::Listener)
}

/// Returns the kernel's id of the eventfd `fd` of `process`, or `None` if `fd` is no eventfd. The
/// id is unique among the eventfds that are open at the same time (Linux 5.2).
pub fn eventfd_of(process: impl std::fmt::Display, fd: c_int) -> Option<u32> {
    let mut text = [0; 512];
    let got = Path::of(format_args!("/proc/{process}/fdinfo/{fd}")).read(&mut text);
    let text = std::str::from_utf8(&text[..got]).ok()?;
    text.lines().find_map(|line| line.strip_prefix("eventfd-id:"))?.trim().parse().ok()
}

/// Returns whether `fd`, a descriptor of a child of vfork(2), is one of the parent's connections.
pub fn is_a_streams(fd: c_int) -> bool {
    let Some(own) = eventfd_of("self", fd) else { return false };
    let is_it = |theirs| eventfd_of(fds::owner(), theirs) == Some(own);
    // Most descriptors have the number that they have in the parent.
    if fds::stream(fd).is_some() && is_it(fd) {
        return true;
    }
    let mut streams = fds::all(0, c_int::MAX - 1).filter(|(_, object)| object.stream().is_some());
    streams.any(|(theirs, _)| is_it(theirs))
}

/// Returns whether `fd` is a memfd that a previous image, or another thread, left as
/// [`Survivor::Numbers`].
pub fn are_numbers(fd: c_int) -> bool {
    let mut link = [0; 32];
    let name = Path::of(format_args!("/proc/self/fd/{fd}"));
    let got = sys!(SYS_readlink, name.0.as_ptr(), link.as_mut_ptr(), link.len());
    let flags = sys!(SYS_fcntl, fd, libc::F_GETFD, 0);
    got > 0
        && flags & c_long::from(libc::FD_CLOEXEC) == 0
        && link.starts_with(b"/memfd:slipway-numbers")
}

/// Returns whether `fd` is a ticket that a previous image, or another thread, left.
pub fn is_ticket(fd: c_int) -> bool {
    let flags = sys!(SYS_fcntl, fd, libc::F_GETFD, 0);
    flags >= 0
        && flags & c_long::from(libc::FD_CLOEXEC) == 0
        && real::option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == Some(libc::AF_UNIX)
        && real::option(fd, libc::SOL_SOCKET, libc::SO_TYPE) == Some(libc::SOCK_SEQPACKET)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a directory entry of getdents64(2) whose length is said to be `length`.
    fn entry(name: &[u8], length: u16) -> Vec<u8> {
        let mut bytes = vec![0xee; 16];
        bytes.extend_from_slice(&length.to_ne_bytes());
        bytes.push(libc::DT_LNK);
        bytes.extend_from_slice(name);
        bytes
    }

    fn numbers_in(entries: &[Vec<u8>]) -> Vec<c_int> {
        let mut found = Vec::new();
        numbers(&entries.concat(), |number| found.push(number));
        found
    }

    #[test]
    fn numbers_are_read_from_the_names_of_a_folder() {
        let entries = [
            entry(b".\0\0\0\0", 24),
            entry(b"..\0\0\0", 24),
            entry(b"7\0\0\0\0", 24),
            entry(b"1048575\0\0\0\0\0\0", 32),
            entry(b"12x\0\0", 24),
            entry(b"99999999999\0\0", 32),
        ];
        assert_eq!(numbers_in(&entries), [7, 1_048_575]);
    }

    #[test]
    fn an_entry_that_is_cut_or_lies_about_its_length_is_no_number() {
        let whole = entry(b"7\0\0\0\0", 24);
        for cut in 0..whole.len() {
            assert!(numbers_in(&[whole[..cut].to_vec()]).is_empty(), "{cut}");
        }
        assert!(numbers_in(&[entry(b"7\0\0\0\0", u16::MAX)]).is_empty());
        // A length below that of an entry's head is the head's, so a reader goes on.
        numbers_in(&[entry(b"7\0\0\0\0", 0), whole]);
        // A name without its zero ends with its entry.
        assert_eq!(numbers_in(&[entry(b"12345", 24)]), [12_345]);
    }

    #[test]
    fn a_path_that_is_too_long_ends_with_a_zero() {
        let path = Path::of(format_args!("/proc/{}/fdinfo/1", "9".repeat(80)));
        assert_eq!((path.0[62], path.0[63]), (b'9', 0));
        assert_eq!(path.read(&mut [0; 8]), 0);
    }

    fn eventfd(flags: c_int) -> c_int {
        sys!(SYS_eventfd2, 0, flags) as c_int
    }

    #[test]
    fn an_eventfd_has_an_id_which_its_copies_have_too() {
        let (first, other) = (eventfd(libc::EFD_CLOEXEC), eventfd(libc::EFD_CLOEXEC));
        let copy = sys!(SYS_fcntl, first, libc::F_DUPFD_CLOEXEC, 0) as c_int;
        let id = eventfd_of("self", first);
        assert!(id.is_some());
        assert_eq!(eventfd_of("self", copy), id);
        assert_ne!(eventfd_of("self", other), id);
        let file = sys!(SYS_memfd_create, c"test".as_ptr(), libc::MFD_CLOEXEC) as c_int;
        assert_eq!((eventfd_of("self", file), eventfd_of("self", -1)), (None, None));
        for fd in [first, other, copy, file] {
            real::close(fd);
        }
    }

    #[test]
    fn what_is_closed_by_execve_does_not_survive() {
        let (stays, goes) = (eventfd(0), eventfd(libc::EFD_CLOEXEC));
        let mut found = Vec::new();
        surviving(|fd, what| found.push((fd, what)));
        assert!(found.contains(&(stays, What::Eventfd)));
        assert!(!found.iter().any(|(fd, _)| *fd == goes));
        for fd in [stays, goes] {
            real::close(fd);
        }
    }

    #[test]
    fn a_ticket_is_a_socket_of_its_kind_that_survives() {
        let socket = |kind| sys!(SYS_socket, libc::AF_UNIX, kind, 0) as c_int;
        let ticket = socket(libc::SOCK_SEQPACKET);
        let closed = socket(libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC);
        let stream = socket(libc::SOCK_STREAM);
        assert_eq!([ticket, closed, stream, -1].map(is_ticket), [true, false, false, false]);
        assert!(![ticket, -1].into_iter().any(are_numbers));
        for fd in [ticket, closed, stream] {
            real::close(fd);
        }
    }
}
