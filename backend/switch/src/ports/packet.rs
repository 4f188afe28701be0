//! Network interfaces of the host: ports whose peer is at the other end of the interface's wire
//! (packet(7)).
//!
//! Frames that the host itself sends through the interface are not seen, and the host's own stack
//! also gets the frames that the port gets: give the interface no addresses, or drop its frames
//! behind the port. The interface may be removed or set down at any time: the port then receives
//! nothing and refuses what it is given. Calls allocate a little, which is small beside their
//! system calls.

use std::ffi::{CString, c_int, c_void};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use slipway_ethernet_spec::{TAG, TYPE, ethertype};
use slipway_ram::Span;

use super::{check, is_full};
use crate::vnet::HEADER;
use crate::{Abilities, Burst, Delivered, MAX_FRAME, Offload, Pick, Port};

/// The largest number of frames in a system call.
const BATCH: usize = 32;
/// Room for a frame: a tag that the kernel took off, then header and frame.
const ROOM: usize = (TAG + HEADER + MAX_FRAME).next_multiple_of(64) + 64;
/// Bytes of frames that the kernel queues while the switch is busy: about 1,800 long frames.
const WAITING: c_int = 4 << 20;
/// Room for the kernel's ancillary data of a frame.
const CONTROL: usize = 64;

// From <linux/if_packet.h>, which the libc crate has in part.
const PACKET_ADD_MEMBERSHIP: c_int = 1;
const PACKET_AUXDATA: c_int = 8;
const PACKET_VNET_HDR: c_int = 15;
const PACKET_IGNORE_OUTGOING: c_int = 23;
const PACKET_MR_PROMISC: u16 = 1;
const PACKET_MR_ALLMULTI: u16 = 2;
const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
const TP_STATUS_VLAN_TPID_VALID: u32 = 1 << 6;

/// `struct packet_mreq`: how much an interface receives for a socket.
#[repr(C)]
struct Membership {
    interface: c_int,
    kind: u16,
    address_len: u16,
    address: [u8; 8],
}

/// `struct tpacket_auxdata`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Auxdata {
    status: u32,
    len: u32,
    captured: u32,
    mac: u16,
    network: u16,
    tci: u16,
    kind: u16,
}

/// A tag that the kernel took off a frame: its type (802.1Q's or 802.1ad's) and its control
/// information.
#[derive(Clone, Copy)]
struct Tag {
    kind: u16,
    tci: u16,
}

/// The frames that an interface receives for a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reception {
    /// All frames: the interface is in promiscuous mode while the port lives.
    All,
    /// Frames for the interface's own address, and those for groups.
    OwnAndGroups,
}

/// A port at a network interface of the host.
pub struct PacketPort {
    socket: OwnedFd,
    /// Frames received, [`ROOM`] bytes apart.
    memory: Span,
    /// The kernel's ancillary data of the received frames.
    control: Box<[[u64; CONTROL / 8]; BATCH]>,
    /// The pieces of frames that are being sent.
    vectors: Vec<libc::iovec>,
    malformed: u64,
}

// SAFETY: `vectors` holds valid pointers only within a call.
unsafe impl Send for PacketPort {}

impl PacketPort {
    /// Opens a port at the interface `name`, which receives all frames.
    ///
    /// # Errors
    /// `NotFound` if there is no such interface, `PermissionDenied` without CAP_NET_RAW.
    pub fn open(name: &str) -> std::io::Result<Self> {
        let missing = || {
            let text = format!("there is no network interface {name}; `ip link` lists them");
            std::io::Error::new(std::io::ErrorKind::NotFound, text)
        };
        let text = CString::new(name).map_err(|_| missing())?;
        // SAFETY: a string that ends with a zero.
        let index = unsafe { libc::if_nametoindex(text.as_ptr()) };
        if index == 0 {
            return Err(missing());
        }
        Self::open_index(index, Reception::All)
    }

