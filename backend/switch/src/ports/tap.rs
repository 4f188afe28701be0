//! TAP interfaces: ports whose peer is the host's network stack (`Documentation/networking/tuntap.rst`
//! of the kernel).
//!
//! Frames carry the virtio header, so that segments of up to 64 KiB cross between host and guests whole.
//! A frame is a system call each way: there is no other interface to it.

use std::ffi::{c_int, c_short, c_ulong};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use slipway_ram::Span;

use super::{check, is_full};
use crate::vnet::HEADER;
use crate::{Abilities, Burst, Delivered, Link, MAX_FRAME, Offload, Pick, Port};

/// Frames read at a time.
const BATCH: usize = 32;
/// Room for one of them, header included.
const ROOM: usize = (HEADER + MAX_FRAME).next_multiple_of(64) + 64;
/// Longest name of an interface.
const NAME: usize = libc::IFNAMSIZ - 1;

// From <linux/if_tun.h>, which the libc crate has in part.
const TUNSETIFF: c_ulong = 0x4004_54ca;
const TUNSETPERSIST: c_ulong = 0x4004_54cb;
const TUNSETOFFLOAD: c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: c_ulong = 0x4004_54d8;
const TUNSETCARRIER: c_ulong = 0x4004_54e2;
const TUN_F_CSUM: c_ulong = 1;
const TUN_F_TSO4: c_ulong = 2;
const TUN_F_TSO6: c_ulong = 4;
const TUN_F_TSO_ECN: c_ulong = 8;

/// A port at a TAP interface.
pub struct TapPort {
    file: OwnedFd,
    name: String,
    /// Frames read, [`ROOM`] bytes apart.
    memory: Span,
    /// The pieces of the frame that is being written.
    vectors: Vec<libc::iovec>,
    malformed: u64,
    /// The interface was removed.
    gone: bool,
}

// SAFETY: `vectors` points anywhere only within a call.
unsafe impl Send for TapPort {}

