//! TAP interfaces: ports whose peer is the host's network stack
//! (`Documentation/networking/tuntap.rst` of the kernel).
//!
//! Frames carry the virtio header, so that segments of up to 64 KiB cross between host and guests
//! uncut. Each frame costs a system call: a TAP interface has no batched calls.

use std::ffi::{c_int, c_short, c_ulong};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use slipway_ram::Span;

use super::{check, is_full};
use crate::vnet::HEADER;
use crate::{Abilities, Burst, Delivered, LinkSetting, MAX_FRAME, Mac, Offload, Pick, Port};

/// The largest number of frames read at a time.
const BATCH: usize = 32;
/// Room for one frame, header included.
const ROOM: usize = (HEADER + MAX_FRAME).next_multiple_of(64);
/// Room for the frames that are read at a time: the last one may be of any length, and the others
/// lie one behind the other before it. Each container has a port, so this is small.
const AREA: usize = 2 * ROOM;
/// The longest name of an interface.
const NAME: usize = libc::IFNAMSIZ - 1;

// From <linux/if_tun.h>, which the libc crate has in part.
const TUNSETIFF: c_ulong = 0x4004_54ca;
const TUNSETPERSIST: c_ulong = 0x4004_54cb;
const TUNSETOFFLOAD: c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: c_ulong = 0x4004_54d8;
const TUNSETCARRIER: c_ulong = 0x4004_54e2;
/// From <linux/sockios.h>.
const SIOCSIFHWADDR: c_ulong = 0x8924;
const IFF_TUN_EXCL: c_int = 0x8000;
const TUN_F_CSUM: c_ulong = 1;
const TUN_F_TSO4: c_ulong = 2;
const TUN_F_TSO6: c_ulong = 4;
const TUN_F_TSO_ECN: c_ulong = 8;

/// A port at a TAP interface.
pub struct TapPort {
    file: OwnedFd,
    name: String,
    /// Frames read, one behind the other.
    memory: Span,
    /// The pieces of the frame that is being written.
    vectors: Vec<libc::iovec>,
    malformed: u64,
    /// The interface was removed.
    gone: bool,
    /// The interface has a carrier, or has none; `None` if that is unknown.
    carrier: Option<bool>,
}

/// A descriptor of a TAP interface beside its port, which keeps the interface alive and decides
/// whether it outlives its descriptors.
#[derive(Debug)]
pub struct TapHold(OwnedFd);

impl TapHold {
    /// Sets whether the interface stays after its last descriptor is closed.
    ///
    /// # Errors
    /// The errors of ioctl(2).
    pub fn set_persistent(&self, persistent: bool) -> std::io::Result<()> {
        let persistent = c_ulong::from(persistent);
        // SAFETY: the request takes a number.
        check(unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETPERSIST as _, persistent) })
    }
}

// SAFETY: `vectors` holds valid pointers only within a call.
unsafe impl Send for TapPort {}

impl TapPort {
    /// Kinds of frames that a TAP interface takes. Linux takes UDP datagrams that are still to be
    /// cut only since 6.2; most hosts are older.
    pub const ABILITIES: Abilities = Abilities { udp: false, ..Abilities::ALL };

    /// Creates the TAP interface `name`, or opens an existing one that no process has open. A new
    /// interface is down and without addresses. It is removed with the port unless it is
    /// [persistent](TapHold::set_persistent).
    ///
    /// # Errors
    /// `InvalidInput` if `name` cannot be an interface's name, or names another kind of interface;
    /// `NotFound` if the kernel has no TUN/TAP driver; `PermissionDenied` without CAP_NET_ADMIN;
    /// `ResourceBusy` if a process has the interface open.
    pub fn open(name: &str) -> std::io::Result<Self> {
        Self::open_with(name, 0)
    }