    /// Opens a port at the interface number `index` of the calling thread's network namespace. The
    /// port may be used by any thread.
    ///
    /// # Errors
    /// ENODEV if there is no such interface, `PermissionDenied` without CAP_NET_RAW.
    pub fn open_index(index: u32, reception: Reception) -> std::io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: no pointers. Protocol 0: nothing is received before it is bound.
        let socket = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        check(socket)?;
        // SAFETY: the descriptor was just made, and nobody else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let one: c_int = 1;
        for option in [PACKET_VNET_HDR, PACKET_AUXDATA, PACKET_IGNORE_OUTGOING] {
            set(&socket, libc::SOL_PACKET, option, &one)?;
        }
        // Without the privilege for it, the usual buffer size has to do.
        let _ = set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &WAITING);
        bind(&socket, index)?;
        // Last: an interface that is seen to receive for this port has a port that takes it.
        join(&socket, index, reception)?;
        Ok(Self {
            socket,
            memory: Span::heap(BATCH * ROOM),
            control: Box::new([[0; CONTROL / 8]; BATCH]),
            vectors: Vec::new(),
            malformed: 0,
        })
    }

    /// Receives up to `limit` frames. Returns their lengths and the tags that the kernel took off.
    fn receive(&mut self, limit: usize) -> Vec<(usize, Option<Tag>)> {
        let (base, _) = self.memory.io_vector();
        let mut vectors: [libc::iovec; BATCH] = std::array::from_fn(|number| libc::iovec {
            iov_base: base.wrapping_add(number * ROOM + TAG).cast(),
            iov_len: ROOM - TAG,
        });
        // SAFETY: all zeros is a valid message.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        for (number, message) in messages.iter_mut().enumerate() {
            message.msg_hdr.msg_iov = &raw mut vectors[number];
            message.msg_hdr.msg_iovlen = 1;
            message.msg_hdr.msg_control = self.control[number].as_mut_ptr().cast::<c_void>();
            message.msg_hdr.msg_controllen = CONTROL as _;
        }
        let (socket, count) = (self.socket.as_raw_fd(), limit.min(BATCH) as u32);
        let none = std::ptr::null_mut();
        #[allow(clippy::disallowed_methods, reason = "a packet socket's peer is the kernel")]
        // SAFETY: each message has a vector and a control buffer, owned by this function or by
        // `self`.
        let received = unsafe {
            libc::recvmmsg(socket, messages.as_mut_ptr(), count, libc::MSG_DONTWAIT as _, none)
        };
        let received = usize::try_from(received).unwrap_or(0);
        let frame = |message: &libc::mmsghdr| (message.msg_len as usize, tag(&message.msg_hdr));
        messages[..received].iter().map(frame).collect()
    }

    /// Adds the frame in slot `number`, of `len` bytes with its header. Returns `false` if it is
    /// malformed.
    fn add(&self, burst: &mut Burst, number: usize, len: usize, tag: Option<Tag>) -> bool {
        let at = number * ROOM + TAG;
        let mut header = [0; HEADER];
        let Some(frame) = len.checked_sub(HEADER).filter(|len| (TYPE..=MAX_FRAME).contains(len))
        else {
            return false;
        };
        let read = self.memory.read(at, &mut header).ok();
        let Some(mut offload) = read.and(Offload::from_header(&header)) else { return false };
        let Some(tag) = tag else {
            return burst.push(&self.memory, at + HEADER, frame, offload).is_ok();
        };
        // Insert the tag where it was, from the room in front of the header.
        let [a, b] = tag.kind.to_be_bytes();
        let [c, d] = tag.tci.to_be_bytes();
        if let Some((start, _)) = &mut offload.checksum {
            *start = start.saturating_add(TAG as u16);
        }
        let mut whole = burst.begin();
        let added = self.memory.write(at - TAG, &[a, b, c, d]).is_ok()
            && whole.append(&self.memory, at + HEADER, TYPE).is_ok()
            && whole.append(&self.memory, at - TAG, TAG).is_ok()
            && whole.append(&self.memory, at + HEADER + TYPE, frame - TYPE).is_ok();
        if added {
            whole.finish(offload);
        }
        added
    }

    /// Sends up to [`BATCH`] frames. Returns the number that were sent, or the error of the first.
    fn send(&mut self, burst: &Burst, picks: &[Pick]) -> (usize, std::io::Result<()>) {
        let readers: Vec<_> = picks.iter().map(|pick| burst.read(*pick)).collect();
        let headers: Vec<_> =
            picks.iter().map(|pick| burst.offload_of(*pick).to_header(0)).collect();
        self.vectors.clear();
        let mut ends = Vec::with_capacity(picks.len());
        for (reader, header) in readers.iter().zip(&headers) {
            let mut add = |base: *const u8, len| {
                let iov_base = base.cast_mut().cast();
                self.vectors.push(libc::iovec { iov_base, iov_len: len });
            };
            add(header.as_ptr(), HEADER);
            reader.pieces(&mut add);
            ends.push(self.vectors.len());
        }
        // SAFETY: all zeros is a valid message.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        let mut begin = 0;
        for (message, end) in messages.iter_mut().zip(ends) {
            message.msg_hdr.msg_iov = self.vectors[begin..].as_mut_ptr();
            message.msg_hdr.msg_iovlen = (end - begin) as _;
            begin = end;
        }
        let (socket, count) = (self.socket.as_raw_fd(), picks.len().min(BATCH) as u32);
        // SAFETY: the vectors point to headers and heads that are borrowed for the call, and to
        // memory that the burst pins; the kernel answers memory that is gone with an error.
        let sent = unsafe {
            libc::sendmmsg(socket, messages.as_mut_ptr(), count, libc::MSG_DONTWAIT as _)
        };
        match usize::try_from(sent) {
            Ok(sent) => (sent, Ok(())),
            Err(_) => (0, Err(std::io::Error::last_os_error())),
        }
    }
}

