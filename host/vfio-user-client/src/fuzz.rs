//! The fuzz target on a server's messages: no server, no threads.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags,
    SocketType,
};
use slipway_vfio_user_spec::{self as spec, Command, HEADER_LEN, Header, U16, U32, U64};
use zerocopy::IntoBytes;

use crate::shape::IDENTIFIERS;
use crate::{MAX_STATE, RemoteFunction};

/// The waits of the client, which end as soon as the input does.
const PATIENCE: Duration = Duration::from_millis(1);
/// The size of region 0 in honest replies.
const SIZE: u64 = 0x4000;

/// Feeds `data` to a client, as what its server sends.
///
/// Bit 0 of the first byte: `data` is raw bytes. Otherwise it is a sequence of (kind, length,
/// payload), one for each request that the client makes. A kind of 0 has no length and no payload,
/// and stands for an honest reply. Otherwise the message has the payload, and the kind's bits say:
/// 0 to 1, how many descriptors come with it; 2, it is a command; 3, it is an error. For any input,
/// the client neither panics nor waits for longer than its patience.
///
/// # Panics
/// If a failed read does not give ones, or no descriptors are left.
pub fn fuzz(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let flags = SocketFlags::CLOEXEC;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let Ok((ours, theirs)) = pair else { return };
    match mode & 1 != 0 {
        true => send(&ours, data, &[]),
        false => replies(&ours, data),
    }
    let _ = rustix::net::shutdown(&ours, Shutdown::Write);
    let Ok(function) = RemoteFunction::new(theirs, PATIENCE) else { return };
    let mut bytes = [0; 4];
    if function.read(0, 0, &mut bytes).is_err() {
        assert_eq!(bytes, [0xff; 4]);
    }
    for offset in (0..SIZE).step_by(4) {
        let _ = function.ring(0, offset, 7);
    }
    let _ = function.notifications(0);
    let _ = function.write(0, 0, &bytes);
    let _ = function.file(0);
    if let Ok(state) = function.save() {
        assert!(state.len() <= MAX_STATE);
    }
    let _ = function.load(&bytes);
    let _ = function.reset();
    let _ = function.state();
}

/// Sends a reply to each of the requests that the client makes.
fn replies(ours: &OwnedFd, mut data: &[u8]) {
    let regions = [Command::DeviceGetRegionInfo; spec::region::COUNT as usize];
    let irqs = [Command::DeviceGetIrqInfo; spec::irq::COUNT as usize];
    let first = [Command::Version, Command::DeviceGetInfo];
    let last = [
        // The identifiers.
        Command::RegionRead,
        Command::DeviceGetRegionIoFds,
        Command::RegionRead,
        Command::RegionWrite,
        Command::DeviceGetRegionInfo,
        // It is saved, and a state is loaded.
        Command::DeviceFeature,
        Command::MigDataRead,
        Command::DeviceFeature,
        Command::DeviceFeature,
        Command::MigDataWrite,
        Command::DeviceFeature,
        Command::DeviceFeature,
        Command::DeviceReset,
    ];
    let commands = first.iter().chain(&regions).chain(&irqs).chain(&last);
    let (mut regions, mut reads) = (0, 0);
    for (id, command) in (1..).zip(commands) {
        let (kind, rest) = data.split_first().map_or((0, data), |(kind, rest)| (*kind, rest));
        data = rest;
        // The regions are asked for in order, and region 0 again at the end.
        let region = regions % spec::region::COUNT;
        regions += u32::from(*command == Command::DeviceGetRegionInfo);
        let bytes = if reads == 0 { IDENTIFIERS } else { 4 };
        reads += u32::from(*command == Command::RegionRead);
        if kind == 0 {
            let payload = honest(*command, region, bytes);
            message(ours, (id, *command, 0), &payload);
            continue;
        }
        let (len, rest) = data.split_first().map_or((0, data), |(len, rest)| (*len, rest));
        let (payload, rest) = rest.split_at(rest.len().min(usize::from(len)));
        data = rest;
        message(ours, (id, *command, kind), payload);
    }
}

