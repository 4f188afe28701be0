//! Guest memory, and a driver's registers behind a socket.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use slipway_pci::driver::{AccessError, RegisterAccess};
use slipway_ram::{DmaMap, Memory, Permissions, Region};
use slipway_vfio_user_client::{FunctionError, RemoteFunction};

pub use slipway_vfio_user::testing::{PATIENCE, eventually};

pub const MEMORY: u64 = 8 << 20;

/// Memory that a driver and its functions share.
pub struct Guest {
    pub file: OwnedFd,
    map: DmaMap,
    /// The eventfds of the interrupts.
    pub interrupts: Vec<OwnedFd>,
}

impl Guest {
    pub fn new(interrupts: u16) -> Self {
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("guest", flags).unwrap();
        rustix::fs::ftruncate(&file, MEMORY).unwrap();
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
        let mut map = DmaMap::new();
        let region = Region::mapped(file.as_fd(), 0, MEMORY, Permissions::READ_WRITE).unwrap();
        map.add(0, region).unwrap();
        let event = |_| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        Self { file, map, interrupts: (0..interrupts).map(event).collect() }
    }

    pub fn memory(&self) -> Memory {
        self.map.memory()
    }

    /// Connects to the endpoint at `path`, gives it the memory, and routes the interrupts.
    pub fn connect(&self, path: &Path) -> Registers {
        let socket = UnixStream::connect(path).unwrap();
        let function = RemoteFunction::new(socket.into(), PATIENCE).unwrap();
        function.map_ram(0, MEMORY, self.file.as_fd(), 0).unwrap();
        let files: Vec<_> = self.interrupts.iter().map(AsFd::as_fd).collect();
        match function.vectors().count {
            0 => function.route_pin(files.first().copied()).unwrap(),
            _ => function.route(0, &files).unwrap(),
        }
        Registers(Arc::new(function), Instant::now())
    }

    /// Returns how often interrupt `number` came since the last call.
    pub fn count(&self, number: usize) -> u64 {
        let mut bytes = [0; 8];
        let read = rustix::io::read(&self.interrupts[number], &mut bytes);
        read.map_or(0, |_| u64::from_ne_bytes(bytes))
    }
}

/// A driver's registers behind a socket.
pub struct Registers(pub Arc<RemoteFunction>, Instant);

fn failed(error: FunctionError) -> AccessError {
    AccessError(error.to_string())
}

impl RegisterAccess for Registers {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.0.read(0, offset, into).map_err(failed)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.1 = Instant::now();
        self.0.write(0, offset, from).map_err(failed)
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.1 = Instant::now();
        self.0.post(0, offset, from).map_err(failed)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        std::thread::yield_now();
        match self.1.elapsed() > PATIENCE {
            true => Err(AccessError("the function does not answer".into())),
            false => Ok(()),
        }
    }
}
