//! A server in a few lines, whose answers a test spoils.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use slipway_vfio_user_client::{FunctionError, RemoteFunction};
use slipway_vfio_user_spec::{self as spec, Command, Header, U32, U64, region};
use zerocopy::{FromBytes, IntoBytes};

/// The size of region 0.
pub const SIZE: u64 = 0x4000;

/// A message to the client, byte for byte, with its descriptors.
pub struct Sent {
    pub bytes: Vec<u8>,
    pub files: Vec<OwnedFd>,
}

/// The server's way of dealing with a request.
pub enum Act {
    /// Answers as a server should.
    Honest,
    /// Sends this.
    Send(Sent),
    /// Sends this and hangs up.
    SendAndLeave(Sent),
    /// Does not answer this request or any other, and does not hang up either.
    Silence,
}

/// Returns a reply to `header` with `payload`.
pub fn reply(header: &Header, payload: &[u8]) -> Sent {
    let head = header.reply(payload.len());
    Sent { bytes: [head.as_bytes(), payload].concat(), files: Vec::new() }
}

/// Starts a server on one end of a socket pair, and returns the other. `spoil` decides about each
/// request, with its payload.
pub fn start(mut spoil: impl FnMut(&Header, &[u8]) -> Act + Send + 'static) -> OwnedFd {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || {
        while let Some((header, payload)) = next(&ours) {
            match spoil(&header, &payload) {
                Act::Honest => send(&ours, &honest(&header, &payload)),
                Act::Send(sent) => send(&ours, &sent),
                Act::SendAndLeave(sent) => return send(&ours, &sent),
                Act::Silence => {
                    let _ = (&ours).read_to_end(&mut Vec::new());
                    return;
                }
            }
        }
    });
    theirs.into()
}

/// Connects to a server that is honest about all but requests with `command`.
pub fn liar(
    command: Command,
    patience: Duration,
    mut spoil: impl FnMut(&Header, &[u8]) -> Act + Send + 'static,
) -> Result<RemoteFunction, FunctionError> {
    let socket = start(move |header, payload| match header.command.get() == command as u16 {
        true => spoil(header, payload),
        false => Act::Honest,
    });
    RemoteFunction::new(socket, patience)
}

fn next(mut socket: &UnixStream) -> Option<(Header, Vec<u8>)> {
    let mut head = [0; 16];
    // Descriptors come with the first byte.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut head)];
    let received =
        rustix::net::recvmsg(socket, parts, &mut control, RecvFlags::WAITALL).ok()?.bytes;
    (received == head.len()).then_some(())?;
    let header = Header::read_from_bytes(&head).unwrap();
    let mut payload = vec![0; header.size.get() as usize - head.len()];
    socket.read_exact(&mut payload).ok()?;
    Some((header, payload))
}

fn send(socket: &UnixStream, sent: &Sent) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = sent.files.iter().map(AsFd::as_fd).collect();
    if !files.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    }
    // The client may have hung up.
    let parts = [IoSlice::new(&sent.bytes)];
    let _ = rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL);
}

/// Answers as a server of a function with one BAR and two vectors, whose registers read as zero.
pub fn honest(header: &Header, payload: &[u8]) -> Sent {
    let first = |at: usize| payload.get(at..at + 4).map_or(0, |bytes| bytes[0]);
    match Command::from_code(header.command.get()).unwrap() {
        Command::Version => reply(header, &[0, 0, 1, 0]),
        Command::DeviceGetInfo => {
            let info = spec::DeviceInfo {
                argsz: U32::new(16),
                flags: U32::new(spec::DeviceFlags::PCI.bits()),
                num_regions: U32::new(region::COUNT),
                num_irqs: U32::new(spec::irq::COUNT),
            };
            reply(header, info.as_bytes())
        }
        Command::DeviceGetRegionInfo => reply(header, region_info(first(8)).as_bytes()),
        Command::DeviceGetRegionIoFds => {
            let none = spec::RegionIoFds { argsz: U32::new(16), ..Default::default() };
            reply(header, none.as_bytes())
        }
        Command::DeviceGetIrqInfo => {
            let count = if u32::from(first(8)) == spec::irq::MSIX { 2 } else { 0 };
            let info = spec::IrqInfo { count: U32::new(count), ..Default::default() };
            reply(header, info.as_bytes())
        }
        Command::RegionRead => {
            let (access, _) = spec::RegionAccess::read_from_prefix(payload).unwrap();
            reply(header, &[access.as_bytes(), &vec![0; access.count.get() as usize]].concat())
        }
        _ => reply(header, &[]),
    }
}

pub fn region_info(index: u8) -> spec::RegionInfo {
    let size = match u32::from(index) {
        0 => SIZE,
        region::CONFIG => 4096,
        _ => 0,
    };
    let flags = spec::RegionFlags::READ | spec::RegionFlags::WRITE;
    spec::RegionInfo {
        argsz: U32::new(32),
        flags: U32::new(flags.bits()),
        index: U32::new(index.into()),
        size: U64::new(size),
        ..Default::default()
    }
}