fn message(ours: &OwnedFd, (id, command, kind): (u16, Command, u8), payload: &[u8]) {
    let role = if kind & 4 == 0 { spec::flag::REPLY } else { spec::flag::COMMAND };
    let flags = if kind & 8 == 0 { role } else { role | spec::flag::ERROR };
    let header = Header {
        id: U16::new(id),
        command: U16::new(command as u16),
        size: U32::new((HEADER_LEN + payload.len()) as u32),
        flags: U32::new(flags),
        error: U32::new(kind.into()),
    };
    let files = (0..kind & 3).filter_map(file).collect::<Vec<_>>();
    send(ours, &[header.as_bytes(), payload].concat(), &files);
}

/// Makes an eventfd, or memory that stays as it is.
fn file(number: u8) -> Option<OwnedFd> {
    if number == 0 {
        return eventfd(0, EventfdFlags::CLOEXEC).ok();
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("shadow", flags).ok()?;
    rustix::fs::ftruncate(&file, 4096).ok()?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).ok()?;
    Some(file)
}

fn send(ours: &OwnedFd, bytes: &[u8], files: &[OwnedFd]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let _ = rustix::net::sendmsg(ours, &[IoSlice::new(bytes)], &mut control, flags);
}

/// Returns the payload of an honest reply, for region `region` and with `bytes` of data where that
/// matters.
fn honest(command: Command, region: u32, bytes: usize) -> Vec<u8> {
    match command {
        Command::Version => vec![0, 0, 1, 0],
        Command::DeviceGetInfo => {
            let flags = U32::new(spec::DeviceFlags::PCI.bits());
            let (num_regions, num_irqs) = (spec::region::COUNT.into(), spec::irq::COUNT.into());
            let argsz = U32::new(16);
            spec::DeviceInfo { argsz, flags, num_regions, num_irqs }.as_bytes().to_vec()
        }
        Command::DeviceGetRegionInfo => {
            let size = match region {
                0 => SIZE,
                spec::region::CONFIG => 4096,
                _ => 0,
            };
            let flags = spec::RegionFlags::READ | spec::RegionFlags::WRITE;
            let (size, flags) = (U64::new(size), U32::new(flags.bits()));
            spec::RegionInfo { size, flags, ..Default::default() }.as_bytes().to_vec()
        }
        Command::DeviceGetIrqInfo => {
            spec::IrqInfo { count: U32::new(1), ..Default::default() }.as_bytes().to_vec()
        }
        Command::DeviceGetRegionIoFds => spec::RegionIoFds::default().as_bytes().to_vec(),
        Command::RegionRead => vec![0; size_of::<spec::RegionAccess>() + bytes],
        Command::DeviceFeature => vec![0; 16],
        Command::MigDataRead => [8, 0, 0, 0, 0, 0, 0, 0].to_vec(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Without this the target would exercise nothing.
    #[test]
    fn an_honest_server_is_understood() {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        replies(&ours, &[]);
        let function = RemoteFunction::new(theirs, Duration::from_secs(60)).unwrap();
        let mut bytes = [1; 4];
        function.read(0, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4]);
        function.write(0, 0, &bytes).unwrap();
        assert!(function.file(0).unwrap().is_none());
        assert!(function.save().unwrap().is_empty());
        function.load(&bytes).unwrap();
        function.reset().unwrap();
    }

    #[test]
    fn noise_does_no_harm() {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for round in 0..2000_u32 {
            let len = (next() % 600) as usize;
            let mut data: Vec<u8> = (0..len).map(|_| next() as u8).collect();
            // The first replies are honest, so that later ones are reached.
            let honest = (next() % 32) as usize;
            data.splice(0..0, vec![0; honest]);
            data.insert(0, (round % 2) as u8);
            fuzz(&data);
        }
    }
}
