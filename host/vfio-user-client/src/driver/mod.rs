//! For programs that drive a function without a VMM, such as tests and benchmarks: a guest's memory
//! and interrupts ([`TestGuest`]), registers of BAR 0 ([`Registers`], [`SharedRegisters`]),
//! registers that are mapped, memory without a file, and single requests.

mod guest;
mod registers;

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use slipway_vfio_user_spec::{
    Command, DeviceInfo, DmaMap, DmaUnmap, IrqInfo, RegionAccess, RegionFlags, RegionInfo, irq,
};
use zerocopy::IntoBytes;

use crate::client::{ROOM, copy_read, described, interrupt};
use crate::remote::duplicate;
use crate::told::set_unmask;
use crate::{
    Client, ClientError, FunctionError, IrqDescription, RegionDescription, RegisterWindow,
    RemoteFunction,
};

pub use guest::{TestGuest, sealed_memory};
pub use registers::{Registers, SharedRegisters};

impl Client {
    /// Connects to the socket at `path` and negotiates. Every wait takes at most `timeout`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &address)?;
        Self::negotiate(socket, timeout)
    }

    /// Negotiates on a connected stream socket.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn negotiate(socket: OwnedFd, timeout: Duration) -> Result<Self, ClientError> {
        Self::begin(socket, timeout, None)
    }

    /// Negotiates on a connected stream socket as a VMM does ([`RemoteFunction::new`]): writes to
    /// registers wait for the server only where it wants that ([`Client::put`]).
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn negotiate_as_vmm(socket: OwnedFd, timeout: Duration) -> Result<Self, ClientError> {
        Self::begin(socket, timeout, Some(true))
    }

    /// Asks for the description of the device.
    pub fn device_info(&mut self) -> Result<DeviceInfo, ClientError> {
        self.ask(Command::DeviceGetInfo, &DeviceInfo::request())
    }

    /// Removes a map. When this returns, the device does not access the memory any more.
    pub fn unmap(&mut self, iova: u64, len: u64) -> Result<(), ClientError> {
        let request = DmaUnmap::new(iova, len);
        self.call(Command::DmaUnmap, request.as_bytes(), &[]).map(drop)
    }

    /// Resets the device.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn reset(&mut self) -> Result<(), ClientError> {
        self.call(Command::DeviceReset, &[], &[]).map(drop)
    }

    /// Makes a wait for a reply look for it again and again for `time` before the thread sleeps:
    /// for a driver that has its processor for itself. Zero, as at first, sleeps at once.
    pub fn spin(&mut self, time: Duration) {
        self.spin = time;
    }

    /// Returns the server's process (`SO_PEERCRED`: the process that began to listen). Returns
    /// `None` if that process is in another PID namespace.
    pub fn server_pid(&self) -> Option<u32> {
        let peer = slipway_peer::Peer::of(self.wire.file()).ok()?;
        Some(peer.pid).filter(|pid| *pid > 0)
    }

    /// Asks for the description of a region.
    pub fn region(&mut self, index: u32) -> Result<RegionDescription, ClientError> {
        described(self.call(
            Command::DeviceGetRegionInfo,
            RegionInfo::request(index, ROOM).as_bytes(),
            &[],
        )?)
    }

    /// Asks for the description of an interrupt type.
    pub fn irq(&mut self, index: u32) -> Result<IrqDescription, ClientError> {
        Ok(interrupt(&self.ask(Command::DeviceGetIrqInfo, &IrqInfo::request(index))?))
    }

    /// Maps the part of region `index` that holds byte `offset`. Returns `None` if the server does
    /// not permit to map that part, which is then accessed by messages.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Malformed`] if the part that the server describes cannot be
    /// mapped.
    pub fn window(
        &mut self,
        index: u32,
        offset: u64,
    ) -> Result<Option<RegisterWindow>, ClientError> {
        const MOST: u64 = 1 << 30;
        let region = self.region(index)?;
        let Some(file) = region.file.filter(|_| region.flags.contains(RegionFlags::MMAP)) else {
            return Ok(None);
        };
        let whole = [(0, region.size)];
        let areas = if region.areas.is_empty() { &whole[..] } else { &region.areas };
        let holds = |area: &&(u64, u64)| {
            area.0 <= offset && area.0.checked_add(area.1).is_some_and(|end| offset < end)
        };
        let Some(&(start, len)) = areas.iter().find(holds) else { return Ok(None) };
        let file_offset = region.file_offset.checked_add(start).filter(|_| len <= MOST);
        let file_offset = file_offset.ok_or(ClientError::Malformed("area of a region"))?;
        let window = RegisterWindow::map(file, file_offset, start, len as usize);
        window.map(Some).map_err(|_| ClientError::Malformed("an area that cannot be mapped"))
    }

    /// Reads a 32-bit register.
    pub fn read_u32(&mut self, region: u32, offset: u64) -> Result<u32, ClientError> {
        let mut bytes = [0; 4];
        self.read(region, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Writes the registers at one offset of a region as [`Client::post`], then reads the ones at
    /// another. Both requests go out in one system call.
    ///
    /// # Errors
    /// [`ClientError`]; a refusal is that of the read.
    pub fn post_and_read(
        &mut self,
        region: u32,
        (offset, from): (u64, &[u8]),
        (at, into): (u64, &mut [u8]),
    ) -> Result<(), ClientError> {
        let (posted, write) = self.posted(region, offset, from);
        let read = RegionAccess::new(region, at, into.len());
        let header = self.header(Command::RegionRead, size_of_val(&read));
        // The second message follows the first one's payload.
        let both = [&write[..], header.as_bytes(), read.as_bytes()].concat();
        let deadline = self.deadline();
        self.send(deadline, &posted, &both, &[])?;
        let reply = self.next_message(deadline, &[header])?;
        copy_read(&self.checked(Command::RegionRead, reply)?, into)
    }

    /// Permits the device to access `content` under the address `iova`, by messages.
    pub fn map_remote(
        &mut self,
        iova: u64,
        content: Vec<u8>,
        writable: bool,
    ) -> Result<(), ClientError> {
        let request = DmaMap::new(iova, content.len() as u64, 0, writable);
        self.memory.0.insert(iova, content);
        let outcome = self.call(Command::DmaMap, request.as_bytes(), &[]).map(drop);
        if outcome.is_err() {
            self.memory.0.remove(&iova);
        }
        outcome
    }

    /// Removes message-only memory, and returns its content. When this returns, the device does not
    /// access the memory any more.
    pub fn unmap_remote(&mut self, iova: u64, len: u64) -> Result<Option<Vec<u8>>, ClientError> {
        self.unmap(iova, len)?;
        Ok(self.memory.0.remove(&iova))
    }

    /// Returns the content of the message-only memory at `iova`.
    pub fn remote(&self, iova: u64) -> Option<&[u8]> {
        self.memory.0.get(&iova).map(Vec::as_slice)
    }

    /// Serves the server's accesses to message-only memory until `time` has passed.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn serve(&mut self, time: Duration) -> Result<(), ClientError> {
        match self.next_message(Instant::now() + time, &[]) {
            Err(ClientError::Timeout) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(ClientError::Malformed("a reply to nothing")),
        }
    }
}