/// Returns the tag that the kernel took off, from a frame's ancillary data.
fn tag(message: &libc::msghdr) -> Option<Tag> {
    // SAFETY: the kernel filled in the control buffer, whose length it set.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !control.is_null() {
        // SAFETY: within the control buffer, as the kernel laid it out.
        let (header, data) = unsafe { (&*control, libc::CMSG_DATA(control).cast::<Auxdata>()) };
        if (header.cmsg_level, header.cmsg_type) == (libc::SOL_PACKET, PACKET_AUXDATA) {
            // SAFETY: level and type say that the data is an `Auxdata`, not necessarily aligned.
            let told = unsafe { data.read_unaligned() };
            // Kernels before 3.14 do not tell the type.
            let typed = told.status & TP_STATUS_VLAN_TPID_VALID != 0;
            let kind = if typed { told.kind } else { ethertype::VLAN };
            let tagged = told.status & TP_STATUS_VLAN_VALID != 0;
            return tagged.then_some(Tag { kind, tci: told.tci });
        }
        // SAFETY: the kernel filled in the control buffer, whose length it set.
        control = unsafe { libc::CMSG_NXTHDR(message, control) };
    }
    None
}

impl Port for PacketPort {
    fn abilities(&self) -> Abilities {
        // Linux takes UDP datagrams that are still to be cut only since 6.2; most hosts are older.
        Abilities { udp: false, ..Abilities::ALL }
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let limit = limit.min(burst.room()).min(BATCH);
        let received = self.receive(limit);
        for (number, (len, tag)) in received.iter().enumerate() {
            self.malformed += u64::from(!self.add(burst, number, *len, *tag));
        }
        received.len() == limit
    }

    fn release(&mut self) {}

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let mut delivered = Delivered::default();
        let mut rest = picks;
        while !rest.is_empty() {
            let (sent, error) = self.send(burst, &rest[..rest.len().min(BATCH)]);
            delivered.frames += sent as u32;
            delivered.bytes +=
                rest[..sent].iter().map(|pick| burst.len_of(*pick) as u64).sum::<u64>();
            rest = &rest[sent..];
            match error {
                Ok(()) => {}
                Err(error) if is_full(&error) => {
                    delivered.full += rest.len() as u32;
                    break;
                }
                // The error is that of the first frame.
                Err(_) => {
                    delivered.refused += 1;
                    rest = &rest[1..];
                }
            }
        }
        delivered
    }

    fn arm(&mut self) -> bool {
        // The descriptor is readable as long as a frame waits.
        false
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn malformed(&mut self) -> u64 {
        std::mem::take(&mut self.malformed)
    }
}

/// Binds a packet socket to the interface `index`, for frames of all types.
fn bind(socket: &OwnedFd, index: u32) -> std::io::Result<()> {
    // SAFETY: all zeros is a valid address.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index as c_int;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: an address of this length.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })
}

/// Has the interface `index` receive such frames for as long as the socket lives.
fn join(socket: &OwnedFd, index: u32, reception: Reception) -> std::io::Result<()> {
    let membership = Membership {
        interface: index as c_int,
        kind: match reception {
            Reception::All => PACKET_MR_PROMISC,
            Reception::OwnAndGroups => PACKET_MR_ALLMULTI,
        },
        address_len: 0,
        address: [0; 8],
    };
    set(socket, libc::SOL_PACKET, PACKET_ADD_MEMBERSHIP, &membership)
}

/// Sets a socket option.
fn set<T>(socket: &OwnedFd, level: c_int, option: c_int, value: &T) -> std::io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    let value = (value as *const T).cast();
    // SAFETY: a value of this length; all the options' values are plain structures.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, len) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ports::frame_in_pieces;

    #[test]
    fn a_frame_in_more_pieces_than_a_call_takes_is_refused() {
        // The kernel checks messages of all kinds of sockets alike.
        let (family, kind) = (libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC);
        let mut pair = [0; 2];
        // SAFETY: room for two descriptors.
        check(unsafe { libc::socketpair(family, kind, 0, pair.as_mut_ptr()) }).unwrap();
        // SAFETY: the descriptors were just made, and nobody else owns them.
        let [socket, _peer] = pair.map(|number| unsafe { OwnedFd::from_raw_fd(number) });
        let mut port = PacketPort {
            socket,
            memory: Span::heap(64),
            control: Box::new([[0; CONTROL / 8]; BATCH]),
            vectors: Vec::new(),
            malformed: 0,
        };
        // Two more vectors are the header's and the head's.
        let most = libc::UIO_MAXIOV as usize - 2;
        for (pieces, frames) in [(most, 1), (most + 1, 0), (9000, 0)] {
            let delivered = port.deliver(&frame_in_pieces(pieces), &[Pick::default()]);
            assert_eq!((delivered.frames, delivered.refused), (frames, 1 - frames), "{pieces}");
        }
    }
}
