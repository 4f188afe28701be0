//! A served test function and a client that speaks raw bytes.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

pub use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use slipway_peer::Bin;
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::testing::{DOORBELLS, Knobs, Scratch};
pub use slipway_vfio_user::{Config, DoorbellMode};
use slipway_vfio_user::{Control, Endpoint, EndpointParts};
pub use slipway_vfio_user_client::Client;
pub use slipway_vfio_user_spec as spec;
pub use spec::{Command, Header, U32, U64};
pub use zerocopy::{FromBytes, IntoBytes};

pub use slipway_vfio_user::testing::{PATIENCE, eventually};

pub struct Served {
    pub path: PathBuf,
    pub control: Control,
    pub knobs: Arc<Knobs>,
    pub reactor: Arc<Reactor>,
    /// The bin for everything that the endpoint's clients leave.
    pub bin: Bin,
    _directory: tempfile::TempDir,
}

/// Serves the test function on a reactor of its own, with defaults.
pub fn serve() -> Served {
    serve_with(|_| {})
}

pub fn serve_with(change: impl FnOnce(&mut Config)) -> Served {
    serve_on(Arc::new(Reactor::spawn(Settings::default()).unwrap()), change)
}

pub fn serve_on(reactor: Arc<Reactor>, change: impl FnOnce(&mut Config)) -> Served {
    serve_parts(reactor, change, EndpointParts::new)
}

/// Serves the test function with the endpoint's parts that `make` returns.
pub fn serve_parts(
    reactor: Arc<Reactor>,
    change: impl FnOnce(&mut Config),
    make: impl FnOnce(&Config) -> EndpointParts,
) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let mut config = Config::at(directory.path().join("socket"));
    change(&mut config);
    let path = config.location.socket();
    let mut parts = make(&config);
    let bin = parts.bin();
    let doorbells = parts.doorbells(DOORBELLS).unwrap();
    let knobs = Arc::<Knobs>::default();
    let function = Scratch::new(parts.memory(), &parts.interrupts(), doorbells, knobs.clone());
    let endpoint =
        Endpoint::new(config, parts, Box::new(function), Vec::new(), &reactor.handle()).unwrap();
    let control = endpoint.control();
    reactor.handle().add(Box::new(endpoint)).unwrap();
    Served { path, control, knobs, reactor, bin, _directory: directory }
}

impl Served {
    /// Connects a raw client and negotiates.
    pub fn client(&self) -> Raw {
        let mut raw = self.connect();
        raw.negotiate();
        raw
    }

    pub fn connect(&self) -> Raw {
        Raw::new(connect(&self.path))
    }
}

pub fn connect(path: &std::path::Path) -> OwnedFd {
    let address = SocketAddrUnix::new(path).unwrap();
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    rustix::net::connect(&socket, &address).unwrap();
    socket
}

/// Prints that a test was skipped. It does not use `println!`, whose output is hidden if a test
/// passes.
pub fn skipped(test: &str, needs: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: needs {needs}");
}

pub struct Reply {
    pub header: Header,
    pub payload: Vec<u8>,
    pub files: Vec<OwnedFd>,
}

impl Reply {
    /// Returns the payload of a successful reply.
    pub fn ok(self) -> Vec<u8> {
        assert_eq!(self.header.errno(), None);
        self.payload
    }

    pub fn read<T: FromBytes>(self) -> T {
        let Ok(value) = T::read_from_bytes(&self.ok()) else { panic!("a payload of another size") };
        value
    }

    /// Returns the errno of a failed reply, which has no payload.
    pub fn err(self) -> Errno {
        let errno = self.header.errno().expect("an error was expected");
        assert_ne!(errno, 0, "an error reply always says which");
        assert!(self.payload.is_empty() && self.files.is_empty());
        Errno::from_raw_os_error(errno as i32)
    }
}

pub struct Raw {
    pub socket: OwnedFd,
    next_id: u16,
}