    /// Creates the TAP interface `name`.
    ///
    /// # Errors
    /// The errors of [`TapPort::open`]; `ResourceBusy` if there is an interface of that name.
    pub fn create(name: &str) -> std::io::Result<Self> {
        Self::open_with(name, IFF_TUN_EXCL)
    }

    fn open_with(name: &str, more: c_int) -> std::io::Result<Self> {
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
        let kind = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | more;
        request.ifr_ifru.ifru_flags = kind as c_short;
        // SAFETY: the request takes a pointer to an `ifreq`, owned by this function.
        check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &raw mut request) })?;
        // The kernel gives an interface a carrier when it is opened.
        Ok(Self { carrier: Some(true), ..Self::of(file, name)? })
    }

    /// Continues with the descriptor of an earlier port, of this process or another.
    ///
    /// # Errors
    /// If the descriptor is not a TAP interface's.
    pub fn of(file: OwnedFd, name: &str) -> std::io::Result<Self> {
        let size = HEADER as c_int;
        // SAFETY: the request takes a pointer to an `int`, owned by this function.
        check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETVNETHDRSZ as _, &raw const size) })?;
        let offload = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
        // SAFETY: the request takes a number.
        check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD as _, offload) })?;
        let memory = Span::heap(AREA);
        Ok(Self {
            file,
            name: name.to_owned(),
            memory,
            vectors: Vec::new(),
            malformed: 0,
            gone: false,
            carrier: None,
        })
    }

    /// Returns the interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns another descriptor of the interface.
    ///
    /// # Errors
    /// If no descriptors are left.
    pub fn hold(&self) -> std::io::Result<TapHold> {
        self.file.try_clone().map(TapHold)
    }

    /// Sets the interface's MAC address.
    ///
    /// # Errors
    /// The errors of ioctl(2).
    pub fn set_mac(&self, mac: Mac) -> std::io::Result<()> {
        // SAFETY: all zeros is a valid `ifreq`.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let mut address =
            libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data: Default::default() };
        for (to, from) in address.sa_data.iter_mut().zip(mac.0) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_hwaddr = address;
        let file = self.file.as_raw_fd();
        // SAFETY: the request takes a pointer to an `ifreq`, owned by this function.
        check(unsafe { libc::ioctl(file, SIOCSIFHWADDR as _, &raw mut request) })
    }

    /// Reads a frame to offset `at` and returns its length with its header. Returns `None` if there
    /// is no frame.
    fn read(&mut self, at: usize) -> Option<usize> {
        let place = self.memory.slice(at, ROOM);
        let (address, len) = place.io_vector();
        // SAFETY: memory of this process, of this length, which `self.memory` keeps.
        let read = unsafe { libc::read(self.file.as_raw_fd(), address.cast(), len) };
        if read < 0 {
            let error = std::io::Error::last_os_error();
            self.gone = matches!(error.raw_os_error(), Some(libc::EBADFD | libc::EIO));
        }
        usize::try_from(read).ok()
    }

    /// Adds the frame at offset `at`, of `len` bytes with its header. Returns `false` if it is
    /// malformed.
    fn add(&self, burst: &mut Burst, at: usize, len: usize) -> bool {
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

    /// Writes a frame. The error is the kernel's, or `InvalidInput` for a frame of more pieces than
    /// a system call takes: the kernel would send the first pieces as a frame.
    fn write(&mut self, burst: &Burst, pick: Pick) -> std::io::Result<()> {
        let offload = burst.offload_of(pick);
        // No payload offset: the kernel finds it by itself.
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
        // SAFETY: the header and the frame's head are borrowed for the call, and the burst pins the
        // rest; the kernel answers memory that is gone with an error.
        let written = unsafe { libc::writev(self.file.as_raw_fd(), self.vectors.as_ptr(), count) };
        if written < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Port for TapPort {
    fn abilities(&self) -> Abilities {
        Self::ABILITIES
    }

    fn is_up(&self) -> bool {
        !self.gone
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let limit = limit.min(burst.room()).min(BATCH);
        let mut at = 0;
        for _ in 0..limit {
            if at + ROOM > AREA {
                break;
            }
            let Some(len) = self.read(at) else { return false };
            self.malformed += u64::from(!self.add(burst, at, len));
            at += len.next_multiple_of(64);
        }
        true
    }

    fn release(&mut self) {}

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let mut delivered = Delivered::default();
        for (at, pick) in picks.iter().enumerate() {
            match self.write(burst, *pick) {
                Ok(()) => {
                    delivered.frames += 1;
                    delivered.bytes += burst.len_of(*pick) as u64;
                }
                Err(error) if is_full(&error) => {
                    // Later frames must not overtake this one.
                    delivered.full = (picks.len() - at) as u32;
                    break;
                }
                Err(_) => delivered.refused += 1,
            }
        }
        delivered
    }

    fn arm(&mut self) -> bool {
        // The descriptor is readable as long as a frame waits.
        false
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        // The descriptor of a removed interface would report an error for ever.
        (!self.gone).then(|| self.file.as_fd())
    }

    fn malformed(&mut self) -> u64 {
        std::mem::take(&mut self.malformed)
    }

    fn set_link(&mut self, link: LinkSetting) {
        let wanted = link != LinkSetting::Down;
        // The request waits for the kernel's lock of all interfaces.
        if self.carrier == Some(wanted) {
            return;
        }
        self.carrier = Some(wanted);
        let carrier = c_int::from(wanted);
        // Kernels before 4.20 lack the request: the peer sees a carrier, but nothing passes either.
        // SAFETY: the request takes a pointer to an `int`, owned by this function.
        unsafe { libc::ioctl(self.file.as_raw_fd(), TUNSETCARRIER as _, &raw const carrier) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::frame_in_pieces;

    #[test]
    fn no_frame_overtakes_one_without_room() {
        // A pipe of one page refuses a long write, but has room for a shorter one.
        let flags = rustix::pipe::PipeFlags::NONBLOCK | rustix::pipe::PipeFlags::CLOEXEC;
        let (_reader, file) = rustix::pipe::pipe_with(flags).unwrap();
        let page = rustix::pipe::fcntl_setpipe_size(&file, 1).unwrap();
        let memory = Span::heap(page);
        let name = String::new();
        let span = memory.clone();
        let mut port = TapPort {
            file,
            name,
            memory,
            vectors: vec![],
            malformed: 0,
            gone: false,
            carrier: None,
        };
        let mut burst = Burst::new();
        for len in [page / 2, page / 2, 60, 60] {
            burst.push(&span, 0, len, Offload::NONE).unwrap();
        }
        let picks = [0, 1, 2, 3].map(|frame| Pick { frame, tci: 0 });
        let delivered = port.deliver(&burst, &picks);
        let bytes = page as u64 / 2;
        assert_eq!(delivered, Delivered { frames: 1, bytes, full: 3, refused: 0 });
    }

    #[test]
    fn a_frame_in_more_pieces_than_a_call_takes_is_refused() {
        let file = rustix::fs::memfd_create("tap", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let memory = Span::heap(64);
        let name = String::new();
        let mut port = TapPort {
            file,
            name,
            memory,
            vectors: vec![],
            malformed: 0,
            gone: false,
            carrier: None,
        };
        // Two more vectors are the header's and the head's.
        let most = libc::UIO_MAXIOV as usize - 2;
        for (pieces, frames) in [(most, 1), (most + 1, 0), (9000, 0)] {
            let delivered = port.deliver(&frame_in_pieces(pieces), &[Pick::default()]);
            assert_eq!((delivered.frames, delivered.refused), (frames, 1 - frames), "{pieces}");
        }
        let written = rustix::fs::fstat(&port.file).unwrap().st_size as usize;
        assert_eq!(written, HEADER + 96 + most);
    }
}