impl RemoteFunction {
    /// Writes registers without waiting for the server to do it; without a message where
    /// [`RemoteFunction::ring`] does that. Waits all the same if a successor of the server would go
    /// on with the function: a message that the server has not read is lost with it.
    ///
    /// # Errors
    /// As [`RemoteFunction::write`], but what the server refuses is dropped.
    pub fn post(&self, region: u32, offset: u64, from: &[u8]) -> Result<(), FunctionError> {
        self.check(region, offset, from.len(), RegionFlags::WRITE)?;
        if let Ok(value) = from.try_into()
            && self.ring(region, offset, u32::from_le_bytes(value))
        {
            return Ok(());
        }
        self.perform(|client| match client.resumes() {
            true => client.write(region, offset, from),
            false => client.post(region, offset, from),
        })
    }

    /// Returns a descriptor for the mappable areas of `region`, and the offset in it of the
    /// region's first byte. Returns `None` if the region cannot be mapped. After
    /// [`RemoteFunction::reconnect`], the descriptor is another one.
    ///
    /// The file is sealed against shrinking: a server cannot take its pages away.
    ///
    /// # Errors
    /// [`FunctionError`]; [`FunctionError::Refused`] with `EPERM` if the file is not sealed.
    pub fn file(&self, region: u32) -> Result<Option<(OwnedFd, u64)>, FunctionError> {
        let described = self.perform(|client| client.region(region))?;
        let Some(file) = described.file else { return Ok(None) };
        let seals = rustix::fs::fcntl_get_seals(&file);
        if !seals.is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK)) {
            return Err(FunctionError::Refused(Errno::PERM));
        }
        // It is memory, so closing it never waits.
        Ok(Some((file.into_owned(), described.file_offset)))
    }

    /// Permits the function to read and write RAM, as [`RemoteFunction::map`] does.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    pub fn map_ram(
        &self,
        iova: u64,
        len: u64,
        file: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<(), FunctionError> {
        self.map(iova, len, file, offset, true)
    }

    /// Takes memory back: exactly what one [`RemoteFunction::map`] gave. When this returns without
    /// an error, a connected function does not access the memory any more. A server whose
    /// connection ended is held to nothing: its process may still have the memory mapped.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    pub fn unmap(&self, iova: u64, len: u64) -> Result<(), FunctionError> {
        let undo = |client: &mut Client| client.unmap(iova, len).map(drop);
        self.tell(undo, |told| drop(told.ram.remove(&iova)))
    }

    /// Sets the eventfd that unmasks the interrupt pin (a resample eventfd of KVM), or none.
    ///
    /// # Errors
    /// [`FunctionError::Refused`], [`FunctionError::Broken`].
    pub fn unmask_pin_by(&self, file: Option<BorrowedFd<'_>>) -> Result<(), FunctionError> {
        let kept = file.map(duplicate).transpose()?;
        self.tell(|client| set_unmask(client, file), |told| told.unmask = kept)
    }

    /// Removes the routes of MSI-X vectors.
    ///
    /// # Errors
    /// As [`RemoteFunction::route`].
    pub fn unroute(&self, vectors: Range<u32>) -> Result<(), FunctionError> {
        self.check_vectors(vectors.clone())?;
        if vectors.is_empty() {
            return Ok(());
        }
        let (start, count) = (vectors.start, vectors.end - vectors.start);
        self.tell(
            |client| client.route_irqs(irq::MSIX, start, count, &[]),
            |told| told.vectors.retain(|vector, _| !vectors.contains(vector)),
        )
    }
}