impl Raw {
    pub fn new(socket: OwnedFd) -> Self {
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(PATIENCE),
        )
        .unwrap();
        Self { socket, next_id: 100 }
    }

    pub fn negotiate(&mut self) {
        let data = b"{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":1048576,\
            \"pgsizes\":4096,\"max_dma_maps\":65535,\"write_multiple\":true}}\0";
        let version = [&[0, 0, 1, 0], &data[..]].concat();
        self.call(Command::Version, &version).ok();
    }

    pub fn call(&mut self, command: Command, payload: &[u8]) -> Reply {
        self.call_with(command, payload, &[])
    }

    pub fn call_with(
        &mut self,
        command: Command,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Reply {
        let header = self.header(command as u16, payload.len());
        self.send(&[header.as_bytes(), payload].concat(), files);
        let reply = self.reply();
        assert_eq!(reply.header.id.get(), header.id.get());
        assert_eq!(reply.header.command.get(), header.command.get());
        reply
    }

    pub fn header(&mut self, command: u16, payload: usize) -> Header {
        self.next_id += 1;
        let mut header = Header::command(self.next_id, Command::Version, payload);
        header.command = spec::U16::new(command);
        header
    }

    pub fn send(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        assert_eq!(self.try_send(bytes, files), Ok(bytes.len()));
    }

    pub fn try_send(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        }
        let parts = [IoSlice::new(bytes)];
        rustix::net::sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL)
    }

    /// Returns the next message of the server.
    pub fn reply(&mut self) -> Reply {
        self.try_reply().expect("the server hung up")
    }

    /// Returns the next message of the server, or `None` if the server has hung up.
    pub fn try_reply(&mut self) -> Option<Reply> {
        let mut files = Vec::new();
        let header = self.exactly(16, &mut files)?;
        let header = Header::read_from_bytes(&header).unwrap();
        let left = header.size.get() as usize - 16;
        let payload = self.exactly(left, &mut files)?;
        Some(Reply { header, payload, files })
    }

    fn exactly(&mut self, len: usize, files: &mut Vec<OwnedFd>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [std::io::IoSliceMut::new(&mut bytes[done..])];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let got = match rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags) {
                Err(Errno::CONNRESET) => return None,
                got => got.expect("the server did not answer in time").bytes,
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    files.extend(more);
                }
            }
            if got == 0 {
                return None;
            }
            done += got;
        }
        Some(bytes)
    }

    pub fn read_u32(&mut self, offset: u64) -> u32 {
        let payload = self.call(Command::RegionRead, access(0, offset, 4).as_bytes()).ok();
        u32::from_le_bytes(payload[16..].try_into().unwrap())
    }

    pub fn write_u32(&mut self, offset: u64, value: u32) {
        let payload = [access(0, offset, 4).as_bytes(), &value.to_le_bytes()].concat();
        self.call(Command::RegionWrite, &payload).ok();
    }

    pub fn map(&mut self, iova: u64, len: u64, file: BorrowedFd<'_>) -> Reply {
        self.call_with(Command::DmaMap, dma_map(iova, len).as_bytes(), &[file])
    }

    pub fn is_alive(&mut self) -> bool {
        self.read_u32(0) == slipway_vfio_user::testing::ID
    }
}

pub fn access(region: u32, offset: u64, count: u32) -> spec::RegionAccess {
    spec::RegionAccess {
        offset: U64::new(offset),
        region: U32::new(region),
        count: U32::new(count),
    }
}

pub fn dma_map(iova: u64, len: u64) -> spec::DmaMap {
    spec::DmaMap {
        argsz: U32::new(32),
        flags: U32::new(3),
        offset: U64::new(0),
        address: U64::new(iova),
        size: U64::new(len),
    }
}

pub fn dma_unmap(iova: u64, len: u64) -> spec::DmaUnmap {
    spec::DmaUnmap {
        argsz: U32::new(24),
        flags: U32::new(0),
        address: U64::new(iova),
        size: U64::new(len),
    }
}

/// Returns memory of the kind that VMMs pass.
pub fn memory(len: u64) -> OwnedFd {
    slipway_vfio_user_client::sealed_memory(len).unwrap()
}

pub fn event() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap()
}

/// Returns the eventfd's count since the last call.
pub fn count(file: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    match rustix::io::read(file, &mut bytes) {
        Ok(_) => u64::from_ne_bytes(bytes),
        Err(_) => 0,
    }
}

pub fn pread(file: &OwnedFd, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert_eq!(rustix::io::pread(file, &mut bytes, offset).unwrap(), len);
    bytes
}

pub fn pwrite(file: impl AsFd, offset: u64, bytes: &[u8]) {
    assert_eq!(rustix::io::pwrite(file, bytes, offset).unwrap(), bytes.len());
}
