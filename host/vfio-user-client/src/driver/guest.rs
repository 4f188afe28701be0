//! A guest without a VMM, for drivers in tests and benchmarks: memory in a memfd, and eventfds as
//! interrupts. Functions over vfio-user are connected to it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags};
use slipway_ram::{DmaMap, Memory, Permissions, Region};
use slipway_vfio_user_spec::irq;

use super::{Registers, SharedRegisters};
use crate::{Client, ClientError, FunctionError, RemoteFunction};

/// Creates a memfd of `len` zero bytes, sealed against shrinking as servers demand of a client.
///
/// # Errors
/// The errors of memfd_create(2) and ftruncate(2).
pub fn sealed_memory(len: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("guest", flags)?;
    rustix::fs::ftruncate(&file, len)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
    Ok(file)
}

/// A guest without a VMM: memory that its drivers share with their functions, and the interrupts
/// that the functions raise.
pub struct TestGuest {
    /// The file of the memory.
    pub file: OwnedFd,
    /// The memory, for a driver.
    pub memory: Memory,
    /// An eventfd for each MSI-X vector from 0 on. The first one is the pin's for a function
    /// without vectors.
    pub interrupts: Vec<OwnedFd>,
    /// The address of the memory for functions, and its length in bytes.
    range: (u64, u64),
}

impl TestGuest {
    /// Makes a guest without interrupts. Its memory has `len` bytes, and functions address it from
    /// `base` on.
    ///
    /// # Errors
    /// The errors of [`sealed_memory`] and [`Region::mapped`].
    pub fn new(base: u64, len: u64) -> io::Result<Self> {
        let file = sealed_memory(len)?;
        let region = Region::mapped(file.as_fd(), 0, len, Permissions::READ_WRITE)?;
        let mut map = DmaMap::new();
        map.add(base, region).map_err(io::Error::other)?;
        Ok(Self { file, memory: map.memory(), interrupts: Vec::new(), range: (base, len) })
    }

    /// Returns the guest with `count` interrupts.
    ///
    /// # Errors
    /// The errors of eventfd(2).
    pub fn with_interrupts(mut self, count: u16) -> io::Result<Self> {
        let event = |_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        self.interrupts = (0..count).map(event).collect::<Result<Vec<_>, _>>()?;
        Ok(self)
    }

    /// Returns how often interrupt `number` was raised since the last call.
    ///
    /// # Panics
    /// The guest has no interrupt of this number.
    pub fn count(&self, number: usize) -> u64 {
        let mut bytes = [0; 8];
        let read = rustix::io::read(&self.interrupts[number], &mut bytes);
        read.map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    /// Returns the eventfds of all interrupts.
    fn events(&self) -> Vec<BorrowedFd<'_>> {
        self.interrupts.iter().map(AsFd::as_fd).collect()
    }

    /// Connects to the function at `path`, maps the memory and routes the interrupts. A wait for a
    /// reply takes at most `patience`, and so does a driver's wait by the returned registers.
    ///
    /// # Errors
    /// [`ClientError`] if the server cannot be reached, refuses a request or does not reply in
    /// time.
    pub fn connect(&self, path: &Path, patience: Duration) -> Result<Registers, ClientError> {
        let mut client = Client::connect(path, patience)?;
        let ((base, len), events) = (self.range, self.events());
        client.map(base, len, self.file.as_fd(), 0, true)?;
        match events.as_slice() {
            [] => {}
            [first, ..] if client.irq(irq::MSIX)?.count == 0 => {
                client.route_irqs(irq::INTX, 0, 1, &[*first])?;
            }
            all => client.route_irqs(irq::MSIX, 0, all.len() as u32, all)?,
        }
        Ok(Registers::new(client, patience))
    }

    /// Connects as [`TestGuest::connect`] does, and returns registers that several threads can use.
    ///
    /// # Errors
    /// [`FunctionError`] if the server cannot be reached, refuses a request or does not reply in
    /// time.
    pub fn connect_shared(
        &self,
        path: &Path,
        patience: Duration,
    ) -> Result<SharedRegisters, FunctionError> {
        let socket = UnixStream::connect(path);
        let socket = socket.map_err(|error| FunctionError::Connection(error.to_string()))?;
        let function = Arc::new(RemoteFunction::new(socket.into(), patience)?);
        self.attach(&function)?;
        Ok(SharedRegisters::new(function, patience))
    }

    /// Maps the memory for a function that is connected already, and routes its interrupts.
    ///
    /// # Errors
    /// [`FunctionError`] if the server refuses a request or does not reply in time.
    pub fn attach(&self, function: &RemoteFunction) -> Result<(), FunctionError> {
        let ((base, len), events) = (self.range, self.events());
        function.map_ram(base, len, self.file.as_fd(), 0)?;
        match (events.first(), function.vectors().count) {
            (None, _) => Ok(()),
            (Some(first), 0) => function.route_pin(Some(*first)),
            _ => function.route(0, &events),
        }
    }
}
