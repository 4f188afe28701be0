//! System calls whose effect the kernel records in lasting memory: the header of a message, with
//! the count that sendmmsg(2) and recvmmsg(2) store, and buffers for descriptors.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use slipway_peer::{Bin, MAX_FILES};

/// The size of a header in bytes.
pub(super) const HEADER: usize = size_of::<libc::mmsghdr>();

/// Prepares a header for a call with one part. Its count stays as it is.
///
/// # Safety
/// The header can be written to; it refers to `part` afterwards.
pub(super) unsafe fn prepare(
    header: *mut libc::mmsghdr,
    part: &mut libc::iovec,
) -> *mut libc::mmsghdr {
    // SAFETY: zeros are a valid header; the caller vouches for the header's memory; the count is
    // not touched.
    unsafe {
        let mut fresh: libc::msghdr = std::mem::zeroed();
        fresh.msg_iov = part;
        fresh.msg_iovlen = 1;
        (&raw mut (*header).msg_hdr).write(fresh);
    }
    header
}

/// The largest number of descriptors of a reply.
const MAX_ATTACHED: usize = 2;

/// A buffer for the descriptors of a reply: a control header of 16 bytes and the descriptors'
/// numbers.
#[repr(C, align(8))]
pub(super) struct Control([u8; 24]);

impl Control {
    pub(super) fn new() -> Self {
        Self([0; 24])
    }

    /// Attaches copies of `files`, at most [`MAX_ATTACHED`], to the message of `header`.
    pub(super) fn attach(&mut self, header: *mut libc::mmsghdr, files: &[OwnedFd]) {
        if files.is_empty() {
            return;
        }
        assert!(files.len() <= MAX_ATTACHED, "a reply with more descriptors than there are kinds");
        let len = std::mem::size_of_val(files) as u32;
        // SAFETY: the header is in our mapping, and what it refers to is this buffer, which is
        // aligned and has room for a control message with two descriptors (CMSG_SPACE is 24).
        unsafe {
            let message = &raw mut (*header).msg_hdr;
            (*message).msg_control = self.0.as_mut_ptr().cast();
            (*message).msg_controllen = libc::CMSG_SPACE(len) as _;
            let first = libc::CMSG_FIRSTHDR(message);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(len) as _;
            let numbers = libc::CMSG_DATA(first).cast::<libc::c_int>();
            for (at, file) in files.iter().enumerate() {
                numbers.add(at).write_unaligned(file.as_raw_fd());
            }
        }
    }
}

/// The size in bytes of a control message with [`MAX_FILES`] descriptors.
// SAFETY: computes a number.
const ROOM: usize =
    unsafe { libc::CMSG_SPACE((MAX_FILES * size_of::<libc::c_int>()) as u32) } as usize;

/// A buffer with room for every descriptor of a message. The kernel closes descriptors without room
/// in the calling thread, which may take as long as the client likes.
#[repr(C, align(8))]
pub(super) struct Descriptors(MaybeUninit<[u8; ROOM]>);

impl Descriptors {
    pub(super) fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    /// Has the call with `header` store the message's descriptors here.
    pub(super) fn attach(&mut self, header: *mut libc::mmsghdr) {
        // SAFETY: the header is in our mapping.
        unsafe {
            let message = &raw mut (*header).msg_hdr;
            (*message).msg_control = self.0.as_mut_ptr().cast();
            (*message).msg_controllen = ROOM as _;
        }
    }

    /// Hands the received descriptors to `bin` and returns their number.
    ///
    /// # Safety
    /// A call with `header`, to which this was attached, has just succeeded. Called once.
    pub(super) unsafe fn discard(&mut self, header: *mut libc::mmsghdr, bin: &Bin) -> usize {
        let mut count = 0;
        // SAFETY: the kernel filled in the control messages and their lengths; each descriptor is
        // new and owned by nobody else.
        unsafe {
            let message = &raw mut (*header).msg_hdr;
            let mut part = libc::CMSG_FIRSTHDR(message);
            while !part.is_null() {
                if ((*part).cmsg_level, (*part).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                    let bytes = (*part).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    let files = libc::CMSG_DATA(part).cast::<libc::c_int>();
                    for at in 0..bytes / size_of::<libc::c_int>() {
                        let file = files.wrapping_add(at).read_unaligned();
                        bin.discard(OwnedFd::from_raw_fd(file));
                        count += 1;
                    }
                }
                part = libc::CMSG_NXTHDR(message, part);
            }
        }
        count
    }
}

const _: () = {
    let numbers = MAX_ATTACHED * size_of::<libc::c_int>();
    // SAFETY: computes a number.
    assert!(unsafe { libc::CMSG_SPACE(numbers as u32) } as usize == size_of::<Control>());
};

pub(super) fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