impl TapPort {
    /// Makes the TAP interface `name`, or opens it if it is there and nobody has it. It is down, and
    /// without addresses, when it is new, and goes with the port unless it is
    /// [kept](TapPort::set_persistent).
    ///
    /// # Errors
    /// `InvalidInput`: no name of an interface. `NotFound`: the kernel has no TUN/TAP driver. `PermissionDenied`: it takes
    /// CAP_NET_ADMIN. `ResourceBusy`: somebody has it. `InvalidInput` too when it is another kind of
    /// interface.
    pub fn open(name: &str) -> std::io::Result<Self> {
        let bytes = name.as_bytes();
        let bad = |byte: &u8| matches!(byte, b'/' | b'%' | b':') || byte.is_ascii_whitespace();
        if bytes.is_empty()
            || bytes.len() > NAME
            || bytes.iter().any(bad)
            || name == "."
            || name == ".."
        {
            let text = format!(
                "'{name}' is no name of an interface: up to {NAME} characters, no / : % or blank"
            );
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
        }
        let flags =
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
        let file = rustix::fs::open("/dev/net/tun", flags, rustix::fs::Mode::empty())?;
        // SAFETY: all zeros is a valid `ifreq`.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
            *to = *from as libc::c_char;
        }
        let kind = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        request.ifr_ifru.ifru_flags = kind as c_short;
        // SAFETY: the request takes a pointer to an `ifreq`, of ours.
        check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &raw mut request) })?;
        Self::of(file, name)
    }

    /// Goes on with the descriptor of a port that is gone, in this process or another.
    ///
    /// # Errors
    /// It is no TAP interface.
    pub fn of(file: OwnedFd, name: &str) -> std::io::Result<Self> {
        let size = HEADER as c_int;
        // SAFETY: the request takes a pointer to an `int`, of ours.
        check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETVNETHDRSZ as _, &raw const size) })?;
        let offload = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
        // SAFETY: the request takes a number.
        check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD as _, offload) })?;
        let memory = Span::heap(BATCH * ROOM);
        Ok(Self {
            file,
            name: name.to_owned(),
            memory,
            vectors: Vec::new(),
            malformed: 0,
            gone: false,
        })
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A duplicate of its descriptor, which keeps the interface.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn keep(&self) -> std::io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// Whether the interface stays when nobody has its descriptor.
    ///
    /// # Errors
    /// What ioctl(2) says.
    pub fn set_persistent(&self, persistent: bool) -> std::io::Result<()> {
        // SAFETY: the request takes a number.
        check(unsafe {
            libc::ioctl(self.file.as_raw_fd(), TUNSETPERSIST as _, c_ulong::from(persistent))
        })
    }

    /// Reads a frame into place `number`. None: there is none.
    fn read(&mut self, number: usize) -> Option<usize> {
        let place = self.memory.slice(number * ROOM, ROOM);
        let (address, len) = place.io_vector();
        // SAFETY: memory of our own, of this length, which `self.memory` keeps.
        let read = unsafe { libc::read(self.file.as_raw_fd(), address.cast(), len) };
        if read < 0 {
            let error = std::io::Error::last_os_error();
            self.gone = matches!(error.raw_os_error(), Some(libc::EBADFD | libc::EIO));
        }
        usize::try_from(read).ok()
    }

    /// Adds the frame in place `number`, of `len` bytes with its header. False: it is none.
    fn add(&self, burst: &mut Burst, number: usize, len: usize) -> bool {
        let at = number * ROOM;
        let mut header = [0; HEADER];
        let frame = len.checked_sub(HEADER).filter(|frame| (1..=MAX_FRAME).contains(frame));
        let read = self.memory.read(at, &mut header);
        match (frame, read.ok().and(Offload::from_header(&header))) {
            (Some(frame), Some(offload)) => {
                burst.push(&self.memory, at + HEADER, frame, offload).is_ok()
            }
            _ => false,
        }
    }

    /// Writes a frame. The error is the kernel's; `InvalidInput` too for one of more pieces than a system
    /// call takes, of which the kernel would take those and call it a frame.
    fn write(&mut self, burst: &Burst, pick: Pick) -> std::io::Result<()> {
        let offload = burst.offload_of(pick);
        // Where the payload begins: the kernel looks for itself.
        let header = offload.to_header(0);
        let reader = burst.read(pick);
        self.vectors.clear();
        let piece = |base: *const u8, len: usize| libc::iovec {
            iov_base: base.cast_mut().cast(),
            iov_len: len,
        };
        self.vectors.push(piece(header.as_ptr(), HEADER));
        reader.pieces(&mut |base, len| self.vectors.push(piece(base, len)));
        if self.vectors.len() > libc::UIO_MAXIOV as usize {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        let count = self.vectors.len() as c_int;
        // SAFETY: the header and the frame's head are borrowed for the call, the rest is pinned by the
        // burst; the kernel answers memory that is gone with an error.
        let written = unsafe { libc::writev(self.file.as_raw_fd(), self.vectors.as_ptr(), count) };
        if written < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Port for TapPort {
    fn abilities(&self) -> Abilities {
        // Linux takes UDP datagrams to be cut from 6.2 on; most hosts are older.
        Abilities { udp: false, ..Abilities::ALL }
    }

    fn is_up(&self) -> bool {
        !self.gone
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let limit = limit.min(burst.room()).min(BATCH);
        for number in 0..limit {
            let Some(len) = self.read(number) else { return false };
            self.malformed += u64::from(!self.add(burst, number, len));
        }
        true
    }

    fn release(&mut self) {}

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let mut delivered = Delivered::default();
        for pick in picks {
            match self.write(burst, *pick) {
                Ok(()) => {
                    delivered.frames += 1;
                    delivered.bytes += burst.len_of(*pick) as u64;
                }
                Err(error) if is_full(&error) => delivered.full += 1,
                Err(_) => delivered.refused += 1,
            }
        }
        delivered
    }

    fn arm(&mut self) -> bool {
        // Its descriptor is readable for as long as a frame waits.
        false
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        // That of an interface that is gone reports an error for ever.
        (!self.gone).then(|| self.file.as_fd())
    }

    fn malformed(&mut self) -> u64 {
        std::mem::take(&mut self.malformed)
    }

    fn set_link(&mut self, link: Link) {
        let carrier = c_int::from(link != Link::Down);
        // Kernels before 4.20 have no such request: nothing passes all the same.
        // SAFETY: the request takes a pointer to an `int`, of ours.
        unsafe { libc::ioctl(self.file.as_raw_fd(), TUNSETCARRIER as _, &raw const carrier) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::frame_in_pieces;

    #[test]
    fn a_frame_in_more_pieces_than_a_call_takes_is_refused() {
        let file = rustix::fs::memfd_create("tap", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let memory = Span::heap(64);
        let name = String::new();
        let mut port = TapPort { file, name, memory, vectors: vec![], malformed: 0, gone: false };
        // With the header's and the head's.
        let most = libc::UIO_MAXIOV as usize - 2;
        for (pieces, frames) in [(most, 1), (most + 1, 0), (9000, 0)] {
            let delivered = port.deliver(&frame_in_pieces(pieces), &[Pick::default()]);
            assert_eq!((delivered.frames, delivered.refused), (frames, 1 - frames), "{pieces}");
        }
        let written = rustix::fs::fstat(&port.file).unwrap().st_size as usize;
        assert_eq!(written, HEADER + 96 + most);
    }
}
